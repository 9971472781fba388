"""Manifold-constrained hyper-connections (mHC): a residual stream of width HC, and the gates around a layer.

    x: [*, HC, C], HC streams a token   phi: [HC C, M], M = 2 HC + HC^2   b: [M]   alphas: one value each

    mix = (vec(x) phi) / rms(vec(x))         its columns are pre [HC], post [HC], res [HC x HC], row by row
    h_pre = sigmoid(alpha_pre mix_pre + b_pre) + pre_eps
    h_post = post_mult sigmoid(alpha_post mix_post + b_post)
    h_res = Sinkhorn(alpha_res mix_res + b_res): softmax of each row + eps, columns divided by their sums + eps,
            then tmax - 1 rounds of rows and columns; doubly stochastic up to what tmax rounds reach
    x_in = sum_h h_pre[h] x[h]                                   [*, C]      the layer's input
    x'[h] = h_post[h] f(x_in) + sum_g h_res[h, g] x[g]           [*, HC, C]  the new streams

Backward   runs the Sinkhorn rounds backwards. A round's output times its divisors is its input, so only
           the divisors were kept, and a round p = q / d, d = sum q + eps has dq = (dp - sum dp p) / d.
           With y = vec(x) phi and r = 1 / rms(vec(x)):  dy = r dmix,  dphi = vec(x)^T dy,
           dvec(x) = dy phi^T - vec(x) r^2 / (HC C) sum(dmix mix)
Casts      coefficients are fp32 whatever x and phi are, and products of 16-bit operands of different
           dtypes are exact; x_in and x' are computed in fp32 and rounded once.
Memory     coefficients: one read of x for the product and the norm together, in parts that a second
           kernel adds up and turns into the coefficients; kept are mix and 4 + 4 HC (2 tmax - 1) bytes a
           token. Backward reads x once and writes dx; dphi passes through a few fp32 partials. pre and
           post_res read each operand once in either direction and keep their inputs only.
Paper      Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv:2512.24880;
           Zhu et al., "Hyper-Connections", arXiv:2409.19606
The definitions, kernels and operators are those of `_mhc_coeffs.py` and `_mhc_streams.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._mhc_coeffs import OP_COEFFS
from liger_kernel.ops._mhc_steps import (
    mhc_mm_norm_bwd,
    mhc_mm_norm_fwd,
    mhc_post_res_bwd,
    mhc_post_res_fwd,
    mhc_pre_bwd,
    mhc_pre_fwd,
    mhc_sinkhorn_bwd,
    mhc_split_sinkhorn_fwd,
)
from liger_kernel.ops._mhc_streams import OP_POST_RES, OP_PRE
from liger_kernel.ops._op import require

__all__ = [
    "LigerMHCCoeffsFunction",
    "LigerMHCPostResFunction",
    "LigerMHCPreFunction",
    "mhc_apply",
    "mhc_coeffs",
    "mhc_forward",
    "mhc_mm_norm_bwd",
    "mhc_mm_norm_fwd",
    "mhc_post_res",
    "mhc_post_res_bwd",
    "mhc_post_res_fwd",
    "mhc_pre",
    "mhc_pre_bwd",
    "mhc_pre_fwd",
    "mhc_sinkhorn_bwd",
    "mhc_split_sinkhorn_fwd",
]

# 1 public


def mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gates of a layer, from the streams themselves.

    Args:
        x: `[*, HC, C]`, any number of streams (kernels: up to 10) and columns, any strides; fp16 or bf16.
        phi: `[HC * C, 2 HC + HC^2]`; its dtype may differ from x's.
        b: `[2 HC + HC^2]`.
        alpha_pre, alpha_post, alpha_res: tensors of one element.
        allow_fp32: whether x may be fp32 (or fp64 on the torch path), which costs twice the traffic.
        tmax: Sinkhorn rounds, at least 1.
        rms_eps: added to the mean square of a token.
        pre_eps: added to h_pre.
        sinkhorn_eps: added to the softmax and to every divisor.
        post_mult: factor of h_post.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        h_pre `[*, HC]`, h_post `[*, HC]`, h_res `[*, HC, HC]`, fp32.
    Memory:
        Keeps the inputs, h_res, and 4 M + 4 + 4 HC (2 tmax - 1) bytes a token for backward.
    Raises:
        AssertionError: x is neither fp16 nor bf16 and `allow_fp32` is off.
        ValueError: shapes that do not fit together, or tmax below 1.
    """
    require(x.dim() >= 2, f"mhc_coeffs: x must be [*, HC, C]; got {list(x.shape)}.")
    require(
        allow_fp32 or x.dtype in (torch.float16, torch.bfloat16),
        f"mhc_coeffs: x must be fp16 or bf16 unless allow_fp32=True; got {x.dtype}.",
        AssertionError,
    )
    hc, c = x.shape[-2:]
    out = 2 * hc + hc * hc
    for name, tensor, shape in (("phi", phi, [hc * c, out]), ("b", b, [out])):
        require(
            list(tensor.shape) == shape,
            f"mhc_coeffs: {name} must have shape {shape} for x {list(x.shape)}; got {list(tensor.shape)}.",
        )
    alphas = {"alpha_pre": alpha_pre, "alpha_post": alpha_post, "alpha_res": alpha_res}
    for name, alpha in alphas.items():
        require(
            alpha.numel() == 1,
            f"mhc_coeffs: {name} must have one element; got {list(alpha.shape)}.",
        )
    require(tmax >= 1, f"mhc_coeffs: tmax must be at least 1; got {tmax}.")
    scalars = (tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult)
    return OP_COEFFS(x, phi, b, *alphas.values(), *scalars, impl=impl)


def mhc_pre(x: Tensor, h_pre: Tensor, impl: str | None = None) -> Tensor:
    """The layer's input, sum over streams of h_pre x.

    Args:
        x: `[*, HC, C]`; fp16, bf16, fp32 (fp64 on the torch path). Kernels take up to 32 streams.
        h_pre: `[*, HC]`, any of these dtypes.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, C]` in x's dtype, contiguous.
    Memory:
        Keeps x and h_pre for backward.
    Raises:
        ValueError: shapes that do not fit together.
    """
    _fits("mhc_pre", x, h_pre=(h_pre, x.shape[:-1]))
    return OP_PRE(x, h_pre, impl=impl)


def mhc_post_res(
    x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor, impl: str | None = None
) -> Tensor:
    """The new streams, h_post f_out + h_res x.

    Args:
        x: `[*, HC, C]`; fp16, bf16, fp32 (fp64 on the torch path). Kernels take up to 32 streams.
        f_out: `[*, C]`, the layer's output, any of these dtypes.
        h_post: `[*, HC]`; h_res: `[*, HC, HC]`, row h holds what stream h takes from each.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, HC, C]` in x's dtype, contiguous.
    Memory:
        Keeps its inputs for backward.
    Raises:
        ValueError: shapes that do not fit together.
    """
    lead, hc = x.shape[:-2], x.shape[-2:-1]
    _fits(
        "mhc_post_res",
        x,
        f_out=(f_out, (*lead, *x.shape[-1:])),
        h_post=(h_post, (*lead, *hc)),
        h_res=(h_res, (*lead, *hc, *hc)),
    )
    return OP_POST_RES(x, f_out, h_post, h_res, impl=impl)


def _fits(name: str, x: Tensor, **operands: tuple[Tensor, tuple[int, ...]]) -> None:
    require(x.dim() >= 2, f"{name}: x must be [*, HC, C]; got {list(x.shape)}.")
    for operand, (tensor, shape) in operands.items():
        require(
            tuple(tensor.shape) == tuple(shape),
            f"{name}: {operand} must have shape {list(shape)} for x {list(x.shape)}; got {list(tensor.shape)}.",
        )


def mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Any:  # fmt: skip
    """`mhc_post_res(x, f_out, h_post, h_res)`, with `return_x_in` also `mhc_pre(x, h_pre)`."""
    streams = mhc_post_res(x, f_out, h_post, h_res)
    return (streams, mhc_pre(x, h_pre)) if return_x_in else streams


def mhc_forward(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> Any:
    """A whole connection: coefficients from x, `layer` on the gathered stream, new streams.

    Args:
        layer: maps `[*, C]` to `[*, C]`.
        others: as in `mhc_coeffs`.
    Returns:
        The new streams `[*, HC, C]`, with `return_coeffs` also (h_pre, h_post, h_res).
    """
    options: dict[str, Any] = {
        "allow_fp32": allow_fp32,
        "tmax": tmax,
        "rms_eps": rms_eps,
        "pre_eps": pre_eps,
        "sinkhorn_eps": sinkhorn_eps,
        "post_mult": post_mult,
    }
    coeffs = mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)
    h_pre, h_post, h_res = coeffs
    streams = mhc_post_res(x, layer(mhc_pre(x, h_pre)), h_post, h_res)
    return (streams, coeffs) if return_coeffs else streams


# 2 the names other libraries call


class LigerMHCCoeffsFunction:
    """`mhc_coeffs` with positional arguments."""

    @staticmethod
    def apply(
        x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
        allow_fp32: bool, tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return mhc_coeffs(
            x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32=allow_fp32, tmax=tmax, rms_eps=rms_eps,
            pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult,
        )  # fmt: skip


class LigerMHCPreFunction:
    """`apply(x, h_pre)` is `mhc_pre`."""

    apply = staticmethod(mhc_pre)


class LigerMHCPostResFunction:
    """`apply(x, f_out, h_post, h_res)` is `mhc_post_res`."""

    apply = staticmethod(mhc_post_res)
