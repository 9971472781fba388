"""SwiGLU.   y = down_multiplier * silu(gate_multiplier * gate) * up,   silu(g) = g * sigmoid(g)

    gate, up, y: [*, F], or gate and up as the halves of one packed [*, 2F]

Casts   silu in fp32, rounded to gate's dtype before it meets up, as Hugging Face's MLPs do; y has the promoted dtype.
Memory  reads gate and up, writes y, keeps its inputs only; backward recomputes silu, writes both gradients in one pass.
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


def reference(
    gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """The definition, with the roundings of Hugging Face's modules. A multiplier of 1 costs nothing."""
    g = gate if gate_multiplier == 1.0 else gate * gate_multiplier
    y = torch.nn.functional.silu(g) * up
    return y if down_multiplier == 1.0 else y * down_multiplier


def reference_packed(
    gate_up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """The definition on the two halves of the last dimension."""
    return reference(*_gated.halves(gate_up), gate_multiplier, down_multiplier)


# 2 op


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.multipliers = gate_multiplier, down_multiplier
        return _gated.gated_forward(gate, up, "silu", gate_multiplier, down_multiplier)

    @staticmethod
    @first_order("swiglu")
    def backward(ctx: Any, dy: Tensor) -> Any:
        ((gate, up), rooms), (scale, down) = saved(ctx), ctx.multipliers
        need_dgate, need_dup = ctx.needs_input_grad[:2]
        dgate, dup = _gated.gated_backward(
            dy, gate, up, "silu", scale, down, need_dgate, need_dup, *rooms
        )
        return dgate if need_dgate else None, dup if need_dup else None, None, None


class _SwiGLUPacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, gate_multiplier: float, down_multiplier: float
    ) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.multipliers = gate_multiplier, down_multiplier
        gate, up = _gated.halves(gate_up)
        return _gated.gated_forward(gate, up, "silu", gate_multiplier, down_multiplier)

    @staticmethod
    @first_order("swiglu_packed")
    def backward(ctx: Any, dy: Tensor) -> Any:
        ((gate_up,), rooms), (scale, down) = saved(ctx), ctx.multipliers
        dgate_up = _gated.gated_packed_backward(dy, gate_up, "silu", scale, down, *rooms)
        return dgate_up, None, None


OP = Op(
    "swiglu",
    reference,
    reference,
    _SwiGLU.apply,
    _gated.supports,
    _gated.cost,
    rows=2,
    elementwise=True,
)
OP_PACKED = Op(
    "swiglu_packed",
    reference_packed,
    reference_packed,
    _SwiGLUPacked.apply,
    _gated.supports_packed,
    _gated.cost_packed,
    rows=1,
)

# 3 public


def swiglu(
    gate: Tensor,
    up: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    impl: str | None = None,
) -> Tensor:
    """down_multiplier * silu(gate_multiplier * gate) * up, the activation of a gated MLP.

    Args:
        gate, up: `[*, F]` of one shape, any rank and strides; fp16, bf16, fp32 (fp64 on the torch path), also mixed.
        gate_multiplier: scales gate before silu (Falcon-H1).
        down_multiplier: scales the product.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, F]`, contiguous, in the promoted dtype of gate and up.
    Memory:
        Keeps gate and up for backward, which writes their gradients over them if nobody else holds them.
    Raises:
        ValueError: gate and up differ in shape.
    """
    _gated.check_pair("swiglu", gate, up)
    return OP(gate, up, gate_multiplier, down_multiplier, impl=impl)


def swiglu_packed(
    gate_up: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    impl: str | None = None,
) -> Tensor:
    """`swiglu` of the two halves of one projection, read in place; the gradient is one tensor too.

    Args:
        gate_up: `[*, 2F]`, gate in the first half of the last dimension, up in the second; dtypes as `swiglu`.
        gate_multiplier, down_multiplier, impl: as `swiglu`.
    Returns:
        `[*, F]`, contiguous, in gate_up's dtype.
    Memory:
        Keeps gate_up for backward, which writes its gradient over it if nobody else holds it.
    Raises:
        ValueError: the last dimension is odd.
    """
    _gated.check_packed("swiglu_packed", gate_up)
    return OP_PACKED(gate_up, gate_multiplier, down_multiplier, impl=impl)


# The names other libraries call


class LigerSiLUMulFunction:
    """`apply(a, b, gate_multiplier=1.0, down_multiplier=1.0)` is `swiglu`."""

    apply = staticmethod(swiglu)


class LigerFusedGateUpSiLUMulFunction:
    """`apply(y, in_place=False)` is `swiglu_packed(y)`; `in_place` is accepted, and y is left as it is either way."""

    @staticmethod
    def apply(y: Tensor, in_place: bool = False) -> Tensor:
        return swiglu_packed(y)


def swiglu_forward(
    a: Tensor, b: Tensor, gate_multiplier: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """-> a, b, silu(gate_multiplier * a) * b, by the kernel and outside autograd."""
    return a, b, _gated.gated_forward(a, b, "silu", gate_multiplier, 1.0)


def swiglu_backward(
    a: Tensor, b: Tensor, dc: Tensor, gate_multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """-> da, db in new tensors, by the kernel and outside autograd."""
    return _gated.gated_backward(dc, a, b, "silu", gate_multiplier, 1.0, True, True)


def swiglu_fused_gate_up_forward(y: Tensor) -> Tensor:
    """-> silu(gate) * up of the halves of y, by the kernel and outside autograd."""
    return _gated.gated_forward(*_gated.halves(y), "silu", 1.0, 1.0)


def swiglu_fused_gate_up_backward(y: Tensor, dc: Tensor, in_place: bool = False) -> Tensor:
    """-> dy in a new tensor, by the kernel and outside autograd; `in_place` is accepted and changes nothing."""
    return _gated.gated_packed_backward(dc, y, "silu", 1.0, 1.0)
