"""The kernels of `gated_rms_norm`. Program (i, j): rows of run i, columns of group j.

x, z, dy `[R, D]` with adjacent columns and any row stride; y, dx, dz contiguous; w `[D]`; rstd `[groups, R]` fp32.
GATE_FIRST: the gate multiplies what is normalised; else what is left of it. LLAMA: the roundings of Hugging Face's
modules that come to the weight in x's dtype.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

from liger_kernel.ops._device import logistic, rounded, row_base
from liger_kernel.ops._triton import tl, triton


@triton.jit
def _load(P, offsets, mask):
    return tl.load(P + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _gate(z, ACT: tl.constexpr):
    """act(z) and act'(z); a caller that drops the second does not pay for it."""
    c, dc = logistic(z)
    if ACT == "silu":
        dc = c + z * dc
        c = z * c
    else:
        tl.static_assert(ACT == "sigmoid")
    return c, dc


@triton.jit
def forward_kernel(
    Y, X, sX_row, Z, sZ_row, W, RSTD, n_rows, n_cols, size, eps,
    ACT: tl.constexpr, GATE_FIRST: tl.constexpr, LLAMA: tl.constexpr, ROUND_U: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    m_row = row < n_rows
    m_col = lane < size
    mask = m_row[:, None] & m_col[None, :]
    cols = group * size + lane
    x = _load(X, row_base(row, sX_row)[:, None] + cols[None, :], mask)
    z = _load(Z, row_base(row, sZ_row)[:, None] + cols[None, :], mask)
    a, _ = _gate(z, ACT)
    if GATE_FIRST:
        x = x * a
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    tl.store(RSTD + row_base(group, n_rows) + row, rstd, mask=m_row)
    y = rounded(x * rstd[:, None], Y, LLAMA) * _load(W, cols, m_col)[None, :]
    if not GATE_FIRST:
        y = rounded(y, Y, ROUND_U) * a
    at = row_base(row, n_cols)[:, None] + cols[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    DX, DZ, DWP, DY, sDY_row, X, sX_row, Z, sZ_row, W, RSTD, n_rows, n_cols, size, rows_per_program,
    ACT: tl.constexpr, GATE_FIRST: tl.constexpr, LLAMA: tl.constexpr, ROUND_U: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DZ: tl.constexpr, NEED_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    group = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    m_col = lane < size
    cols = group * size + lane
    dw = tl.zeros(
        (ROWS, BLOCK), tl.float32
    )  # summed over rows at the end: no exchange between warps in the loop
    first = pid * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    RSTD += row_base(group, n_rows)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        m_row = row < last
        mask = m_row[:, None] & m_col[None, :]
        dy = _load(DY, row_base(row, sDY_row)[:, None] + cols[None, :], mask)
        x = _load(X, row_base(row, sX_row)[:, None] + cols[None, :], mask)
        z = _load(Z, row_base(row, sZ_row)[:, None] + cols[None, :], mask)
        rstd = tl.load(RSTD + row, mask=m_row, other=0.0)
        w = _load(W, cols, m_col)[None, :]
        a, slope = _gate(z, ACT)
        n = (x * a if GATE_FIRST else x) * rstd[:, None]
        n_stored = rounded(n, DY, LLAMA)
        du = dy if GATE_FIRST else dy * a
        if NEED_DW:
            dw += du * n_stored
        g = du * w
        at = row_base(row, n_cols)[:, None] + cols[None, :]
        if NEED_DX or GATE_FIRST:
            dx = rstd[:, None] * (g - n * (tl.sum(g * n, axis=1) / size)[:, None])
            if NEED_DX:
                stored = dx * a if GATE_FIRST else dx
                tl.store(DX + at, stored.to(DX.dtype.element_ty), mask=mask)
        if NEED_DZ:
            dz = dx * x if GATE_FIRST else dy * rounded(n_stored * w, DY, ROUND_U)
            dz = dz * slope
            tl.store(DZ + at, dz.to(DZ.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(DWP + row_base(pid, n_cols) + cols, tl.sum(dw, axis=0), mask=m_col)
