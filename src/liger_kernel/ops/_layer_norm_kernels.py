"""The kernels of `layer_norm`: rows held in registers, and rows too wide for that.

x, dy `[R, D]` with adjacent columns and any row stride; y, dx contiguous; w, b `[D]` or None; mean, rstd `[R]` fp32.
P holds the partial sums of dw and of db, those of the two that are needed: `[G, D]` each, of G programs over the rows.
"""

# pyright: reportGeneralTypeIssues=false
from liger_kernel.ops._device import row_base
from liger_kernel.ops._row_phases import (
    EACH,
    columns_of,
    phase_of,
    row_sum,
    store_vector,
    tile_base,
    tile_of_vector,
    two_row_sums,
)
from liger_kernel.ops._triton import tl, triton


@triton.jit
def _load(P, offsets, mask):
    return tl.load(P + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _two_means(a, b, n_cols):
    """Over rows; the warps of a program wait for one another once, not twice."""
    return tl.split(tl.sum(tl.join(a, b), axis=1) / n_cols)


@triton.jit
def forward_kernel(
    Y, X, W, B, MEAN, RSTD, sX_row, n_rows, n_cols, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The deviations from a rounded mean have a mean of their own, `slip`: taking it out costs a
    sum that runs beside that of the squares, and keeps the digits of rows far from zero.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    m_row = row < n_rows
    m_col = cols < n_cols
    mask = m_row[:, None] & m_col[None, :]
    x = _load(X, row_base(row, sX_row)[:, None] + cols[None, :], mask)
    mean = tl.sum(x, axis=1) / n_cols
    d = tl.where(mask, x - mean[:, None], 0.0)
    slip, square = _two_means(d, d * d, n_cols)
    rstd = tl.rsqrt(square - slip * slip + eps)
    tl.store(MEAN + row, mean + slip, mask=m_row)
    tl.store(RSTD + row, rstd, mask=m_row)
    y = (d - slip[:, None]) * rstd[:, None]
    if W is not None:
        y = y * _load(W, cols, m_col)[None, :]
    if B is not None:
        y = y + _load(B, cols, m_col)[None, :]
    at = row_base(row, n_cols)[:, None] + cols[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def forward_phases_kernel(
    Y, X, W, B, MEAN, RSTD, sX_row, n_rows, n_cols, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`forward_kernel` of rows that begin anywhere (`_row_phases`)."""
    place, phase, phases = phase_of(tl.program_id(0), n_cols)
    before, whole, lane, ends, m_ends = columns_of(phase, n_cols, BLOCK)
    row = (place * ROWS + tl.arange(0, ROWS)[None, :, None]) * phases + phase
    m_row = row < n_rows
    mask, e_mask = m_row & (lane < whole), m_row & m_ends
    w, e_w, b, e_b = 1.0, 1.0, 0.0, 0.0
    if W is not None:
        e_w = _load(W, ends, m_ends)
        w = tile_of_vector(W, before, whole, BLOCK).to(tl.float32)
    if B is not None:
        e_b = _load(B, ends, m_ends)
        b = tile_of_vector(B, before, whole, BLOCK).to(tl.float32)
    e_x = _load(X, row_base(row, sX_row) + ends, e_mask)
    x = _load(X, tile_base(row, sX_row, before) + lane, mask)
    mean = row_sum(x, e_x) / n_cols
    d, e_d = tl.where(mask, x - mean, 0.0), tl.where(e_mask, e_x - mean, 0.0)
    slip, square = two_row_sums(d, e_d, d * d, e_d * e_d)
    slip, square = slip / n_cols, square / n_cols
    rstd = tl.rsqrt(square - slip * slip + eps)
    tl.store(MEAN + row, mean + slip, mask=m_row)
    tl.store(RSTD + row, rstd, mask=m_row)
    y, e_y = (d - slip) * rstd * w + b, (e_d - slip) * rstd * e_w + e_b
    at = tile_base(row, n_cols, before) + lane
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask)
    at = row_base(row, n_cols) + ends
    tl.store(Y + at, e_y.to(Y.dtype.element_ty), mask=e_mask)


@triton.jit
def forward_wide_kernel(Y, X, W, B, MEAN, RSTD, sX_row, n_rows, n_cols, eps, BLOCK: tl.constexpr):
    """One pass for the statistics: every lane sums the deviations of its columns, and their squares,
    from the first of them, which lies where the row lies; then the lanes are merged.
    """
    row = tl.program_id(0)
    X += row_base(row, sX_row)
    Y += row_base(row, n_cols)
    lane = tl.arange(0, BLOCK)
    pivot = tl.load(X + lane).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(BLOCK, n_cols, BLOCK):
        cols = start + lane
        m_col = cols < n_cols
        x = tl.load(X + cols, mask=m_col, other=0.0, eviction_policy="evict_last").to(tl.float32)
        off = tl.where(m_col, x - pivot, 0.0)
        total += off
        squares += off * off
    held = ((n_cols - lane + BLOCK - 1) // BLOCK).to(tl.float32)  # columns of a lane, at least one
    middle = tl.sum(pivot * held + total, axis=0) / n_cols
    off = pivot - middle + total / held
    slip = tl.sum(off * held, axis=0) / n_cols
    squares += held * off * off - total * total / held
    variance = tl.sum(squares, axis=0) / n_cols - slip * slip
    rstd = tl.rsqrt(variance + eps)
    tl.store(MEAN + row, middle + slip)
    tl.store(RSTD + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + lane
        m_col = cols < n_cols
        y = (_load(X, cols, m_col) - middle - slip) * rstd
        if W is not None:
            y = y * _load(W, cols, m_col)
        if B is not None:
            y = y + _load(B, cols, m_col)
        tl.store(Y + cols, y.to(Y.dtype.element_ty), mask=m_col)


@triton.jit
def backward_kernel(
    DX, P, DY, X, W, MEAN, RSTD, sDY_row, sX_row, n_rows, n_cols, rows_per_program,
    NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    m_col = cols < n_cols
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    first = pid * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        m_row = row < last
        mask = m_row[:, None] & m_col[None, :]
        dy = _load(DY, row_base(row, sDY_row)[:, None] + cols[None, :], mask)
        if NEED_DB:
            db += tl.sum(dy, axis=0)
        if NEED_DX or NEED_DW:
            x = _load(X, row_base(row, sX_row)[:, None] + cols[None, :], mask)
            mean = tl.load(MEAN + row, mask=m_row, other=0.0)
            rstd = tl.load(RSTD + row, mask=m_row, other=0.0)
            n = (x - mean[:, None]) * rstd[:, None]  # of no use beyond n_cols, where dy is 0
            if NEED_DW:
                dw += tl.sum(dy * n, axis=0)
            if NEED_DX:
                g = dy
                if W is not None:
                    g = dy * _load(W, cols, m_col)[None, :]
                mean_g, mean_gn = _two_means(g, g * n, n_cols)
                dx = rstd[:, None] * (g - mean_g[:, None] - n * mean_gn[:, None])
                at = row_base(row, n_cols)[:, None] + cols[None, :]
                tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(P + row_base(pid, n_cols) + cols, dw, mask=m_col)
        pid += tl.num_programs(0)
    if NEED_DB:
        tl.store(P + row_base(pid, n_cols) + cols, db, mask=m_col)


@triton.jit
def _load_ends(DY, X, row, cols, mask, sDY_row, sX_row):
    dy = _load(DY, row_base(row, sDY_row) + cols, mask)
    return dy, _load(X, row_base(row, sX_row) + cols, mask)


@triton.jit
def backward_phases_kernel(
    DX, P, DY, X, W, MEAN, RSTD, sDY_row, sX_row, n_rows, n_cols, rows_per_program,
    NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`backward_kernel` of rows that begin anywhere (`_row_phases`). The weight, for which there are no accesses of 16
    bytes, is held; ends are read a step ahead, as a pipeline takes no accesses of two bytes.
    """
    pid = tl.program_id(0)
    place, phase, phases = phase_of(pid, n_cols)
    before, whole, lane, ends, m_ends = columns_of(phase, n_cols, BLOCK)
    first = place * rows_per_program
    last = tl.minimum(first + rows_per_program, (n_rows - phase + phases - 1) // phases)
    dw = tl.zeros((BLOCK // EACH, EACH), tl.float32)
    db = tl.zeros((BLOCK // EACH, EACH), tl.float32)
    e_dw = tl.zeros((BLOCK // EACH, 1), tl.float32)
    e_db = tl.zeros((BLOCK // EACH, 1), tl.float32)
    w, e_w = 1.0, 1.0
    if W is not None:
        e_w = _load(W, ends, m_ends)
        w = tile_of_vector(W, before, whole, BLOCK).to(tl.float32)
    i = first + tl.arange(0, ROWS)[None, :, None]
    row, e_mask = i * phases + phase, (i < last) & m_ends
    e_dy, e_x = _load_ends(DY, X, row, ends, e_mask, sDY_row, sX_row)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        i = start + tl.arange(0, ROWS)[None, :, None]
        row, m_row = i * phases + phase, i < last
        mask = m_row & (lane < whole)
        mean = tl.load(MEAN + row, mask=m_row, other=0.0)
        rstd = tl.load(RSTD + row, mask=m_row, other=0.0)
        i += ROWS
        later, e_mask = i * phases + phase, (i < last) & m_ends
        ahead = _load_ends(DY, X, later, ends, e_mask, sDY_row, sX_row)
        dy = _load(DY, tile_base(row, sDY_row, before) + lane, mask)
        x = _load(X, tile_base(row, sX_row, before) + lane, mask)
        n, e_n = (x - mean) * rstd, (e_x - mean) * rstd  # of no use beyond a row, where dy is 0
        if NEED_DB:
            db += tl.sum(dy, axis=1)
            e_db += tl.sum(e_dy, axis=1)
        if NEED_DW:
            dw += tl.sum(dy * n, axis=1)
            e_dw += tl.sum(e_dy * e_n, axis=1)
        if NEED_DX:
            g, e_g = dy * w, e_dy * e_w
            sum_g, sum_gn = two_row_sums(g, e_g, g * n, e_g * e_n)
            mean_g, mean_gn = sum_g / n_cols, sum_gn / n_cols
            dx, e_dx = rstd * (g - mean_g - n * mean_gn), rstd * (e_g - mean_g - e_n * mean_gn)
            at = tile_base(row, n_cols, before) + lane
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
            at = row_base(row, n_cols) + ends
            tl.store(DX + at, e_dx.to(DX.dtype.element_ty), mask=m_row & m_ends)
        e_dy, e_x = ahead
    if NEED_DW:
        store_vector(P + row_base(pid, n_cols), dw, e_dw, before, whole, ends, m_ends, BLOCK)
        pid += tl.num_programs(0)
    if NEED_DB:
        store_vector(P + row_base(pid, n_cols), db, e_db, before, whole, ends, m_ends, BLOCK)


@triton.jit
def dx_wide_kernel(
    DX, DY, X, W, MEAN, RSTD, sDY_row, sX_row, n_cols, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    DX += row_base(row, n_cols)
    DY += row_base(row, sDY_row)
    X += row_base(row, sX_row)
    mean = tl.load(MEAN + row)
    rstd = tl.load(RSTD + row)
    sum_g = tl.zeros((BLOCK,), tl.float32)
    sum_gn = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_col = cols < n_cols
        g = tl.load(DY + cols, mask=m_col, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x = tl.load(X + cols, mask=m_col, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if W is not None:
            g = g * _load(W, cols, m_col)
        sum_g += g
        sum_gn += g * (x - mean)
    mean_g = tl.sum(sum_g, axis=0) / n_cols
    mean_gn = tl.sum(sum_gn, axis=0) * rstd / n_cols
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_col = cols < n_cols
        g = _load(DY, cols, m_col)
        n = (_load(X, cols, m_col) - mean) * rstd
        if W is not None:
            g = g * _load(W, cols, m_col)
        dx = rstd * (g - mean_g - n * mean_gn)
        tl.store(DX + cols, dx.to(DX.dtype.element_ty), mask=m_col)


@triton.jit
def sums_wide_kernel(
    P, DY, X, MEAN, RSTD, sDY_row, sX_row, n_rows, n_cols, rows_per_program,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_col = cols < n_cols
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    first = part * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, n_rows)):
        dy = _load(DY, row_base(row, sDY_row) + cols, m_col)
        if NEED_DW:
            x = _load(X, row_base(row, sX_row) + cols, m_col)
            dw += dy * ((x - tl.load(MEAN + row)) * tl.load(RSTD + row))
        db += dy
    if NEED_DW:
        tl.store(P + row_base(part, n_cols) + cols, dw, mask=m_col)
        part += tl.num_programs(1)
    if NEED_DB:
        tl.store(P + row_base(part, n_cols) + cols, db, mask=m_col)
