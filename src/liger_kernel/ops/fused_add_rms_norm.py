"""Residual addition and RMSNorm.   s = x + r,   y = s / rms(s) * (offset + w),   rms(s) = sqrt(mean(s^2, -1) + eps)

    x, r, s, y: [*, D]   w: [D] or None   rstd = 1 / rms: [R] fp32, R = rows of D values

Backward, with n = s * rstd and g = dy * (offset + w):

    dx = dr = ds + rstd * (g - n * mean(g * n))   dw = sum over rows of dy * n

Casts   s is rounded to x's dtype, and the norm is that of the rounded s; after that as `rms_norm`.
Memory  forward reads x and r once and writes s and y. Kept for backward: s, which the model keeps
        anyway, and 4 bytes a row. Backward reads dy, ds and s once and writes one gradient, which
        serves both inputs; dw as in `rms_norm`. An output that nothing came of costs no gradient.
Paper   Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467
The kernels are those of `rms_norm`.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import rms_norm as _rms_norm
from liger_kernel.ops._norm_plan import forward_table, loop_table
from liger_kernel.ops._op import Cost, Op, choice, first_order, like, named
from liger_kernel.ops._triton import block_of

# 1 reference


def reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, with the roundings of Hugging Face's modules."""
    s = (x + residual).to(x.dtype)
    return _rms_norm.reference(s, weight, eps, offset, casting_mode), s


# 2 launch

# block of columns -> (rows, warps) forward; (rows, warps, programs per SM, stages) backward.
# Compiled for sm_90, next to no spills up to 8192 columns; programs per SM are what the registers allow. Not measured.
_FORWARD = forward_table("fused_add_rms_norm.forward", {
    256: (16, 4), 512: (8, 4), 1024: (2, 2), 2048: (1, 4), 4096: (1, 8),
    8192: (1, 16), 16384: (1, 32), 32768: (1, 32),
})  # fmt: skip
_BACKWARD = loop_table("fused_add_rms_norm.backward", {
    256: (16, 4, 4, 2), 512: (8, 4, 4, 2), 1024: (2, 4, 6, 1), 2048: (2, 4, 2, 3), 4096: (2, 8, 1, 3),
    8192: (1, 8, 1, 3), 16384: (1, 32, 1, 1), 32768: (1, 32, 1, 1),
})  # fmt: skip


def _fake_forward(x, residual, weight, eps, offset, casting_mode):
    y = x.new_empty(x.shape, dtype=_rms_norm.out_dtype(x, weight, casting_mode))
    rstd = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    return y, x.new_empty(x.shape), rstd


@named(
    "(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting_mode)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_forward,
)
def fused_add_rms_norm_forward_kernel(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> Any:
    """-> y, s (both contiguous), rstd [R] fp32."""
    y, s = like(x, _rms_norm.out_dtype(x, weight, casting_mode)), like(x)
    rstd = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    options = (eps, offset, casting_mode, _FORWARD)
    _rms_norm.run_forward(y, rstd, x, weight, *options, residual=residual, s=s)
    return y, s, rstd


def _fake_backward(dy, ds, s, weight, rstd, offset, casting_mode, need_dx, need_dw):
    dw = weight.new_empty(weight.shape) if weight is not None and need_dw else s.new_empty(0)
    return s.new_empty(s.shape if need_dx else 0), dw


@named(
    "(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor rstd, float offset, str casting_mode,"
    " bool need_dx, bool need_dw) -> (Tensor, Tensor)",
    _fake_backward,
)
def fused_add_rms_norm_backward_kernel(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, rstd: Tensor, offset: float,
    casting_mode: str, need_dx: bool, need_dw: bool,
) -> Any:  # fmt: skip
    """-> dx like s (the gradient of both inputs), dw like weight; an output that is not needed is empty."""
    options = (offset, casting_mode, need_dx, need_dw, _BACKWARD)
    return _rms_norm.run_backward(dy, ds, s, weight, rstd, *options)


# 3 op


class _FusedAddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, s, rstd = fused_add_rms_norm_forward_kernel(
            x, residual, weight, eps, offset, casting_mode
        )
        ctx.save_for_backward(s, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.offset, ctx.casting_mode, ctx.residual_dtype = offset, casting_mode, residual.dtype
        return y, s

    @staticmethod
    @first_order("fused_add_rms_norm")
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> Any:
        s, weight, rstd = ctx.saved_tensors
        need_x, need_r, need_dw = ctx.needs_input_grad[:3]
        dx, dw = ds, None
        if dy is not None:
            dx, dw = fused_add_rms_norm_backward_kernel(
                dy, ds, s, weight, rstd, ctx.offset, ctx.casting_mode, need_x or need_r, need_dw
            )
        dr = dx.to(ctx.residual_dtype) if need_r and dx is not None else None
        return dx if need_x else None, dr, dw if need_dw else None, None, None, None


def supports(x: Tensor, *_: Any) -> str | None:
    """Every width and layout; an empty row has no mean."""
    return "rows have no columns" if x.shape[-1] == 0 else None


def cost(x: Tensor, residual: Tensor, weight: Tensor | None, *_: Any) -> Cost:
    """x, r and w in, s and y out; then dy, ds and s in, one gradient and dw out."""
    n = x.numel() * x.element_size()
    r = residual.numel() * residual.element_size()
    w = 0 if weight is None else weight.numel() * weight.element_size()
    return Cost(3 * n + r + w, 4 * n + 2 * w, n + 4 * (x.numel() // x.shape[-1]))


OP = Op("fused_add_rms_norm", reference, reference, _FusedAddRMSNorm.apply, supports, cost, rows=2)

# 4 public


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum over the last dimension.

    Args:
        x: `[*, D]` of any rank, width and strides; fp16, bf16, fp32 (fp64 on the torch path).
        residual: like x; its dtype may differ.
        weight: `[D]`, or None for no scale. Its dtype may differ from x's.
        eps, offset, casting_mode: as in `liger_kernel.ops.rms_norm.rms_norm`.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        (y, s): the normalised sum and the sum `x + residual` in x's dtype, both contiguous. Gradients
        flow through either or both.
    Memory:
        Keeps s, weight and 4 bytes a row for backward.
    Raises:
        ValueError: unknown casting mode, a residual of another shape, a weight whose shape is not `[D]`.
    """
    mode = _rms_norm.casting_name(casting_mode)
    choice("fused_add_rms_norm", "casting_mode", mode, _rms_norm.CASTING_MODES)
    if residual.shape != x.shape:
        raise ValueError(
            f"fused_add_rms_norm: the residual must have the shape of x {list(x.shape)}; got {list(residual.shape)}."
        )
    _rms_norm.check_weight("fused_add_rms_norm", x, weight)
    return OP(x, residual, weight, eps, offset, mode, impl=impl)


class LigerFusedAddRMSNormFunction:
    """`fused_add_rms_norm` with positional arguments; `in_place` is accepted and changes nothing."""

    @staticmethod
    def apply(
        X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str | int = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


def fused_add_rms_norm_forward(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float, casting_mode: str | int
) -> tuple[Tensor, Tensor, Tensor, int, int, int, str]:
    """-> Y, S, RSTD, block, warps, stages, casting mode, by the kernel and outside autograd."""
    mode = _rms_norm.casting_name(casting_mode)
    y, s, rstd = fused_add_rms_norm_forward_kernel(X, R, W, eps, offset, mode)
    block = block_of(X.shape[-1])
    return y, s, rstd, block, _FORWARD.entry(block, X)[1], 1, mode


def fused_add_rms_norm_backward(
    dY: Tensor, dS_out: Tensor | None, S: Tensor, W: Tensor | None, RSTD: Tensor, offset: float,
    casting_mode: str | int, BLOCK_SIZE: int, num_warps: int, num_stages: int, in_place: bool,
    needs_dw: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """-> dX, dR (one tensor), dW in new tensors, by the kernel and outside autograd; block, warps, stages and
    `in_place` change nothing."""
    mode = _rms_norm.casting_name(casting_mode)
    need_dw = W is not None and needs_dw is not False
    dx, dw = fused_add_rms_norm_backward_kernel(dY, dS_out, S, W, RSTD, offset, mode, True, need_dw)
    return dx, dx, dw if need_dw else None
