"""The vocabulary head engine: losses over a vocabulary without its logits."""

from liger_kernel.ops.head.params import HeadParams
from liger_kernel.ops.head.plan import Plan, plan

__all__ = ["HeadParams", "Plan", "plan"]
