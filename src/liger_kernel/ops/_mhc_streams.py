"""What hyper-connections do with the streams; formula and memory stand in `mhc.py`. Here: definition,
kernels, launch, operators of `mhc_pre` and `mhc_post_res`.

A program holds all streams of a token over BLOCK columns. BLOCK is 256 a warp, so that a warp's lanes
and then the warps lie along the columns and sums over streams stay within a thread.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

import math
from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import Cost, Op, compute_dtype, dense, first_order, named, rows
from liger_kernel.ops._triton import block_of, cdiv, launch, tl, triton

_MAX_STREAMS = 32
_LANES = 256  # columns a warp covers with one 16-byte access a thread
_TILE = 8192  # entries of all streams a backward program holds: 2,048 columns of 4 streams, 8 warps

# 1 reference


def reference_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """The definition of `mhc_pre`."""
    dtype = compute_dtype(x)
    return (h_pre.to(dtype)[..., None] * x.to(dtype)).sum(-2).to(x.dtype)


def reference_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """The definition of `mhc_post_res`."""
    dtype = compute_dtype(x)
    added = h_post.to(dtype)[..., None] * f_out.to(dtype)[..., None, :]
    return (added + h_res.to(dtype) @ x.to(dtype)).to(x.dtype)


# 2 kernels


@triton.jit
def _streams(P, h, hc, n_cols, cols):
    """All streams of one token, `[HC, BLOCK]` in fp32."""
    mask = (h < hc)[:, None] & (cols < n_cols)[None, :]
    return tl.load(P + h[:, None] * n_cols + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _gates(P, h, hc):
    return tl.load(P + h, mask=h < hc, other=0.0).to(tl.float32)


@triton.jit
def _pre_kernel(Y, X, PRE, hc, n_cols, HC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.arange(0, HC)
    x = _streams(X + row_base(row, hc * n_cols), h, hc, n_cols, cols)
    y = tl.sum(_gates(PRE + row_base(row, hc), h, hc)[:, None] * x, axis=0)
    tl.store(Y + row_base(row, n_cols) + cols, y.to(Y.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def _pre_backward_kernel(
    DX, DPRE, DY, sDY_row, X, PRE, hc, n_cols,
    NEED_DX: tl.constexpr, NEED_DH: tl.constexpr, HC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    h = tl.arange(0, HC)
    X += row_base(row, hc * n_cols)
    DX += row_base(row, hc * n_cols)
    DY += row_base(row, sDY_row)
    pre = _gates(PRE + row_base(row, hc), h, hc)
    dpre = tl.zeros((HC,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_cols = cols < n_cols
        dy = tl.load(DY + cols, mask=m_cols, other=0.0).to(tl.float32)
        if NEED_DH:
            dpre += tl.sum(_streams(X, h, hc, n_cols, cols) * dy[None, :], axis=1)
        if NEED_DX:
            dx = (pre[:, None] * dy[None, :]).to(DX.dtype.element_ty)
            mask = (h < hc)[:, None] & m_cols[None, :]
            tl.store(DX + h[:, None] * n_cols + cols[None, :], dx, mask=mask)
    if NEED_DH:
        to = row_base(row, hc) + h
        tl.store(DPRE + to, dpre.to(DPRE.dtype.element_ty), mask=h < hc)


@triton.jit
def _post_res_kernel(
    Y, X, F, sF_row, POST, RES, n_cols, hc: tl.constexpr, HC: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_cols = cols < n_cols
    h = tl.arange(0, HC)
    X += row_base(row, hc * n_cols)
    RES += row_base(row, hc * hc)
    f = tl.load(F + row_base(row, sF_row) + cols, mask=m_cols, other=0.0).to(tl.float32)
    y = _gates(POST + row_base(row, hc), h, hc)[:, None] * f[None, :]
    for g in tl.static_range(hc):
        x = tl.load(X + g * n_cols + cols, mask=m_cols, other=0.0).to(tl.float32)
        y += tl.load(RES + h * hc + g, mask=h < hc, other=0.0).to(tl.float32)[:, None] * x[None, :]
    mask = (h < hc)[:, None] & m_cols[None, :]
    to = row_base(row, hc * n_cols) + h[:, None] * n_cols + cols[None, :]
    tl.store(Y + to, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _post_res_backward_kernel(
    DX, DF, DPOST, DRES, DY, X, F, sF_row, POST, RES, n_cols, hc: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DF: tl.constexpr, NEED_DH: tl.constexpr, HC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    h = tl.arange(0, HC)
    X += row_base(row, hc * n_cols)
    DX += row_base(row, hc * n_cols)
    DY += row_base(row, hc * n_cols)
    F += row_base(row, sF_row)
    RES += row_base(row, hc * hc)
    post = _gates(POST + row_base(row, hc), h, hc)
    dpost = tl.zeros((HC,), tl.float32)
    dres = tl.zeros((HC, HC), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_cols = cols < n_cols
        dy = _streams(DY, h, hc, n_cols, cols)
        if NEED_DF:
            df = tl.sum(post[:, None] * dy, axis=0)
            tl.store(DF + row_base(row, n_cols) + cols, df.to(DF.dtype.element_ty), mask=m_cols)
        if NEED_DH:
            f = tl.load(F + cols, mask=m_cols, other=0.0).to(tl.float32)
            dpost += tl.sum(dy * f[None, :], axis=1)
        for g in tl.static_range(hc):
            if NEED_DX:
                res = tl.load(RES + h * hc + g, mask=h < hc, other=0.0).to(tl.float32)
                dx = tl.sum(res[:, None] * dy, axis=0)
                tl.store(DX + g * n_cols + cols, dx.to(DX.dtype.element_ty), mask=m_cols)
            if NEED_DH:
                x = tl.load(X + g * n_cols + cols, mask=m_cols, other=0.0).to(tl.float32)
                column = tl.sum(dy * x[None, :], axis=1)
                dres += tl.where((h == g)[None, :], column[:, None], 0.0)
    if NEED_DH:
        tl.store(DPOST + row_base(row, hc) + h, dpost.to(DPOST.dtype.element_ty), mask=h < hc)
        to = row_base(row, hc * hc) + h[:, None] * hc + h[None, :]
        mask = (h < hc)[:, None] & (h < hc)[None, :]
        tl.store(DRES + to, dres.to(DRES.dtype.element_ty), mask=mask)


# 3 launch


def _tile(x: Tensor, most: int) -> dict[str, int]:
    """HC, BLOCK and warps for a tile of at most `most` entries."""
    hc, n_cols = x.shape[-2:]
    padded = block_of(hc)
    block = max(min(block_of(n_cols), most // padded), _LANES)
    warps = min(block // _LANES, _env.device_info(x.device).max_warps)
    return {"HC": padded, "BLOCK": block, "num_warps": warps}


def _tokens(x: Tensor) -> int:
    return math.prod(x.shape[:-2])


def _fake_pre(x, h_pre):
    return x.new_empty((*x.shape[:-2], x.shape[-1]))


@named("(Tensor x, Tensor h_pre) -> Tensor", _fake_pre)
def mhc_pre_forward(x: Tensor, h_pre: Tensor) -> Tensor:
    """-> sum of streams [*, C]."""
    x, h_pre, meta = dense(x), dense(h_pre), _tile(x, _TILE // 2)
    y = torch.empty((*x.shape[:-2], x.shape[-1]), dtype=x.dtype, device=x.device)
    hc, n_cols = x.shape[-2:]
    grid = (_tokens(x), cdiv(n_cols, meta["BLOCK"]))
    launch(_pre_kernel, grid, x.device, y, x, h_pre, hc, n_cols, **meta)
    return y


def _fake_pre_backward(dy, x, h_pre, need_dx, need_dh):
    return x.new_empty(x.shape if need_dx else 0), h_pre.new_empty(h_pre.shape if need_dh else 0)


@named(
    "(Tensor dy, Tensor x, Tensor h_pre, bool need_dx, bool need_dh) -> (Tensor, Tensor)",
    _fake_pre_backward,
)
def mhc_pre_backward(
    dy: Tensor, x: Tensor, h_pre: Tensor, need_dx: bool, need_dh: bool
) -> tuple[Tensor, Tensor]:
    """-> dx, dh_pre; what is not needed is empty."""
    x, h_pre, dy2 = dense(x), dense(h_pre), rows(dy)
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    dh = torch.empty(h_pre.shape if need_dh else 0, dtype=h_pre.dtype, device=x.device)
    launch(
        _pre_backward_kernel, (_tokens(x),), x.device,
        dx, dh, dy2, dy2.stride(0), x, h_pre, *x.shape[-2:],
        NEED_DX=need_dx, NEED_DH=need_dh, **_tile(x, _TILE),
    )  # fmt: skip
    return dx, dh


def _fake_post_res(x, f_out, h_post, h_res):
    return x.new_empty(x.shape)


@named("(Tensor x, Tensor f_out, Tensor h_post, Tensor h_res) -> Tensor", _fake_post_res)
def mhc_post_res_forward(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """-> new streams [*, HC, C]."""
    x, f2, meta = dense(x), rows(f_out), _tile(x, _TILE // 2)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hc, n_cols = x.shape[-2:]
    grid = (_tokens(x), cdiv(n_cols, meta["BLOCK"]))
    args = (y, x, f2, f2.stride(0), dense(h_post), dense(h_res), n_cols)
    launch(_post_res_kernel, grid, x.device, *args, hc=hc, **meta)
    return y


def _fake_post_res_backward(dy, x, f_out, h_post, h_res, need_dx, need_df, need_dh):
    return (
        x.new_empty(x.shape if need_dx else 0),
        f_out.new_empty(f_out.shape if need_df else 0),
        h_post.new_empty(h_post.shape if need_dh else 0),
        h_res.new_empty(h_res.shape if need_dh else 0),
    )


@named(
    "(Tensor dy, Tensor x, Tensor f_out, Tensor h_post, Tensor h_res, bool need_dx, bool need_df, bool need_dh)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_post_res_backward,
)
def mhc_post_res_backward(
    dy: Tensor, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor, need_dx: bool, need_df: bool, need_dh: bool
) -> Any:  # fmt: skip
    """-> dx, df_out, dh_post, dh_res; what is not needed is empty."""
    dy, x, f2 = dense(dy), dense(x), rows(f_out)
    h_post, h_res = dense(h_post), dense(h_res)
    outputs = tuple(
        torch.empty(like.shape if need else 0, dtype=like.dtype, device=x.device)
        for like, need in ((x, need_dx), (f_out, need_df), (h_post, need_dh), (h_res, need_dh))
    )
    hc, n_cols = x.shape[-2:]
    launch(
        _post_res_backward_kernel, (_tokens(x),), x.device,
        *outputs, dy, x, f2, f2.stride(0), h_post, h_res, n_cols,
        hc=hc, NEED_DX=need_dx, NEED_DF=need_df, NEED_DH=need_dh, **_tile(x, _TILE),
    )  # fmt: skip
    return outputs


# 4 op


class _Pre(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h_pre: Tensor) -> Tensor:
        ctx.save_for_backward(x, h_pre)
        return mhc_pre_forward(x, h_pre)

    @staticmethod
    @first_order("mhc_pre")
    def backward(ctx: Any, dy: Tensor) -> Any:
        need = ctx.needs_input_grad
        found = mhc_pre_backward(dy, *ctx.saved_tensors, *need)
        return tuple(g if n else None for g, n in zip(found, need, strict=True))


class _PostRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        ctx.save_for_backward(x, f_out, h_post, h_res)
        return mhc_post_res_forward(x, f_out, h_post, h_res)

    @staticmethod
    @first_order("mhc_post_res")
    def backward(ctx: Any, dy: Tensor) -> Any:
        need = ctx.needs_input_grad
        found = mhc_post_res_backward(dy, *ctx.saved_tensors, need[0], need[1], need[2] or need[3])
        return tuple(g if n else None for g, n in zip(found, need, strict=True))


def supports(x: Tensor, *_: Any) -> str | None:
    """Any width; the streams of a token are unrolled."""
    if not 0 < x.shape[-2] <= _MAX_STREAMS:
        return f"kernels take 1 to {_MAX_STREAMS} streams, not {x.shape[-2]}"
    return "streams have no columns" if x.shape[-1] == 0 else None


def cost_pre(x: Tensor, h_pre: Tensor) -> Cost:
    """x in, a stream out; then x and a stream in, dx out."""
    n, h = x.numel() * x.element_size(), h_pre.numel() * h_pre.element_size()
    one = n // x.shape[-2]
    return Cost(n + one + h, 2 * n + one + 2 * h, saved=0)


def cost_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Cost:
    """x and f in, x out; then x, f, dy in, dx and df out."""
    n, f = x.numel() * x.element_size(), f_out.numel() * f_out.element_size()
    h = h_post.numel() * h_post.element_size() + h_res.numel() * h_res.element_size()
    return Cost(2 * n + f + h, 3 * n + 2 * f + 2 * h, saved=0)


OP_PRE = Op("mhc_pre", reference_pre, reference_pre, _Pre.apply, supports, cost_pre)
OP_POST_RES = Op(
    "mhc_post_res",
    reference_post_res,
    reference_post_res,
    _PostRes.apply,
    supports,
    cost_post_res,
)
