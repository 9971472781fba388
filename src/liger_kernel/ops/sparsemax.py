"""Sparsemax: the point of the probability simplex that is nearest to x.   y = max(x - tau, 0),   sum y = 1

    x, y: [*, D], along any dimension

The threshold tau is the root of f(t) = sum max(x - t, 0) - 1, which is convex, decreasing and piecewise linear:
Newton's steps from max x - 1, where f >= 0, climb to it and reach it exactly. With S the entries above t,

    t <- (sum of x over S - 1) / |S|,   until S is the same set twice.

Each step takes f * |S| down to at most a quarter (f'/f + |S'|/|S| <= 1 by convexity), so a row of D values needs at
most about log2 D + 12 of them, usually 3 to 8; nothing is sorted. x enters as x - max x: an offset costs no digits.

Backward   dx = dy - mean of dy over S in S (the entries with y > 0), 0 elsewhere

Casts   fp32 throughout, one rounding at the end. Entries of -inf get 0; a row of nothing else, or one that holds NaN or
        +inf, is NaN.
Memory  forward reads x once and writes y, which is all that is kept; backward reads dy and y once and writes dx. Rows
        too wide for registers are read once for their maximum, then once for each step, from L2. They start from the
        threshold of their largest values, one for each column of a block: a subset of the row, so its threshold is not
        above the row's, and mostly it is the same.
Paper   Martins and Astudillo, "From Softmax to Sparsemax", arXiv:1602.02068
"""
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import Cost, Op, compute_dtype, first_order, named, require, rows
from liger_kernel.ops._triton import block_of, cdiv, launch, tl, triton

_MAX_BLOCK = 32768  # columns a program holds in registers
_WIDE_BLOCK = 8192  # columns a program visits at a time beyond that
_WIDE_WARPS = 16
# block of columns -> (rows, warps); narrower rows share the narrowest's tile. Few warps: each step reduces the row.
_SCHEDULE = {
    256: (16, 4), 512: (8, 4), 1024: (4, 4), 2048: (2, 4), 4096: (1, 4),
    8192: (1, 8), 16384: (1, 16), 32768: (1, 32),
}  # fmt: skip

# 1 reference


def reference(x: Tensor) -> Tensor:
    """The definition over the last dimension, by sorting."""
    wide = x.to(compute_dtype(x))
    z = wide - wide.amax(-1, keepdim=True)
    ordered = z.sort(-1, descending=True).values
    total = ordered.cumsum(-1)
    count = torch.arange(1, x.shape[-1] + 1, dtype=z.dtype, device=x.device)
    size = (1.0 + count * ordered > total).sum(-1, keepdim=True).clamp(min=1)
    tau = (total.gather(-1, size - 1) - 1.0) / size
    return (z - tau).clamp(min=0.0).to(x.dtype)


# 2 kernels


@triton.jit
def threshold(z, n_cols):
    """tau of rows z with maximum 0, and the size of the set it comes from. NaN is in every set and makes tau NaN."""
    tau = tl.max(z, axis=1) * 0.0 - 1.0
    size = tau * 0.0 + n_cols + 1.0
    moving = 1
    while moving > 0:
        inside = (z <= tau[:, None]) == 0
        count = tl.sum(inside.to(tl.float32), axis=1)
        tau = (tl.sum(tl.where(inside, z, 0.0), axis=1) - 1.0) / count
        moving = tl.max((count < size).to(tl.int32), axis=0)
        size = count
    return tau, size


@triton.jit
def _forward_kernel(
    Y, X, sX_row, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    m_row, m_col = (row < n_rows)[:, None], (cols < n_cols)[None, :]
    at_x = X + row_base(row, sX_row)[:, None] + cols[None, :]
    x = tl.load(at_x, mask=m_row & m_col, other=0.0).to(tl.float32)
    x = tl.where(m_col, x, float("-inf"))
    z = x - tl.max(x, axis=1)[:, None]
    tau = threshold(z, n_cols)[0][:, None]
    y = tl.where(z <= tau, 0.0, z - tau)
    at_y = Y + row_base(row, n_cols)[:, None] + cols[None, :]
    tl.store(at_y, y.to(Y.dtype.element_ty), mask=m_row & m_col)


@triton.jit
def _forward_wide_kernel(Y, X, sX_row, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    X += row_base(row, sX_row)
    Y += row_base(row, n_cols)
    lane = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, n_cols, BLOCK):
        m_col = start + lane < n_cols
        x = tl.load(X + start + lane, mask=m_col, other=float("-inf")).to(tl.float32)
        tops = tl.maximum(tops, x)
    top = tl.max(tops, axis=0)
    taus, sizes = threshold((tops - top)[None, :], n_cols)
    tau, seen, size = tl.max(taus, axis=0), tl.max(sizes, axis=0), n_cols + 1.0
    moving = 1
    while moving > 0:
        totals = tl.zeros((BLOCK,), tl.float32)
        counts = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n_cols, BLOCK):
            m_col = start + lane < n_cols
            x = tl.load(X + start + lane, mask=m_col, other=float("-inf")).to(tl.float32)
            inside = m_col & ((x - top <= tau) == 0)
            totals += tl.where(inside, x - top, 0.0)
            counts += inside.to(tl.float32)
        count = tl.sum(counts, axis=0)
        tau = (tl.sum(totals, axis=0) - 1.0) / count
        moving = ((count < size) & (count != seen)).to(tl.int32)
        size, seen = (
            count,
            -1.0,
        )  # the first time, the set of the largest values may be the row's already
    for start in range(0, n_cols, BLOCK):
        m_col = start + lane < n_cols
        z = tl.load(X + start + lane, mask=m_col, other=0.0).to(tl.float32) - top
        y = tl.where(z <= tau, 0.0, z - tau)
        tl.store(Y + start + lane, y.to(Y.dtype.element_ty), mask=m_col)


@triton.jit
def _backward_kernel(
    DX, DY, sDY_row, Y, sY_row, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    m_row, m_col = (row < n_rows)[:, None], (cols < n_cols)[None, :]
    at_dy = DY + row_base(row, sDY_row)[:, None] + cols[None, :]
    at_y = Y + row_base(row, sY_row)[:, None] + cols[None, :]
    dy = tl.load(at_dy, mask=m_row & m_col, other=0.0).to(tl.float32)
    y = tl.load(at_y, mask=m_row & m_col, other=1.0).to(tl.float32)
    inside = m_col & ((y <= 0.0) == 0)
    mean = tl.sum(tl.where(inside, dy, 0.0), axis=1) / tl.sum(inside.to(tl.float32), axis=1)
    dx = tl.where(inside, dy - mean[:, None], 0.0)
    at_dx = DX + row_base(row, n_cols)[:, None] + cols[None, :]
    tl.store(at_dx, dx.to(DX.dtype.element_ty), mask=m_row & m_col)


@triton.jit
def _backward_wide_kernel(DX, DY, sDY_row, Y, sY_row, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    DX += row_base(row, n_cols)
    DY += row_base(row, sDY_row)
    Y += row_base(row, sY_row)
    lane = tl.arange(0, BLOCK)
    totals = tl.zeros((BLOCK,), tl.float32)
    counts = tl.zeros((BLOCK,), tl.float32)
    pieces = tl.cdiv(n_cols, BLOCK)
    for piece in range(pieces):
        cols = piece * BLOCK + lane
        dy = tl.load(DY + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        y = tl.load(Y + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        inside = (y <= 0.0) == 0
        totals += tl.where(inside, dy, 0.0)
        counts += inside.to(tl.float32)
    mean = tl.sum(totals, axis=0) / tl.sum(counts, axis=0)
    for piece in range(pieces):
        cols = (pieces - 1 - piece) * BLOCK + lane  # backwards: what was read last is still in L2
        dy = tl.load(DY + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        y = tl.load(Y + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dx = tl.where(y <= 0.0, 0.0, dy - mean)
        tl.store(DX + cols, dx.to(DX.dtype.element_ty), mask=cols < n_cols)


# 3 launch


def _run(
    kernel: Any, wide_kernel: Any, device: torch.device, n_rows: int, n_cols: int, *args: Any
) -> None:
    max_warps, block = _env.device_info(device).max_warps, block_of(n_cols)
    if block > _MAX_BLOCK:
        meta = {"BLOCK": _WIDE_BLOCK, "num_warps": min(_WIDE_WARPS, max_warps)}
        launch(wide_kernel, (n_rows,), device, *args, n_cols, **meta)
        return
    n, warps = _SCHEDULE[max(block, 256)]
    n *= max(256 // block, 1)
    meta = {"ROWS": n, "BLOCK": block, "num_warps": min(warps, max_warps)}
    launch(kernel, (cdiv(n_rows, n),), device, *args, n_rows, n_cols, **meta)


def _fake_forward(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@named("(Tensor x) -> Tensor", _fake_forward)
def sparsemax_forward_kernel(x: Tensor) -> Tensor:
    """-> y like x, contiguous."""
    x2 = rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(_forward_kernel, _forward_wide_kernel, x.device, *x2.shape, y, x2, x2.stride(0))
    return y


def _fake_backward(dy: Tensor, y: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@named("(Tensor dy, Tensor y) -> Tensor", _fake_backward)
def sparsemax_backward_kernel(dy: Tensor, y: Tensor) -> Tensor:
    """-> dx like y, contiguous."""
    dy2, y2 = rows(dy), rows(y)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    operands = (dx, dy2, dy2.stride(0), y2, y2.stride(0))
    _run(_backward_kernel, _backward_wide_kernel, y.device, *y2.shape, *operands)
    return dx


# 4 op


class _Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = sparsemax_forward_kernel(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_order("sparsemax")
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return sparsemax_backward_kernel(dy, y)


def supports(x: Tensor) -> str | None:
    """Every width and layout."""
    return None if x.is_floating_point() else f"{x.dtype} is not a floating-point dtype"


def cost(x: Tensor) -> Cost:
    """x in, y out; then dy and y in, dx out."""
    n = x.numel() * x.element_size()
    return Cost(forward_bytes=2 * n, backward_bytes=3 * n, saved=0)


OP = Op("sparsemax", reference, reference, _Sparsemax.apply, supports, cost, rows=1)

# 5 public


def sparsemax(x: Tensor, dim: int = -1, impl: str | None = None) -> Tensor:
    """The projection of x onto the probability simplex along a dimension: a softmax with true zeros.

    Args:
        x: any rank, width and strides; fp16, bf16, fp32 (fp64 on the torch path).
        dim: the dimension that sums to 1. The last one is read in place, another one is copied.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        x's shape and dtype.
    Memory:
        Keeps the result for backward, x not.
    Raises:
        ValueError: x has no dimension, or none of its values lie along `dim`.
        IndexError: x has no dimension `dim`.
    """
    require(x.dim() > 0, "sparsemax: x must have a dimension to sum over; got a scalar.")
    last = x.movedim(dim, -1)
    require(
        last.shape[-1] > 0,
        f"sparsemax: dimension {dim} of x {list(x.shape)} is empty; nothing there can sum to 1.",
    )
    return OP(last, impl=impl).movedim(-1, dim)


class LigerSparsemaxFunction:
    """`apply(x, dim)` is `sparsemax`."""

    @staticmethod
    def apply(x: Tensor, dim: int) -> Tensor:
        return sparsemax(x, dim)
