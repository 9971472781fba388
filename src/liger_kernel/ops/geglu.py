"""GeGLU.   y = gelu(gate) * up

    gate, up, y: [*, F], or gate and up as the halves of one packed [*, 2F]

    approximate = "tanh"   gelu(g) = g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))) / 2    (Gemma)
    approximate = "none"   gelu(g) = g * (1 + erf(g / sqrt 2)) / 2

Casts   gelu in fp32, rounded to gate's dtype before it meets up, as Hugging Face's MLPs do; y has the promoted dtype.
Memory  reads gate and up, writes y, keeps its inputs only; backward recomputes gelu, writes both gradients in one pass.
Papers  Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415;
        Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202
The kernels and the derivation are those of `_gated.py`.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import _gated
from liger_kernel.ops._op import Op, choice, first_order
from liger_kernel.ops._reuse import saved

_KERNEL_NAMES = {"tanh": "gelu_tanh", "none": "gelu"}
APPROXIMATIONS = tuple(_KERNEL_NAMES)

# 1 reference


def reference(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """The definition, with the roundings of Hugging Face's modules."""
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def reference_packed(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """The definition on the two halves of the last dimension."""
    return reference(*_gated.halves(gate_up), approximate)


# 2 op


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = _KERNEL_NAMES[approximate]
        return _gated.gated_forward(gate, up, ctx.act, 1.0, 1.0)

    @staticmethod
    @first_order("geglu")
    def backward(ctx: Any, dy: Tensor) -> Any:
        (gate, up), rooms = saved(ctx)
        need_dgate, need_dup = ctx.needs_input_grad[:2]
        dgate, dup = _gated.gated_backward(
            dy, gate, up, ctx.act, 1.0, 1.0, need_dgate, need_dup, *rooms
        )
        return dgate if need_dgate else None, dup if need_dup else None, None


class _GeGLUPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.act = _KERNEL_NAMES[approximate]
        gate, up = _gated.halves(gate_up)
        return _gated.gated_forward(gate, up, ctx.act, 1.0, 1.0)

    @staticmethod
    @first_order("geglu_packed")
    def backward(ctx: Any, dy: Tensor) -> Any:
        (gate_up,), rooms = saved(ctx)
        return _gated.gated_packed_backward(dy, gate_up, ctx.act, 1.0, 1.0, *rooms), None


OP = Op(
    "geglu",
    reference,
    reference,
    _GeGLU.apply,
    _gated.supports,
    _gated.cost,
    rows=2,
    elementwise=True,
)
OP_PACKED = Op(
    "geglu_packed",
    reference_packed,
    reference_packed,
    _GeGLUPacked.apply,
    _gated.supports_packed,
    _gated.cost_packed,
    rows=1,
)

# 3 public


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh", impl: str | None = None) -> Tensor:
    """gelu(gate) * up, the activation of a gated MLP.

    Args:
        gate, up: `[*, F]` of one shape, any rank and strides; fp16, bf16, fp32 (fp64 on the torch path), also mixed.
        approximate: "tanh" for the approximation (Gemma), "none" for the exact function.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, F]`, contiguous, in the promoted dtype of gate and up.
    Memory:
        Keeps gate and up for backward, which writes their gradients over them if nobody else holds them.
    Raises:
        ValueError: unknown approximation, or gate and up differ in shape.
    """
    choice("geglu", "approximate", approximate, APPROXIMATIONS)
    _gated.check_pair("geglu", gate, up)
    return OP(gate, up, approximate, impl=impl)


def geglu_packed(gate_up: Tensor, approximate: str = "tanh", impl: str | None = None) -> Tensor:
    """`geglu` of the two halves of one projection, read in place; the gradient is one tensor too.

    Args:
        gate_up: `[*, 2F]`, gate in the first half of the last dimension, up in the second; dtypes as `geglu`.
        approximate, impl: as `geglu`.
    Returns:
        `[*, F]`, contiguous, in gate_up's dtype.
    Memory:
        Keeps gate_up for backward, which writes its gradient over it if nobody else holds it.
    Raises:
        ValueError: unknown approximation, or the last dimension is odd.
    """
    choice("geglu_packed", "approximate", approximate, APPROXIMATIONS)
    _gated.check_packed("geglu_packed", gate_up)
    return OP_PACKED(gate_up, approximate, impl=impl)


# The names other libraries call


class LigerGELUMulFunction:
    """`apply(a, b)` is `geglu` with the tanh approximation."""

    apply = staticmethod(geglu)


def geglu_forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> a, b, gelu_tanh(a) * b, by the kernel and outside autograd."""
    return a, b, _gated.gated_forward(a, b, "gelu_tanh", 1.0, 1.0)


def geglu_backward(a: Tensor, b: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
    """-> da, db in new tensors, by the kernel and outside autograd."""
    return _gated.gated_backward(dc, a, b, "gelu_tanh", 1.0, 1.0, True, True)
