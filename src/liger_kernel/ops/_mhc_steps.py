"""The steps of hyper-connections one by one, as other libraries call them; formulas stand in `mhc.py`.

All run the kernels of `_mhc_coeffs.py` and `_mhc_streams.py`, outside autograd. `out` and `out_*` are tensors that
the results are copied into and that are returned then; block sizes, warps and stages change nothing.

    N tokens   HC streams of C columns   K = HC C   M = 2 HC + HC^2 columns: pre, post, res
"""

import math
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._mhc_coeffs import (
    coefficients,
    coefficients_backward,
    product,
    product_backward,
)
from liger_kernel.ops._mhc_streams import (
    mhc_post_res_backward,
    mhc_post_res_forward,
    mhc_pre_backward,
    mhc_pre_forward,
)
from liger_kernel.ops._op import dense, require, rows


def mhc_mm_norm_fwd(
    x: Tensor, phi: Tensor, eps: float, *, out_mix: Tensor | None = None, out_invr: Tensor | None = None,
    block_n: int = 32, block_k: int = 256, block_m: int = 32, num_warps: int = 4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x `[N, K]` or `[*, HC, C]`, phi `[K, M]` -> mix = (x phi) invr `[N, M]`, invr = 1 / rms(x) `[N]`, fp32."""
    x2 = _flat(x, phi)
    products, squares = product(x2, phi)
    invr = torch.rsqrt(squares.sum(0) / x2.shape[1] + eps)
    return _into(out_mix, products.sum(0) * invr[:, None]), _into(out_invr, invr)


def mhc_mm_norm_bwd(
    x: Tensor, phi: Tensor, mix: Tensor, invr: Tensor, grad_mix: Tensor, *, out_grad_x: Tensor | None = None,
    out_grad_phi: Tensor | None = None, block_n: int = 32, block_k: int = 256, block_m: int = 32, num_warps: int = 4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> gradients of x and phi, in their shapes and dtypes."""
    x2 = _flat(x, phi)
    dx, dphi = torch.empty_like(x2, memory_format=torch.contiguous_format), torch.zeros_like(phi)
    if x2.shape[0] > 0:
        along = (grad_mix * mix).sum(1) * invr.square() / x2.shape[1]
        dphi = product_backward(dx, dense(grad_mix * invr[:, None]), along, x2, phi, True)
    return _into(out_grad_x, dx.view(x.shape)), _into(out_grad_phi, dphi)


def mhc_split_sinkhorn_fwd(
    mix: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *, tmax: int, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, out_hpre: Tensor | None = None, out_hpost: Tensor | None = None,
    out_hres: Tensor | None = None, out_hist: Tensor | None = None, return_hist: bool = False, num_warps: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    """mix `[N, M]` fp32, b `[M]`, alphas of one element -> h_pre, h_post `[N, HC]`, h_res `[N, HC, HC]`, fp32.

    With `return_hist` also the divisors of the iterations in their order, `[2 tmax - 1, N, HC]`.
    """
    gates = (b, alpha_pre, alpha_post, alpha_res)
    pre, post, res, divisors = _split(mix, gates, tmax, pre_eps, sinkhorn_eps, post_mult)
    found = _into(out_hpre, pre), _into(out_hpost, post), _into(out_hres, res)
    return (*found, _into(out_hist, divisors)) if return_hist else found


def mhc_sinkhorn_bwd(
    mix: Tensor, b: Tensor, alpha_res: Tensor, grad_hres: Tensor, *, tmax: int, sinkhorn_eps: float,
    hist: Tensor | None = None, out_grad_logits: Tensor | None = None, num_warps: int = 1,
) -> Tensor:  # fmt: skip
    """-> gradient `[N, HC, HC]` of the logits alpha_res mix_res + b_res, fp32.

    The iterations run anew, from one read of mix, so that nothing depends on `hist`.
    """
    hc = _streams(mix)
    logits = torch.zeros_like(mix, dtype=torch.float32)
    logits[:, 2 * hc :] = alpha_res * mix[:, 2 * hc :] + b[2 * hc :]
    one, none = logits.new_ones(1), logits.new_zeros(logits.shape[1])
    gates = (none, one, one, one)  # so that the logits are what the kernels call mix
    _, _, res, divisors = _split(logits, gates, tmax, 0.0, sinkhorn_eps, 1.0)
    grad = torch.zeros_like(res)
    if logits.shape[0] > 0:
        kept = (res, logits, logits.new_ones(logits.shape[0]), divisors)
        grads = (None, None, grad_hres.reshape(res.shape))
        dmix, _, _ = coefficients_backward(grads, kept, gates, hc, 1, tmax, 1.0)
        grad = dmix[:, 2 * hc :].view(res.shape)
    return _into(out_grad_logits, grad)


def mhc_pre_fwd(
    x: Tensor, h_pre: Tensor, *, out: Tensor | None = None, block_n: int = 32, block_c: int = 128, num_warps: int = 4
) -> Tensor:  # fmt: skip
    """x `[*, HC, C]`, h_pre `[*, HC]` -> sum over streams of h_pre x `[*, C]`, in x's dtype."""
    return _into(out, mhc_pre_forward(x, h_pre))


def mhc_pre_bwd(
    x: Tensor, h_pre: Tensor, grad_out: Tensor, *, out_grad_x: Tensor | None = None, out_grad_h: Tensor | None = None,
    block_n: int = 32, block_c: int = 128, num_warps: int = 4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> gradients of x and h_pre."""
    dx, dh = mhc_pre_backward(grad_out, x, h_pre, True, True)
    return _into(out_grad_x, dx), _into(out_grad_h, dh)


def mhc_post_res_fwd(
    x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor, *, out: Tensor | None = None, block_n: int | None = None,
    block_c: int | None = None, num_warps: int | None = None, num_stages: int | None = None,
) -> Tensor:  # fmt: skip
    """h_post f_out + h_res x: `[*, HC, C]`, in x's dtype."""
    return _into(out, mhc_post_res_forward(x, f_out, h_post, h_res))


def mhc_post_res_bwd(
    x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor, grad_out: Tensor, *, out_grad_x: Tensor | None = None,
    out_grad_f: Tensor | None = None, out_grad_hpost: Tensor | None = None, out_grad_hres: Tensor | None = None,
    block_n: int | None = None, block_c: int | None = None, num_warps: int | None = None,
    num_stages: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """-> gradients of x, f_out, h_post, h_res."""
    outs = (out_grad_x, out_grad_f, out_grad_hpost, out_grad_hres)
    found = mhc_post_res_backward(grad_out, x, f_out, h_post, h_res, True, True, True)
    return tuple(_into(out, t) for out, t in zip(outs, found, strict=True))


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _flat(x: Tensor, phi: Tensor) -> Tensor:
    """`[N, K]`, from the last dimension or the last two."""
    flat = x if x.shape[-1] == phi.shape[0] else x.flatten(-2)
    require(
        flat.shape[-1] == phi.shape[0],
        f"mhc_mm_norm: x must be [N, K] or [*, HC, C] with K = HC * C = {phi.shape[0]} for phi {list(phi.shape)}; "
        f"got {list(x.shape)}.",
    )
    return rows(flat)


def _streams(mix: Tensor) -> int:
    hc = math.isqrt(mix.shape[-1] + 1) - 1
    require(
        mix.dim() == 2 and hc > 0 and hc * (hc + 2) == mix.shape[1],
        f"mhc: mix must be [N, 2 HC + HC^2]; got {list(mix.shape)}.",
    )
    return hc


def _split(
    mix: Tensor, gates: tuple[Tensor, ...], *scalars: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h_pre, h_post, h_res and the divisors of `[N, M]` that is normalised already."""
    (n, m), hc, tmax = mix.shape, _streams(mix), scalars[0]

    def new(*shape: int) -> Tensor:
        return mix.new_empty(shape, dtype=torch.float32)

    outputs = new(n, hc), new(n, hc), new(n, hc, hc), new(n, m), new(n), new(2 * tmax - 1, n, hc)
    squares = torch.zeros_like(outputs[4])
    mix = dense(mix.float())
    # 1 / sqrt(0 + 1) = 1: a norm that changes nothing
    coefficients(outputs, mix[None], squares, gates, hc, 1, tmax, 1.0, *scalars[1:])
    return *outputs[:3], outputs[5]
