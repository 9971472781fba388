"""ReGLU.   y = relu(gate) * up

    gate, up, y: [*, F], or gate and up as the halves of one packed [*, 2F]

Memory  reads gate and up, writes y, keeps its inputs only; backward reads dy, gate and up, writes both gradients in one
        pass.
Paper   Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202
The kernels and the derivation are those of `_gated.py`.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import _gated
from liger_kernel.ops._op import Op, first_order
from liger_kernel.ops._reuse import saved

# 1 reference


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """The definition."""
    return torch.relu(gate) * up


def reference_packed(gate_up: Tensor) -> Tensor:
    """The definition on the two halves of the last dimension."""
    return reference(*_gated.halves(gate_up))


# 2 op


class _ReGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated.gated_forward(gate, up, "relu", 1.0, 1.0)

    @staticmethod
    @first_order("reglu")
    def backward(ctx: Any, dy: Tensor) -> Any:
        (gate, up), rooms = saved(ctx)
        need_dgate, need_dup = ctx.needs_input_grad
        dgate, dup = _gated.gated_backward(
            dy, gate, up, "relu", 1.0, 1.0, need_dgate, need_dup, *rooms
        )
        return dgate if need_dgate else None, dup if need_dup else None


class _ReGLUPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _gated.gated_forward(*_gated.halves(gate_up), "relu", 1.0, 1.0)

    @staticmethod
    @first_order("reglu_packed")
    def backward(ctx: Any, dy: Tensor) -> Any:
        (gate_up,), rooms = saved(ctx)
        return _gated.gated_packed_backward(dy, gate_up, "relu", 1.0, 1.0, *rooms)


OP = Op(
    "reglu",
    reference,
    reference,
    _ReGLU.apply,
    _gated.supports,
    _gated.cost,
    rows=2,
    elementwise=True,
)
OP_PACKED = Op(
    "reglu_packed",
    reference_packed,
    reference_packed,
    _ReGLUPacked.apply,
    _gated.supports_packed,
    _gated.cost_packed,
    rows=1,
)

# 3 public


def reglu(gate: Tensor, up: Tensor, impl: str | None = None) -> Tensor:
    """relu(gate) * up, the activation of a gated MLP.

    Args:
        gate, up: `[*, F]` of one shape, any rank and strides; fp16, bf16, fp32 (fp64 on the torch path), also mixed.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, F]`, contiguous, in the promoted dtype of gate and up.
    Memory:
        Keeps gate and up for backward, which writes their gradients over them if nobody else holds them.
    Raises:
        ValueError: gate and up differ in shape.
    """
    _gated.check_pair("reglu", gate, up)
    return OP(gate, up, impl=impl)


def reglu_packed(gate_up: Tensor, impl: str | None = None) -> Tensor:
    """`reglu` of the two halves of one projection, read in place; the gradient is one tensor too.

    Args:
        gate_up: `[*, 2F]`, gate in the first half of the last dimension, up in the second; dtypes as `reglu`.
        impl: as `reglu`.
    Returns:
        `[*, F]`, contiguous, in gate_up's dtype.
    Memory:
        Keeps gate_up for backward, which writes its gradient over it if nobody else holds it.
    Raises:
        ValueError: the last dimension is odd.
    """
    _gated.check_packed("reglu_packed", gate_up)
    return OP_PACKED(gate_up, impl=impl)
