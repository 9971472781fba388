"""The kernels of `poly_norm`: rows held in registers, and rows too wide for that.

x, dy `[R, D]` with adjacent columns and any row stride; y, dx contiguous; w `[3]`, b `[1]`; rstd `[R, 3]` fp32;
P `[G, 4]` fp32, what program g of G adds to dw and db. Letters and formulas as in `poly_norm`.
"""
# pyright: reportGeneralTypeIssues=false

from liger_kernel.ops._device import row_base
from liger_kernel.ops._triton import tl, triton


@triton.jit
def _parameters(W, B):
    w0 = tl.load(W).to(tl.float32)
    w1 = tl.load(W + 1).to(tl.float32)
    w2 = tl.load(W + 2).to(tl.float32)
    return w0, w1, w2, tl.load(B).to(tl.float32)


@triton.jit
def _factors(RSTD, row, mask):
    RSTD += row_base(row, 3)
    r3 = tl.load(RSTD, mask=mask, other=0.0)
    r2 = tl.load(RSTD + 1, mask=mask, other=0.0)
    return r3, r2, tl.load(RSTD + 2, mask=mask, other=0.0)


@triton.jit
def forward_kernel(
    Y, X, sX_row, W, B, RSTD, n_rows, n_cols, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    m_row = row < n_rows
    mask = m_row[:, None] & (cols < n_cols)[None, :]
    at_x = X + row_base(row, sX_row)[:, None] + cols[None, :]
    x = tl.load(at_x, mask=mask, other=0.0).to(tl.float32)
    w0, w1, w2, b = _parameters(W, B)
    square = x * x
    fourth = square * square
    r3 = tl.rsqrt(tl.sum(square * fourth, axis=1) / n_cols + eps)
    r2 = tl.rsqrt(tl.sum(fourth, axis=1) / n_cols + eps)
    r1 = tl.rsqrt(tl.sum(square, axis=1) / n_cols + eps)
    at_r = RSTD + row_base(row, 3)
    tl.store(at_r, r3, mask=m_row)
    tl.store(at_r + 1, r2, mask=m_row)
    tl.store(at_r + 2, r1, mask=m_row)
    a3, a2, a1 = (r3 * w0)[:, None], (r2 * w1)[:, None], (r1 * w2)[:, None]
    y = x * (a1 + x * (a2 + x * a3)) + b
    at_y = Y + row_base(row, n_cols)[:, None] + cols[None, :]
    tl.store(at_y, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def forward_wide_kernel(Y, X, sX_row, W, B, RSTD, n_cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    X += row_base(row, sX_row)
    Y += row_base(row, n_cols)
    lane = tl.arange(0, BLOCK)
    pieces = tl.cdiv(n_cols, BLOCK)
    sums1 = tl.zeros((BLOCK,), tl.float32)
    sums2 = tl.zeros((BLOCK,), tl.float32)
    sums3 = tl.zeros((BLOCK,), tl.float32)
    for piece in range(pieces):
        cols = piece * BLOCK + lane
        x = tl.load(X + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        square = x * x
        sums1 += square
        sums2 += square * square
        sums3 += square * square * square
    r3 = tl.rsqrt(tl.sum(sums3, axis=0) / n_cols + eps)
    r2 = tl.rsqrt(tl.sum(sums2, axis=0) / n_cols + eps)
    r1 = tl.rsqrt(tl.sum(sums1, axis=0) / n_cols + eps)
    at_r = RSTD + row_base(row, 3)
    tl.store(at_r, r3)
    tl.store(at_r + 1, r2)
    tl.store(at_r + 2, r1)
    w0, w1, w2, b = _parameters(W, B)
    a3, a2, a1 = r3 * w0, r2 * w1, r1 * w2
    for piece in range(pieces):
        cols = (pieces - 1 - piece) * BLOCK + lane  # backwards: what was read last is still in L2
        x = tl.load(X + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        y = x * (a1 + x * (a2 + x * a3)) + b
        tl.store(Y + cols, y.to(Y.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def _gradient(dy, x, a3, a2, a1, c3, c2, c1):
    square = x * x
    return dy * (a1 + x * (2.0 * a2 + 3.0 * a3 * x)) - x * (
        c1 + square * (2.0 * c2 + 3.0 * c3 * square)
    )


@triton.jit
def backward_kernel(
    DX, P, DY, sDY_row, X, sX_row, W, B, RSTD, n_rows, n_cols, rows_per_program,
    NEED_DX: tl.constexpr, NEED_P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    w0, w1, w2, _ = _parameters(W, B)
    dw0 = tl.zeros((ROWS,), tl.float32)
    dw1 = tl.zeros((ROWS,), tl.float32)
    dw2 = tl.zeros((ROWS,), tl.float32)
    db = tl.zeros((ROWS,), tl.float32)
    first = pid * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        m_row = row < last
        mask = m_row[:, None] & (cols < n_cols)[None, :]
        at_dy = DY + row_base(row, sDY_row)[:, None] + cols[None, :]
        at_x = X + row_base(row, sX_row)[:, None] + cols[None, :]
        dy = tl.load(at_dy, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(at_x, mask=mask, other=0.0).to(tl.float32)
        r3, r2, r1 = _factors(RSTD, row, m_row)
        s1 = r1 * tl.sum(dy * x, axis=1)
        s2 = r2 * tl.sum(dy * x * x, axis=1)
        s3 = r3 * tl.sum(dy * x * x * x, axis=1)
        if NEED_P:
            dw0 += s3
            dw1 += s2
            dw2 += s1
            db += tl.sum(dy, axis=1)
        if NEED_DX:
            a3, a2, a1 = w0 * r3, w1 * r2, w2 * r1
            c3, c2, c1 = a3 * r3 * s3 / n_cols, a2 * r2 * s2 / n_cols, a1 * r1 * s1 / n_cols
            dx = _gradient(
                dy, x, a3[:, None], a2[:, None], a1[:, None], c3[:, None], c2[:, None], c1[:, None]
            )
            at_dx = DX + row_base(row, n_cols)[:, None] + cols[None, :]
            tl.store(at_dx, dx.to(DX.dtype.element_ty), mask=mask)
    if NEED_P:
        tl.store(P + pid * 4, tl.sum(dw0, axis=0))
        tl.store(P + pid * 4 + 1, tl.sum(dw1, axis=0))
        tl.store(P + pid * 4 + 2, tl.sum(dw2, axis=0))
        tl.store(P + pid * 4 + 3, tl.sum(db, axis=0))


@triton.jit
def backward_wide_kernel(
    DX, P, DY, sDY_row, X, sX_row, W, B, RSTD, n_rows, n_cols,
    NEED_DX: tl.constexpr, NEED_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    pieces = tl.cdiv(n_cols, BLOCK)
    w0, w1, w2, _ = _parameters(W, B)
    dw0, dw1, dw2, db = 0.0, 0.0, 0.0, 0.0
    for row in range(pid, n_rows, tl.num_programs(0)):
        x_row, dy_row = X + row_base(row, sX_row), DY + row_base(row, sDY_row)
        sums0 = tl.zeros((BLOCK,), tl.float32)
        sums1 = tl.zeros((BLOCK,), tl.float32)
        sums2 = tl.zeros((BLOCK,), tl.float32)
        sums3 = tl.zeros((BLOCK,), tl.float32)
        for piece in range(pieces):
            cols = piece * BLOCK + lane
            x = tl.load(x_row + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dy = tl.load(dy_row + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            sums0 += dy
            sums1 += dy * x
            sums2 += dy * x * x
            sums3 += dy * x * x * x
        r3, r2, r1 = _factors(RSTD, row, True)
        s1, s2, s3 = (
            r1 * tl.sum(sums1, axis=0),
            r2 * tl.sum(sums2, axis=0),
            r3 * tl.sum(sums3, axis=0),
        )
        dw0 += s3
        dw1 += s2
        dw2 += s1
        db += tl.sum(sums0, axis=0)
        a3, a2, a1 = w0 * r3, w1 * r2, w2 * r1
        c3, c2, c1 = a3 * r3 * s3 / n_cols, a2 * r2 * s2 / n_cols, a1 * r1 * s1 / n_cols
        for piece in range(pieces if NEED_DX else 0):
            cols = (pieces - 1 - piece) * BLOCK + lane
            x = tl.load(x_row + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dy = tl.load(dy_row + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dx = _gradient(dy, x, a3, a2, a1, c3, c2, c1)
            at_dx = DX + row_base(row, n_cols) + cols
            tl.store(at_dx, dx.to(DX.dtype.element_ty), mask=cols < n_cols)
    if NEED_P:
        tl.store(P + pid * 4, dw0)
        tl.store(P + pid * 4 + 1, dw1)
        tl.store(P + pid * 4 + 2, dw2)
        tl.store(P + pid * 4 + 3, db)
