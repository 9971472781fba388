"""The kernels of `modulated_rms_norm`.

x, dy `[R, D]`, scale, shift `[M, D]` with adjacent columns and any row stride; y, dx contiguous; w `[D]`; rstd `[R]`
fp32. Every row of scale serves PER rows of x: a program takes `blocks` of them whole, or one of `parts` of one. What is
the same for the rows of a block is loaded once. With EACH every row has its own scale, and all rows are one block.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

from liger_kernel.ops._device import row_base
from liger_kernel.ops._rms_kernels import scale_of
from liger_kernel.ops._triton import tl, triton


@triton.jit
def _load(P, offsets, mask):
    return tl.load(P + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weight(
    W, cols, m_col, offset, HAS_W: tl.constexpr, ROUND_W: tl.constexpr, BLOCK: tl.constexpr
):
    """offset + w, or ones."""
    weight = tl.full((BLOCK,), 1.0, tl.float32)
    if HAS_W:
        weight = scale_of(W, cols, m_col, offset, ROUND_W)
    return weight


@triton.jit
def forward_kernel(
    Y, X, sX_row, SCALE, sSCALE_row, SHIFT, sSHIFT_row, W, RSTD, n_cols, n_blocks, per, blocks, parts, share,
    eps, offset, EACH: tl.constexpr, LLAMA: tl.constexpr, HAS_W: tl.constexpr, ROUND_W: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    first_block = pid // parts * blocks
    cols = tl.arange(0, BLOCK)
    m_col = cols < n_cols
    w = _weight(W, cols, m_col, offset, HAS_W, ROUND_W, BLOCK)[None, :]
    for block in range(first_block, tl.minimum(first_block + blocks, n_blocks)):
        first = block * per + pid % parts * share
        last = tl.minimum(first + share, (block + 1) * per)
        if not EACH:
            m = w * (_load(SCALE, row_base(block, sSCALE_row) + cols, m_col) + 1.0)[None, :]
            if SHIFT is not None:
                shift = _load(SHIFT, row_base(block, sSHIFT_row) + cols, m_col)[None, :]
        for start in tl.range(first, last, ROWS, num_stages=STAGES):
            row = start + tl.arange(0, ROWS)
            m_row = row < last
            mask = m_row[:, None] & m_col[None, :]
            x = _load(X, row_base(row, sX_row)[:, None] + cols[None, :], mask)
            rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
            tl.store(RSTD + row, rstd, mask=m_row)
            y = x * rstd[:, None]
            if LLAMA:
                y = y.to(Y.dtype.element_ty).to(tl.float32)
            if EACH:
                at = row_base(row, sSCALE_row)[:, None] + cols[None, :]
                y = y * w * (_load(SCALE, at, mask) + 1.0)
                if SHIFT is not None:
                    y += _load(SHIFT, row_base(row, sSHIFT_row)[:, None] + cols[None, :], mask)
            else:
                y = y * m
                if SHIFT is not None:
                    y += shift
            at = row_base(row, n_cols)[:, None] + cols[None, :]
            tl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    DX, DSCALE, DSHIFT, DWP, DY, sDY_row, X, sX_row, SCALE, sSCALE_row, W, RSTD,
    n_cols, n_blocks, per, blocks, parts, share, offset,
    EACH: tl.constexpr, LLAMA: tl.constexpr, HAS_W: tl.constexpr, ROUND_W: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DSCALE: tl.constexpr, NEED_DSHIFT: tl.constexpr, NEED_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dscale and dw are both made of the sum of dy * n over the rows of a block."""
    pid = tl.program_id(0)
    first_block = pid // parts * blocks
    cols = tl.arange(0, BLOCK)
    m_col = cols < n_cols
    dw = tl.zeros((BLOCK,), tl.float32)
    for block in range(first_block, tl.minimum(first_block + blocks, n_blocks)):
        first = block * per + pid % parts * share
        last = tl.minimum(first + share, (block + 1) * per)
        dots = tl.zeros((BLOCK,), tl.float32)
        dshift = tl.zeros((BLOCK,), tl.float32)
        scale_row = SCALE + row_base(block, sSCALE_row) + cols
        for start in tl.range(first, last, ROWS, num_stages=STAGES):
            row = start + tl.arange(0, ROWS)
            m_row = row < last
            mask = m_row[:, None] & m_col[None, :]
            dy = _load(DY, row_base(row, sDY_row)[:, None] + cols[None, :], mask)
            x = _load(X, row_base(row, sX_row)[:, None] + cols[None, :], mask)
            rstd = tl.load(RSTD + row, mask=m_row, other=0.0)
            n = x * rstd[:, None]
            dot = dy * (n.to(DY.dtype.element_ty).to(tl.float32) if LLAMA else n)
            at = row_base(row, n_cols)[:, None] + cols[None, :]
            # w and scale come from the nearest cache again and again: in registers they would take the room of rows.
            w = _weight(W, cols, m_col, offset, HAS_W, ROUND_W, BLOCK)
            if EACH:
                m = _load(SCALE, row_base(row, sSCALE_row)[:, None] + cols[None, :], mask) + 1.0
                if NEED_DSCALE:
                    ds = dot * w[None, :]
                    tl.store(DSCALE + at, ds.to(DSCALE.dtype.element_ty), mask=mask)
                dw += tl.sum(dot * m, axis=0)
                m = m * w[None, :]
            else:
                m = ((_load(scale_row, 0, m_col) + 1.0) * w)[None, :]
                dots += tl.sum(dot, axis=0)
                dshift += tl.sum(dy, axis=0)
            if NEED_DX:
                g = dy * m
                dx = rstd[:, None] * (g - n * (tl.sum(g * n, axis=1) / n_cols)[:, None])
                tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
        if not EACH:
            dw += dots * (_load(scale_row, 0, m_col) + 1.0)
            at = row_base(pid % parts * n_blocks + block, n_cols) + cols
            if NEED_DSCALE:
                w = _weight(W, cols, m_col, offset, HAS_W, ROUND_W, BLOCK)
                tl.store(DSCALE + at, (dots * w).to(DSCALE.dtype.element_ty), mask=m_col)
            if NEED_DSHIFT:
                tl.store(DSHIFT + at, dshift.to(DSHIFT.dtype.element_ty), mask=m_col)
    if NEED_DW:
        tl.store(DWP + row_base(pid, n_cols) + cols, dw, mask=m_col)
