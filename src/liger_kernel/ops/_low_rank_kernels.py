"""The kernels of `low_rank_update`: three skinny products, each of which reads its large operand once.

x `[N, D]` with adjacent columns and any row stride; h, g `[N, r]` fp32; weights of any strides. PRECISION says how a
product of two operands of given types keeps fp32 digits on tensor cores, see `product`. With a SEED elements of x, or
of the gradient that has its shape, are dropped.

Tensor cores truncate what they add up. So sums over many tiles are taken outside of them, and times a number that only
the launch knows: else the compiler moves the sum back.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

import torch

from liger_kernel import _env
from liger_kernel.ops import _dot
from liger_kernel.ops._device import row_base
from liger_kernel.ops._dropout import kept
from liger_kernel.ops._triton import tl, triton

_NARROW, _WIDE = torch.bfloat16, torch.float32
_IN_TERMS = {(_WIDE, _WIDE): "both", (_WIDE, _NARROW): "left", (_NARROW, _WIDE): "right"}


def precision(left: torch.dtype, right: torch.dtype) -> str:
    """The `PRECISION` of a product of operands of these dtypes.

    fp32 is taken apart into bf16 ("left", "right", "both"): bf16 beside it goes from memory to the tensor cores without
    passing through registers, which is what a kernel that shall keep up with memory needs; and six products of terms
    take less than what Triton does around three of tf32.
    """
    if not _env.interpreting() and (left, right) in _IN_TERMS:
        return _IN_TERMS[left, right]
    if left == right and left.itemsize == 2:
        return _dot.precision(left, right)
    return "ieee" if _env.interpreting() or _env.is_hip() else "tf32x3"


@triton.jit
def _terms(x):
    """fp32 as a sum of three bf16 numbers, exactly: 8 of its 24 digits each."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a b in fp32."""
    if PRECISION == "right":
        high, middle, low = _terms(b)
        total = tl.dot(a, low, total)
        total = tl.dot(a, middle, total)
        total = tl.dot(a, high, total)
    elif PRECISION == "left":
        high, middle, low = _terms(a)
        total = tl.dot(low, b, total)
        total = tl.dot(middle, b, total)
        total = tl.dot(high, b, total)
    elif PRECISION == "both":  # all products of terms but those below the last digit
        a_high, a_middle, a_low = _terms(a)
        b_high, b_middle, b_low = _terms(b)
        total = tl.dot(a_low, b_high, total)
        total = tl.dot(a_middle, b_middle, total)
        total = tl.dot(a_high, b_low, total)
        total = tl.dot(a_middle, b_high, total)
        total = tl.dot(a_high, b_middle, total)
        total = tl.dot(a_high, b_high, total)
    elif PRECISION == "native":
        total = tl.dot(a, b, total)
    else:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
    return total


@triton.jit
def down_kernel(
    H, X, W, SEED, sX_row, sW_rank, sW_col, n_rows, n_cols, rank, share, scale, dropped,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """h = scale * x w^T over `share` columns, a part of the sum; parts of h lie behind each other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    j = tl.arange(0, RANK)
    m_row, m_rank = row < n_rows, j < rank
    first = part * share
    total = tl.zeros((ROWS, RANK), tl.float32)
    for start in tl.range(first, tl.minimum(first + share, n_cols), COLUMNS, num_stages=STAGES):
        cols = start + tl.arange(0, COLUMNS)
        m_col = cols < n_cols
        at = row_base(row, sX_row)[:, None] + cols[None, :]
        x = tl.load(X + at, mask=m_row[:, None] & m_col[None, :], other=0.0)
        if SEED is not None:
            x = tl.where(kept(SEED, row, start, dropped, ROWS, COLUMNS), x, 0.0)
        at_w = row_base(cols, sW_col)[:, None] + row_base(j, sW_rank)[None, :]
        w = tl.load(W + at_w, mask=m_col[:, None] & m_rank[None, :], other=0.0)
        total += product(x, w, tl.zeros((ROWS, RANK), tl.float32), PRECISION) * scale
    at_h = row_base(part, n_rows) * rank + row_base(row, rank)[:, None] + j[None, :]
    tl.store(H + at_h, total, mask=m_row[:, None] & m_rank[None, :])


@triton.jit
def up_kernel(
    OUT, Y, H, W, SEED, sY_row, sW_row, sW_rank, n_rows, n_cols, rank, scale, dropped,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """out = y + scale * h w^T, a tile a program; no y: zero. RANK: ranks at a time."""
    blocks = tl.cdiv(n_cols, COLUMNS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) % blocks * COLUMNS
    cols = first + tl.arange(0, COLUMNS)
    m_row, m_col = row < n_rows, cols < n_cols
    mask = m_row[:, None] & m_col[None, :]
    at = row_base(row, n_cols)[:, None] + cols[None, :]
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    if Y is not None:  # on its way while the product is made
        at_y = row_base(row, sY_row)[:, None] + cols[None, :]
        y = tl.load(Y + at_y, mask=mask, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, rank, RANK, num_stages=1):
        j = start + tl.arange(0, RANK)
        m_rank = j < rank
        at_h = row_base(row, rank)[:, None] + j[None, :]
        h = tl.load(H + at_h, mask=m_row[:, None] & m_rank[None, :], other=0.0)
        at_w = row_base(cols, sW_row)[None, :] + row_base(j, sW_rank)[:, None]
        w = tl.load(W + at_w, mask=m_rank[:, None] & m_col[None, :], other=0.0)
        total = product(h, w, total, PRECISION)
    if SEED is not None:
        total = tl.where(kept(SEED, row, first, dropped, ROWS, COLUMNS), total, 0.0)
    out = y.to(tl.float32) + total * scale
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def columns_kernel(
    OUT, X, G, SEED, sX_row, sOUT_col, sOUT_rank, n_rows, n_cols, rank, share, scale, dropped,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """scale * x^T g over `share` rows, a part of the sum; parts lie behind each other, each laid out by the strides."""
    left = tl.program_id(0) * COLUMNS
    cols = left + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    j = tl.arange(0, RANK)
    m_col, m_rank = cols < n_cols, j < rank
    first = part * share
    last = tl.minimum(first + share, n_rows)
    total = tl.zeros((COLUMNS, RANK), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        m_row = row < last
        at = row_base(row, sX_row)[:, None] + cols[None, :]
        x = tl.load(X + at, mask=m_row[:, None] & m_col[None, :], other=0.0)
        if SEED is not None:
            x = tl.where(kept(SEED, row, left, dropped, ROWS, COLUMNS), x, 0.0)
        at_g = row_base(row, rank)[:, None] + j[None, :]
        g = tl.load(G + at_g, mask=m_row[:, None] & m_rank[None, :], other=0.0)
        total += product(tl.trans(x), g, tl.zeros((COLUMNS, RANK), tl.float32), PRECISION) * scale
    at_out = row_base(cols, sOUT_col)[:, None] + row_base(j, sOUT_rank)[None, :]
    result = total.to(OUT.dtype.element_ty)
    tl.store(
        OUT + row_base(part, n_cols) * rank + at_out, result, mask=m_col[:, None] & m_rank[None, :]
    )
