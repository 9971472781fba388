"""The kernels of `rms_norm` and `fused_add_rms_norm`: rows held in registers, and rows too wide for that.

x, dy `[R, D]` with adjacent columns and any row stride; y, dx contiguous; w `[D]` or None; rstd `[R]` fp32. LLAMA
rounds the normalised row to y's dtype before the weight; ROUND_W rounds offset + w to w's dtype as eager does then.
With a residual R (else None) the norm is that of s = x + r, which is stored; with DS (else None) dx gets that gradient.
"""

# pyright: reportGeneralTypeIssues=false
from liger_kernel.ops._device import rounded, row_base
from liger_kernel.ops._row_phases import (
    EACH,
    columns_of,
    phase_of,
    row_sum,
    store_vector,
    tile_base,
    tile_of_vector,
)
from liger_kernel.ops._triton import tl, triton


@triton.jit
def _load(P, offsets, mask):
    return tl.load(P + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def scale_of(W, cols, mask, offset, ROUND: tl.constexpr):
    """offset + w in fp32, rounded to w's dtype under "llama" as eager does."""
    return _scale(tl.load(W + cols, mask=mask, other=0.0), offset, ROUND)


@triton.jit
def _scale(w, offset, ROUND: tl.constexpr):
    scale = w.to(tl.float32) + offset
    if ROUND:
        scale = scale.to(w.dtype).to(tl.float32)
    return scale


@triton.jit
def _summed(S, at, x, r, mask):
    """x + r as it is stored."""
    s = (x + r).to(S.dtype.element_ty)
    tl.store(S + at, s, mask=mask)
    return s.to(tl.float32)


@triton.jit
def forward_kernel(
    Y, X, S, R, W, RSTD, sX_row, sR_row, n_rows, n_cols, eps, offset,
    LLAMA: tl.constexpr, ROUND_W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    m_row = row < n_rows
    m_col = cols < n_cols
    mask = m_row[:, None] & m_col[None, :]
    at = row_base(row, n_cols)[:, None] + cols[None, :]
    x = _load(X, row_base(row, sX_row)[:, None] + cols[None, :], mask)
    if R is not None:
        r = _load(R, row_base(row, sR_row)[:, None] + cols[None, :], mask)
        x = _summed(S, at, x, r, mask)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
    tl.store(RSTD + row, rstd, mask=m_row)
    n = rounded(x * rstd[:, None], Y, LLAMA)
    if W is not None:
        n = n * scale_of(W, cols, m_col, offset, ROUND_W)[None, :]
    tl.store(Y + at, n.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def forward_phases_kernel(
    Y, X, S, R, W, RSTD, sX_row, sR_row, n_rows, n_cols, eps, offset,
    LLAMA: tl.constexpr, ROUND_W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`forward_kernel` of rows that begin anywhere (`_row_phases`)."""
    place, phase, phases = phase_of(tl.program_id(0), n_cols)
    before, whole, lane, ends, m_ends = columns_of(phase, n_cols, BLOCK)
    row = (place * ROWS + tl.arange(0, ROWS)[None, :, None]) * phases + phase
    m_row = row < n_rows
    mask, e_mask = m_row & (lane < whole), m_row & m_ends
    scale, e_scale = 1.0, 1.0
    if W is not None:
        e_scale = scale_of(W, ends, m_ends, offset, ROUND_W)
        scale = _scale(tile_of_vector(W, before, whole, BLOCK), offset, ROUND_W)
    e_at, at = row_base(row, n_cols) + ends, tile_base(row, n_cols, before) + lane
    e_x = _load(X, row_base(row, sX_row) + ends, e_mask)
    x = _load(X, tile_base(row, sX_row, before) + lane, mask)
    if R is not None:
        e_r = _load(R, row_base(row, sR_row) + ends, e_mask)
        r = _load(R, tile_base(row, sR_row, before) + lane, mask)
        e_x, x = _summed(S, e_at, e_x, e_r, e_mask), _summed(S, at, x, r, mask)
    rstd = tl.rsqrt(row_sum(x * x, e_x * e_x) / n_cols + eps)
    tl.store(RSTD + row, rstd, mask=m_row)
    y, e_y = rounded(x * rstd, Y, LLAMA) * scale, rounded(e_x * rstd, Y, LLAMA) * e_scale
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask)
    tl.store(Y + e_at, e_y.to(Y.dtype.element_ty), mask=e_mask)


@triton.jit
def forward_wide_kernel(
    Y, X, S, R, W, RSTD, sX_row, sR_row, n_rows, n_cols, eps, offset,
    LLAMA: tl.constexpr, ROUND_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = row_base(row, n_cols)
    X += row_base(row, sX_row)
    if R is not None:
        R += row_base(row, sR_row)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_col = cols < n_cols
        x = tl.load(X + cols, mask=m_col, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if R is not None:
            r = tl.load(R + cols, mask=m_col, other=0.0, eviction_policy="evict_last")
            x = (x + r.to(tl.float32)).to(S.dtype.element_ty).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + eps)
    tl.store(RSTD + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_col = cols < n_cols
        x = _load(X, cols, m_col)
        if R is not None:
            s = (x + _load(R, cols, m_col)).to(S.dtype.element_ty)
            tl.store(S + at + cols, s, mask=m_col)
            x = s.to(tl.float32)
        n = rounded(x * rstd, Y, LLAMA)
        if W is not None:
            n = n * scale_of(W, cols, m_col, offset, ROUND_W)
        tl.store(Y + at + cols, n.to(Y.dtype.element_ty), mask=m_col)


@triton.jit
def _store_dx(
    DX, DS, W, dy, n, rstd, row, cols, mask, m_col, sDS_row, n_cols, offset, ROUND_W: tl.constexpr
):
    """Of whole rows, n being x * rstd."""
    g = dy
    if W is not None:
        g = dy * scale_of(W, cols, m_col, offset, ROUND_W)[None, :]
    mean = tl.sum(g * n, axis=1) / n_cols
    dx = rstd[:, None] * (g - n * mean[:, None])
    if DS is not None:
        dx += _load(DS, row_base(row, sDS_row)[:, None] + cols[None, :], mask)
    at = row_base(row, n_cols)[:, None] + cols[None, :]
    tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    DX, DWP, DS, DY, X, W, RSTD, sDS_row, sDY_row, sX_row, n_rows, n_cols, rows_per_program, offset,
    LLAMA: tl.constexpr, ROUND_W: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    m_col = cols < n_cols
    dw = tl.zeros((BLOCK,), tl.float32)
    first = pid * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        m_row = row < last
        mask = m_row[:, None] & m_col[None, :]
        dy = _load(DY, row_base(row, sDY_row)[:, None] + cols[None, :], mask)
        x = _load(X, row_base(row, sX_row)[:, None] + cols[None, :], mask)
        rstd = tl.load(RSTD + row, mask=m_row, other=0.0)
        n = x * rstd[:, None]
        if NEED_DW:
            dw += tl.sum(dy * rounded(n, DY, LLAMA), axis=0)
        if NEED_DX:
            _store_dx(DX, DS, W, dy, n, rstd, row, cols, mask, m_col, sDS_row, n_cols, offset, ROUND_W)  # fmt: skip
    if NEED_DW:
        tl.store(DWP + pid * n_cols + cols, dw, mask=m_col)


@triton.jit
def _load_ends(DS, DY, X, row, cols, mask, sDS_row, sDY_row, sX_row):
    ds = 0.0
    if DS is not None:
        ds = _load(DS, row_base(row, sDS_row) + cols, mask)
    dy = _load(DY, row_base(row, sDY_row) + cols, mask)
    return ds, dy, _load(X, row_base(row, sX_row) + cols, mask)


@triton.jit
def backward_phases_kernel(
    DX, DWP, DS, DY, X, W, RSTD, sDS_row, sDY_row, sX_row, n_rows, n_cols, rows_per_program, offset,
    LLAMA: tl.constexpr, ROUND_W: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`backward_kernel` of rows that begin anywhere (`_row_phases`). Its scale, for which there are no accesses of 16
    bytes, is held; ends are read a step ahead, as a pipeline takes no accesses of two bytes.
    """
    pid = tl.program_id(0)
    place, phase, phases = phase_of(pid, n_cols)
    before, whole, lane, ends, m_ends = columns_of(phase, n_cols, BLOCK)
    first = place * rows_per_program
    last = tl.minimum(first + rows_per_program, (n_rows - phase + phases - 1) // phases)
    dw = tl.zeros((BLOCK // EACH, EACH), tl.float32)
    e_dw = tl.zeros((BLOCK // EACH, 1), tl.float32)
    scale, e_scale = 1.0, 1.0
    if W is not None:
        e_scale = scale_of(W, ends, m_ends, offset, ROUND_W)
        scale = _scale(tile_of_vector(W, before, whole, BLOCK), offset, ROUND_W)
    i = first + tl.arange(0, ROWS)[None, :, None]
    row, e_mask = i * phases + phase, (i < last) & m_ends
    e_ds, e_dy, e_x = _load_ends(DS, DY, X, row, ends, e_mask, sDS_row, sDY_row, sX_row)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        i = start + tl.arange(0, ROWS)[None, :, None]
        row, m_row = i * phases + phase, i < last
        mask = m_row & (lane < whole)
        rstd = tl.load(RSTD + row, mask=m_row, other=0.0)
        i += ROWS
        later, e_mask = i * phases + phase, (i < last) & m_ends
        ahead = _load_ends(DS, DY, X, later, ends, e_mask, sDS_row, sDY_row, sX_row)
        dy = _load(DY, tile_base(row, sDY_row, before) + lane, mask)
        x = _load(X, tile_base(row, sX_row, before) + lane, mask)
        n, e_n = x * rstd, e_x * rstd
        if NEED_DW:
            dw += tl.sum(dy * rounded(n, DY, LLAMA), axis=1)
            e_dw += tl.sum(e_dy * rounded(e_n, DY, LLAMA), axis=1)
        if NEED_DX:
            g, e_g = dy * scale, e_dy * e_scale
            mean = row_sum(g * n, e_g * e_n) / n_cols
            dx, e_dx = rstd * (g - n * mean), rstd * (e_g - e_n * mean) + e_ds
            if DS is not None:
                dx += _load(DS, tile_base(row, sDS_row, before) + lane, mask)
            at = tile_base(row, n_cols, before) + lane
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
            at = row_base(row, n_cols) + ends
            tl.store(DX + at, e_dx.to(DX.dtype.element_ty), mask=m_row & m_ends)
        e_ds, e_dy, e_x = ahead
    if NEED_DW:
        store_vector(DWP + row_base(pid, n_cols), dw, e_dw, before, whole, ends, m_ends, BLOCK)


@triton.jit
def backward_few_kernel(
    DX, DW, DS, DY, X, W, RSTD, sDS_row, sDY_row, sX_row, n_rows, n_cols, offset,
    LLAMA: tl.constexpr, ROUND_W: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx of ROWS rows, then dw of COLUMNS columns over all (DEPTH at most): nothing that another program computes is
    needed.
    """
    pid = tl.program_id(0)
    if NEED_DX:
        row = pid * ROWS + tl.arange(0, ROWS)
        m_row = row < n_rows
        if pid * ROWS < n_rows:
            cols = tl.arange(0, BLOCK)
            m_col = cols < n_cols
            mask = m_row[:, None] & m_col[None, :]
            dy = _load(DY, row_base(row, sDY_row)[:, None] + cols[None, :], mask)
            x = _load(X, row_base(row, sX_row)[:, None] + cols[None, :], mask)
            rstd = tl.load(RSTD + row, mask=m_row, other=0.0)
            n = x * rstd[:, None]
            _store_dx(DX, DS, W, dy, n, rstd, row, cols, mask, m_col, sDS_row, n_cols, offset, ROUND_W)  # fmt: skip
    if NEED_DW:
        some = pid * COLUMNS + tl.arange(0, COLUMNS)
        m_some = some < n_cols
        if pid * COLUMNS < n_cols:
            rows = tl.arange(0, DEPTH)
            m_rows = rows < n_rows
            inside = m_rows[:, None] & m_some[None, :]
            dys = _load(DY, row_base(rows, sDY_row)[:, None] + some[None, :], inside)
            xs = _load(X, row_base(rows, sX_row)[:, None] + some[None, :], inside)
            ns = xs * tl.load(RSTD + rows, mask=m_rows, other=0.0)[:, None]
            ns = rounded(ns, DY, LLAMA)
            tl.store(DW + some, tl.sum(dys * ns, axis=0).to(DW.dtype.element_ty), mask=m_some)


@triton.jit
def dx_wide_kernel(
    DX, DS, DY, X, W, RSTD, sDS_row, sDY_row, sX_row, n_cols, offset,
    ROUND_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    DX += row_base(row, n_cols)
    DY += row_base(row, sDY_row)
    X += row_base(row, sX_row)
    if DS is not None:
        DS += row_base(row, sDS_row)
    rstd = tl.load(RSTD + row)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_col = cols < n_cols
        g = tl.load(DY + cols, mask=m_col, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x = tl.load(X + cols, mask=m_col, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if W is not None:
            g = g * scale_of(W, cols, m_col, offset, ROUND_W)
        dot += g * x * rstd
    mean = tl.sum(dot, axis=0) / n_cols
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_col = cols < n_cols
        g = _load(DY, cols, m_col)
        x = _load(X, cols, m_col)
        if W is not None:
            g = g * scale_of(W, cols, m_col, offset, ROUND_W)
        dx = rstd * (g - x * rstd * mean)
        if DS is not None:
            dx += _load(DS, cols, m_col)
        tl.store(DX + cols, dx.to(DX.dtype.element_ty), mask=m_col)


@triton.jit
def dw_wide_kernel(
    DWP, DY, X, RSTD, sDY_row, sX_row, n_rows, n_cols, rows_per_program,
    LLAMA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_col = cols < n_cols
    dw = tl.zeros((BLOCK,), tl.float32)
    first = part * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, n_rows)):
        dy = _load(DY, row_base(row, sDY_row) + cols, m_col)
        n = _load(X, row_base(row, sX_row) + cols, m_col) * tl.load(RSTD + row)
        dw += dy * rounded(n, DY, LLAMA)
    tl.store(DWP + row_base(part, n_cols) + cols, dw, mask=m_col)
