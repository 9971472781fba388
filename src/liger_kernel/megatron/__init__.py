"""Megatron-Core: `apply_liger_kernel_to_megatron` puts the kernels under it, the layers are also usable in specs.

rms_norm.py, cross_entropy.py, swiglu.py    the layers: importing them needs torch alone
head.py                                     output layer and loss of a model in one
monkey_patch.py                             what is rebound in megatron.core, and when
"""

from liger_kernel.megatron.cross_entropy import LigerMegatronCrossEntropy
from liger_kernel.megatron.monkey_patch import apply_liger_kernel_to_megatron
from liger_kernel.megatron.rms_norm import LigerMegatronRMSNorm
from liger_kernel.megatron.swiglu import LigerMegatronSwiGLU

__all__ = [
    "LigerMegatronCrossEntropy",
    "LigerMegatronRMSNorm",
    "LigerMegatronSwiGLU",
    "apply_liger_kernel_to_megatron",
]
