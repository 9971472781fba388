"""The coefficients of hyper-connections; formula and memory stand in `mhc.py`. Here: definition,
launch, operator."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops import _mhc_coeff_kernels as kernels
from liger_kernel.ops._dot import precision
from liger_kernel.ops._op import Cost, Op, compute_dtype, dense, first_order, named, rows
from liger_kernel.ops._reduce import sum_partials
from liger_kernel.ops._triton import block_of, cdiv, launch

_MAX_OUT = 128  # columns of phi a program holds: 2 hc + hc^2 for hc up to 10
_Coefficients = tuple[Tensor, Tensor, Tensor]

# 1 reference


def reference(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
    tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6, post_mult: float = 2.0,
) -> _Coefficients:  # fmt: skip
    """The definition, in fp32 (fp64 for fp64)."""
    hc, dtype = x.shape[-2], compute_dtype(x)
    flat = x.flatten(-2).to(dtype)
    rstd = torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + rms_eps)
    mix = (flat @ phi.to(dtype)) * rstd
    parts = (hc, hc, hc * hc)
    alphas = (a.reshape(()).to(dtype) for a in (alpha_pre, alpha_post, alpha_res))
    pre, post, res = (
        a * m + c
        for a, m, c in zip(alphas, mix.split(parts, -1), b.to(dtype).split(parts), strict=True)
    )
    p = res.unflatten(-1, (hc, hc)).softmax(-1) + sinkhorn_eps
    p = p / (p.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(tmax - 1):
        p = p / (p.sum(-1, keepdim=True) + sinkhorn_eps)
        p = p / (p.sum(-2, keepdim=True) + sinkhorn_eps)
    return pre.sigmoid() + pre_eps, post.sigmoid() * post_mult, p


# 2 launch

_ROWS, _STEP, _WARPS, _STAGES = 64, 64, 4, 4  # the product: 4 programs an SM, 24 KiB in flight each
_PER_SM = 4
_ENTRIES = 512  # of matrices a coefficient program holds, 4 a thread: 32 tokens of 4 streams
_RESERVE = 4096  # bytes of shared memory that the product needs beside its pipeline
# the backward product: columns of x a program owns, rows it visits at a time, for up to 32 columns of phi and for more,
# which take more room; fp32 has no tensor cores
_BACKWARD = {"tf32x3": ((128, 64), (64, 16)), "ieee": ((32, 32), (32, 16))}


def _tokens(hc: int) -> int:
    return max(min(_ENTRIES // block_of(hc) ** 2, 32), 1)


def product(x2: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    """-> fp32 parts `[parts, R, M]` of x2 phi and `[parts, R]` of the sums of squares of rows of x2."""
    (n_rows, n_in), n_out = x2.shape, phi.shape[1]
    blocks = cdiv(n_rows, _ROWS)
    parts = _PER_SM * _env.device_info(x2.device).sm_count // max(blocks, 1)
    share = cdiv(cdiv(n_in, min(max(parts, 1), cdiv(n_in, 4 * _STEP))), _STEP) * _STEP
    parts = cdiv(n_in, share)
    products = x2.new_empty((parts, n_rows, n_out), dtype=torch.float32)
    squares = x2.new_empty((parts, n_rows), dtype=torch.float32)
    out = max(block_of(n_out), 16)
    step_bytes = _STEP * (_ROWS * x2.element_size() + out * phi.element_size())
    room = (_env.device_info(x2.device).shared_memory - _RESERVE) // step_bytes
    launch(
        kernels.product_kernel, (blocks, parts), x2.device,
        products, squares, x2, x2.stride(0), dense(phi), n_rows, n_in, share,
        n_out=n_out, PRECISION=precision(x2.dtype, phi.dtype), ROWS=_ROWS, STEP=_STEP,
        OUT=out, num_warps=_WARPS, num_stages=min(_STAGES, 1 + room),
    )  # fmt: skip
    return products, squares


def coefficients(
    outputs: tuple[Tensor, ...], products: Tensor, squares: Tensor, gates: tuple[Tensor, ...], hc: int, n_in: int,
    tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
) -> None:  # fmt: skip
    """Fills h_pre, h_post, h_res, mix, rstd, divisors from what `product` gave; gates: b and the alphas."""
    (parts, n_rows, _), tokens, (b, *alphas) = products.shape, _tokens(hc), gates
    launch(
        kernels.coefficients_kernel, (cdiv(n_rows, tokens),), products.device,
        *outputs, products, squares, dense(b), *alphas,
        n_rows, n_in, parts, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult,
        hc=hc, TOKENS=tokens, HC=block_of(hc), num_warps=_WARPS,
    )  # fmt: skip


def coefficients_backward(
    grads: tuple[Tensor | None, ...], kept: tuple[Tensor, ...], gates: tuple[Tensor, ...], hc: int, n_in: int,
    tmax: int, post_mult: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """kept: h_res, mix, rstd, divisors -> d(x phi) `[R, M]`, the factor of x in dx `[R]`, partial sums `[*, M + 3]`."""
    (_, mix, rstd, _), (b, *alphas), tokens = kept, gates, _tokens(hc)
    n_rows, n_out = mix.shape
    share = cdiv(cdiv(n_rows, _PER_SM * _env.device_info(mix.device).sm_count), tokens) * tokens
    programs = cdiv(n_rows, share)
    dp, along = torch.empty_like(mix), torch.empty_like(rstd)
    partial = mix.new_empty((programs, n_out + 3))
    has_pre, has_post, has_res = (g is not None for g in grads)
    launch(
        kernels.coefficients_backward_kernel, (programs,), mix.device,
        dp, along, partial, *(mix if g is None else dense(g) for g in grads), *kept, dense(b), *alphas,
        n_rows, n_in, tmax, share, post_mult,
        hc=hc, HAS_PRE=has_pre, HAS_POST=has_post, HAS_RES=has_res,
        TOKENS=tokens, HC=block_of(hc), num_warps=_WARPS,
    )  # fmt: skip
    return dp, along, partial


def product_backward(
    dx: Tensor, dp: Tensor, along: Tensor, x2: Tensor, phi: Tensor, need_dphi: bool
) -> Tensor:
    """Fills dx with dp phi^T - along x2, unless it is empty; -> dphi = x2^T dp, or empty."""
    (n_rows, n_in), n_out = x2.shape, phi.shape[1]
    how = precision(x2.dtype, phi.dtype, computed=True)
    cols, visited = _BACKWARD[how][n_out > 32]
    blocks = cdiv(n_in, cols)
    programs = max(_PER_SM * _env.device_info(x2.device).sm_count // blocks, 1)
    share = cdiv(cdiv(n_rows, programs), visited) * visited
    parts = cdiv(n_rows, share)
    sums = x2.new_empty((parts, n_in * n_out) if need_dphi else 0, dtype=torch.float32)
    launch(
        kernels.product_backward_kernel, (blocks, parts), x2.device,
        dx, sums, dp, along, x2, x2.stride(0), dense(phi), n_rows, n_in, share,
        n_out=n_out, NEED_DX=dx.numel() > 0, NEED_DPHI=need_dphi, PRECISION=how,
        ROWS=visited, COLS=cols, OUT=max(block_of(n_out), 16), num_warps=8,
    )  # fmt: skip
    return sum_partials(sums, phi.dtype).view(phi.shape) if need_dphi else phi.new_empty(0)


def _fake_forward(x, phi, b, alpha_pre, alpha_post, alpha_res, tmax, *_):
    lead, hc = x.shape[:-2], x.shape[-2]
    n = math.prod(lead)

    def new(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    coefficients = new(*lead, hc), new(*lead, hc), new(*lead, hc, hc)
    return *coefficients, new(n, phi.shape[1]), new(n), new(2 * tmax - 1, n, hc)


@named(
    "(Tensor x, Tensor phi, Tensor b, Tensor alpha_pre, Tensor alpha_post, Tensor alpha_res, int tmax,"
    " float rms_eps, float pre_eps, float sinkhorn_eps, float post_mult)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_forward,
)
def mhc_coeffs_forward(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
    tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """-> h_pre, h_post, h_res; kept for backward: mix [R, M], rstd [R], divisors [2 tmax - 1, R, hc]."""
    hc, x2 = x.shape[-2], rows(x.flatten(-2))
    outputs = _fake_forward(x, phi, b, alpha_pre, alpha_post, alpha_res, tmax)
    products, squares = product(x2, phi)
    gates, scalars = (b, alpha_pre, alpha_post, alpha_res), (sinkhorn_eps, post_mult)
    coefficients(
        outputs, products, squares, gates, hc, x2.shape[1], tmax, rms_eps, pre_eps, *scalars
    )
    return outputs


def _fake_backward(
    dpre, dpost, dres, x, phi, b, alpha_pre, alpha_post, alpha_res, h_res, mix, rstd, divisors, tmax, post_mult,
    need_dx, need_dphi,
):  # fmt: skip
    dx = x.new_empty(x.shape if need_dx else 0)
    dphi = phi.new_empty(phi.shape if need_dphi else 0)
    return dx, dphi, mix.new_empty(b.numel() + 3)


@named(
    "(Tensor? dpre, Tensor? dpost, Tensor? dres, Tensor x, Tensor phi, Tensor b, Tensor alpha_pre,"
    " Tensor alpha_post, Tensor alpha_res, Tensor h_res, Tensor mix, Tensor rstd, Tensor divisors, int tmax,"
    " float post_mult, bool need_dx, bool need_dphi) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def mhc_coeffs_backward(
    dpre: Tensor | None, dpost: Tensor | None, dres: Tensor | None, x: Tensor, phi: Tensor, b: Tensor,
    alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, h_res: Tensor, mix: Tensor, rstd: Tensor,
    divisors: Tensor, tmax: int, post_mult: float, need_dx: bool, need_dphi: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dx like x, dphi like phi (empty if not needed), and db, dalpha_pre, dalpha_post, dalpha_res in
    one fp32 vector [M + 3]."""
    x2 = rows(x.flatten(-2))
    (n_rows, n_in), hc, grads = x2.shape, x.shape[-2], (dpre, dpost, dres)
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    if n_rows == 0:
        dphi = torch.zeros_like(phi) if need_dphi else phi.new_empty(0)
        return dx, dphi, mix.new_zeros(b.numel() + 3)
    gates, kept = (b, alpha_pre, alpha_post, alpha_res), (h_res, mix, rstd, divisors)
    dp, along, partial = coefficients_backward(grads, kept, gates, hc, n_in, tmax, post_mult)
    small = sum_partials(partial, torch.float32)
    dphi = phi.new_empty(0)
    if need_dx or need_dphi:
        dphi = product_backward(dx, dp, along, x2, phi, need_dphi)
    return dx, dphi, small


# 3 op


class _Coeffs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
        tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    ) -> _Coefficients:  # fmt: skip
        given = (x, phi, b, alpha_pre, alpha_post, alpha_res)
        pre, post, res, *kept = mhc_coeffs_forward(
            *given, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
        )
        ctx.save_for_backward(*given, res, *kept)
        ctx.scalars = tmax, post_mult
        ctx.set_materialize_grads(False)
        return pre, post, res

    @staticmethod
    @first_order("mhc_coeffs")
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        need = ctx.needs_input_grad
        if all(g is None for g in grads):
            return (None,) * 11
        saved = ctx.saved_tensors
        dx, dphi, small = mhc_coeffs_backward(*grads, *saved, *ctx.scalars, need[0], need[1])
        db, *dalphas = small.split((small.numel() - 3, 1, 1, 1))
        found = (dx, dphi, db.to(saved[2].dtype))
        found += tuple(
            g.to(a.dtype).view(a.shape) for g, a in zip(dalphas, saved[3:6], strict=True)
        )
        return *(g if n else None for g, n in zip(found, need, strict=False)), *(None,) * 5


def supports(x: Tensor, phi: Tensor, *_: Any) -> str | None:
    """2 hc + hc^2 columns within one tile of a product."""
    if x.shape[-1] == 0 or x.shape[-2] == 0:
        return "streams have no columns"
    if phi.shape[1] > _MAX_OUT:
        return f"phi has {phi.shape[1]} columns; kernels take up to {_MAX_OUT}, that is 10 streams"
    return None


def cost(x: Tensor, phi: Tensor, *others: Any) -> Cost:
    """x and phi in, coefficients and what is kept out; then x, phi in, dx, dphi out, and what was kept."""
    tokens, hc = math.prod(x.shape[:-2]), x.shape[-2]
    tmax = others[4] if len(others) > 4 else 20
    n = x.numel() * x.element_size() + phi.numel() * phi.element_size()
    coefficients = 4 * tokens * phi.shape[1]
    kept = coefficients + 4 * tokens * (1 + (2 * tmax - 1) * hc)
    products = 2 * tokens * phi.numel()
    return Cost(n + coefficients + kept, 2 * n + 2 * coefficients + kept, kept, flops=3 * products)


OP_COEFFS = Op("mhc_coeffs", reference, reference, _Coeffs.apply, supports, cost)
