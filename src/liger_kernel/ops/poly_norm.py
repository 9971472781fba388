"""PolyNorm.   y = w0 * n(x^3) + w1 * n(x^2) + w2 * n(x) + b,   n(u) = u / sqrt(mean(u^2, -1) + eps)

    x, y: [*, D]   w: [3]   b: [1]   rstd: [R, 3] fp32, the factors of x^3, x^2, x in n; R = rows of D values

Backward, for k = 1, 2, 3 with the weight w_k of the power k, r_k = rstd of it and s_k = r_k * sum(dy * x^k):

    a_k = w_k * r_k     c_k = a_k * r_k * s_k / D
    dx = dy * (a_1 + 2 a_2 x + 3 a_3 x^2) - x * (c_1 + 2 c_2 x^2 + 3 c_3 x^4)
    dw_k = sum over rows of s_k     db = sum over all of dy

Casts   fp32 throughout, one rounding at the end: no power is rounded to x's dtype, or overflows in it. (In fp32 itself
        mean(x^6) overflows from |x| = 10^6 on, as in eager PyTorch.)
Memory  forward reads x once and writes y; it keeps rstd, 12 bytes a row, beside its inputs. Backward reads dy and x
        once and writes dx; dw and db pass through four fp32 numbers a program, summed in a fixed order. Rows that do
        not fit in registers take two passes over their columns.
Paper   Zhuo et al., "Polynomial Composition Activations", arXiv:2411.03884
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops import _poly_norm_kernels as kernels
from liger_kernel.ops._norm_plan import (
    MAX_BLOCK,
    WIDE_BLOCK,
    backward_plan,
    forward_plan,
    forward_table,
    loop_table,
)
from liger_kernel.ops._op import Cost, Op, compute_dtype, dense, first_order, named, require, rows
from liger_kernel.ops._reduce import sum_partials
from liger_kernel.ops._triton import block_of, cdiv, launch

# 1 reference


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """The definition."""
    wide = x.to(compute_dtype(x))
    w = weight.to(wide.dtype)

    def n(u: Tensor) -> Tensor:
        return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)

    y = w[0] * n(wide**3) + w[1] * n(wide**2) + w[2] * n(wide) + bias.to(wide.dtype)
    return y.to(x.dtype)


# 2 launch

# block of columns -> (rows, warps) forward; (rows, warps, programs per SM, stages) backward
_FORWARD = forward_table("poly_norm.forward", {
    256: (16, 4), 512: (8, 4), 1024: (2, 2), 2048: (1, 4), 4096: (1, 8),
    8192: (1, 16), 16384: (1, 32), 32768: (1, 32),
})  # fmt: skip
_BACKWARD = loop_table("poly_norm.backward", {
    256: (8, 4, 4, 2), 512: (4, 4, 4, 2), 1024: (2, 4, 4, 2), 2048: (1, 4, 4, 3), 4096: (1, 8, 3, 3),
    8192: (1, 16, 1, 3), 16384: (1, 32, 1, 2),
})  # fmt: skip
_WIDE_WARPS = 16


def _fake_forward(x, weight, bias, eps):
    return x.new_empty(x.shape), x.new_empty((x.shape[:-1].numel(), 3), dtype=torch.float32)


@named("(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)", _fake_forward)
def poly_norm_forward_kernel(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    """-> y like x (contiguous), rstd [R, 3] fp32."""
    x2 = rows(x)
    n_rows, n_cols = x2.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty((n_rows, 3), dtype=torch.float32, device=x.device)
    args = (y, x2, x2.stride(0), dense(weight), bias, rstd)
    block = block_of(n_cols)
    if block > MAX_BLOCK:
        meta = {"BLOCK": WIDE_BLOCK, "num_warps": _WIDE_WARPS}
        launch(kernels.forward_wide_kernel, (n_rows,), x.device, *args, n_cols, eps, **meta)
        return y, rstd
    meta = forward_plan(_FORWARD.entry(block, x), x.device)
    grid = (cdiv(n_rows, meta["ROWS"]),)
    launch(kernels.forward_kernel, grid, x.device, *args, n_rows, n_cols, eps, BLOCK=block, **meta)
    return y, rstd


def _fake_backward(dy, x, weight, bias, rstd, need_dx, need_params):
    dtype = torch.promote_types(weight.dtype, bias.dtype)
    params = x.new_empty(4 if need_params else 0, dtype=dtype)
    return x.new_empty(x.shape if need_dx else 0), params


@named(
    "(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor rstd, bool need_dx, bool need_params)"
    " -> (Tensor, Tensor)",
    _fake_backward,
)
def poly_norm_backward_kernel(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, rstd: Tensor, need_dx: bool, need_params: bool
) -> Any:  # fmt: skip
    """-> dx like x, [dw, db] in one [4] of the dtype that weight and bias promote to; what is not needed is empty."""
    dy2, x2 = rows(dy), rows(x)
    n_rows, n_cols = x2.shape
    dtype = torch.promote_types(weight.dtype, bias.dtype)
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    if n_rows == 0:
        return dx, x.new_zeros(4 if need_params else 0, dtype=dtype)
    operands = (dy2, dy2.stride(0), x2, x2.stride(0), dense(weight), bias, rstd, n_rows, n_cols)
    flags, block = {"NEED_DX": need_dx, "NEED_P": need_params}, block_of(n_cols)
    if block > _BACKWARD.widest:
        programs = min(n_rows, 2 * _env.device_info(x.device).sm_count)
        kernel, scalars = kernels.backward_wide_kernel, ()
        meta = {"BLOCK": WIDE_BLOCK, "num_warps": _WIDE_WARPS}
    else:
        row_bytes = block * (x.element_size() + dy.element_size())
        entry = _BACKWARD.entry(block, x)
        programs, share, meta = backward_plan(entry, n_rows, row_bytes, x.device)
        kernel, scalars = kernels.backward_kernel, (share,)
        meta["BLOCK"] = block
    partials = x.new_empty((programs, 4) if need_params else 0, dtype=torch.float32)
    launch(kernel, (programs,), x.device, dx, partials, *operands, *scalars, **flags, **meta)
    return dx, sum_partials(partials, dtype) if need_params else x.new_empty(0, dtype=dtype)


# 3 op


class _PolyNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, rstd = poly_norm_forward_kernel(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, rstd)
        return y

    @staticmethod
    @first_order("poly_norm")
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, rstd = ctx.saved_tensors
        need_dx, need_dw, need_db, _ = ctx.needs_input_grad
        dx, params = poly_norm_backward_kernel(
            dy, x, weight, bias, rstd, need_dx, need_dw or need_db
        )
        return (
            dx if need_dx else None,
            params[:3].to(weight.dtype) if need_dw else None,
            params[3:].to(bias.dtype) if need_db else None,
            None,
        )


def supports(x: Tensor, *_: Any) -> str | None:
    """Every width and layout; an empty row has no mean."""
    if not x.is_floating_point():
        return f"{x.dtype} is not a floating-point dtype"
    return "rows have no columns" if x.shape[-1] == 0 else None


def cost(x: Tensor, *_: Any) -> Cost:
    """x in, y out; then dy and x in, dx out."""
    n = x.numel() * x.element_size()
    saved = 12 * (x.numel() // x.shape[-1])
    return Cost(forward_bytes=2 * n, backward_bytes=3 * n, saved=saved)


OP = Op("poly_norm", reference, reference, _PolyNorm.apply, supports, cost, rows=1)

# 4 public


def poly_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6, impl: str | None = None
) -> Tensor:
    """A polynomial of x of degree three with normalised powers, over the last dimension.

    Args:
        x: `[*, D]` of any rank, width and strides; fp16, bf16, fp32 (fp64 on the torch path).
        weight: `[3]`, of the third, second and first power; its dtype and bias's may differ from x's.
        bias: `[1]`.
        eps: added to the mean square of each power.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, D]` in x's dtype, contiguous.
    Memory:
        Keeps x, the parameters and 12 bytes a row for backward.
    Raises:
        ValueError: weight is not `[3]`, bias not `[1]`, or x a scalar.
    """
    require(x.dim() > 0, "poly_norm: x must have a dimension to normalise over; got a scalar.")
    for name, p, size in (("weight", weight, 3), ("bias", bias, 1)):
        require(
            p.shape == (size,),
            f"poly_norm: {name} must have shape [{size}]; got {list(p.shape)}.",
        )
    return OP(x, weight, bias, eps, impl=impl)


# The names other libraries call


class LigerPolyNormFunction:
    """`apply(X, W, B, eps=1e-6, in_place=True)` is `poly_norm`; `in_place` is accepted and changes nothing."""

    @staticmethod
    def apply(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
        return poly_norm(X, W, B, eps)


def poly_norm_forward(
    X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """-> Y, X, W, RSTD [R, 3], block, warps, by the kernel and outside autograd."""
    y, rstd = poly_norm_forward_kernel(X, W, B, eps)
    block = block_of(X.shape[-1])
    return y, X, W, rstd, block, _FORWARD.entry(block, X)[1]


def poly_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor, RSTD: Tensor, BLOCK_SIZE: int, num_warps: int, in_place: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dX, dW, dB in new tensors and W's dtype, by the kernel and outside autograd; block, warps and `in_place`
    change nothing.
    """
    dx, params = poly_norm_backward_kernel(dY, X, W, W[:1], RSTD, True, True)
    return dx, params[:3], params[3:]
