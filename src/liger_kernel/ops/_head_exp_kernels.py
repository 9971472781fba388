"""Products of a vocabulary head whose epilogue is the exponential of a softmax.

For a token with hidden state h, label y and logits z = h W^T + b, x = transform(z),

    E_v = exp(x_v - base)   base = x_y, from a dot product of its own      rest = sum over v != y of E_v
    logp = x_y - lse = -log(1 + rest)                                      if base = x_y

and with a = dL/dlogp the gradient of the logits, dz_v = a ([v = y] - p_v) dx/dz_v, is a row factor times what is there:

    dz_v = f E'_v     f = -a / (E_y + rest)     E'_v = E_v dx/dz_v,  but E'_y = -rest dx/dz_y
    dh = f (E' W)     dW = E'^T (f h)

So no pass over the logits is left, they are never rounded, and 1 - p_y is summed, not subtracted. E is rounded to 16
bits where E' enters its products, which is the rounding that dz itself has elsewhere; bf16 has the exponents of fp32.

A label more than 55 nats below the largest logit would overflow E. Such a chunk is done again with the row's maximum as
its base, by kernels that find nothing to do otherwise: no host decides.

E lies in pages [pages, rows, PAGE], PAGE columns being half a tile: those of a matrix, or wherever there is room.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

from liger_kernel.ops._ce_lanes import log1p, transform
from liger_kernel.ops._device import LN2, exp, row_base
from liger_kernel.ops._dot import dot, grouped, halves
from liger_kernel.ops._triton import tl, triton

# Of `rest`: products with E, of up to 2^20 terms, stay far within fp32.
_MOST = tl.constexpr(2.0**80)


@triton.jit(do_not_specialize=["ignore_index"])
def target_kernel(
    X_Y, SLOPE_Y, BASE, AGAIN, X, sX, W, sW, BIAS, T, n_cols, n_hidden, ignore_index, inner, outer,
    FORM: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x_y of every row and the varying part of its slope; base = x_y, +inf (E = 0) for an ignored row, NaN for a label
    out of range. AGAIN = 0.
    """
    row = tl.program_id(0)
    y = tl.load(T + row).to(tl.int64)
    known = (y >= 0) & (y < n_cols)
    X += row_base(row, sX)
    W += row_base(tl.where(known, y, 0), sW)
    parts = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_hidden, BLOCK):
        ks = start + tl.arange(0, BLOCK)
        x = tl.load(X + ks, mask=ks < n_hidden, other=0.0).to(tl.float32)
        parts += x * tl.load(W + ks, mask=ks < n_hidden, other=0.0).to(tl.float32)
    z = tl.sum(parts, axis=0)
    if HAS_BIAS:
        z += tl.load(BIAS + tl.where(known, y, 0)).to(tl.float32)
    x_y, slope = transform(z, inner, outer, FORM)
    x_y = tl.where(known, x_y, float("nan"))
    tl.store(X_Y + row, x_y)
    if FORM == "capped":
        tl.store(SLOPE_Y + row, slope)
    tl.store(BASE + row, tl.where(y == ignore_index, float("inf"), x_y))
    if row == 0:
        tl.store(AGAIN, 0)


@triton.jit
def _exponentials(
    z, E, row, col, base, label, BIAS, n_cols, inner, outer,
    MODE: tl.constexpr, FORM: tl.constexpr, HAS_BIAS: tl.constexpr, HITS: tl.constexpr, RAGGED: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """What a tile of products from (row, col) on adds to PARTIALS, and the largest E there."""
    cols = col + tl.arange(0, BN)
    if HAS_BIAS:
        z += tl.load(BIAS + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    x, slope = transform(z, inner, outer, FORM)
    if MODE == "top":
        if RAGGED:
            x = tl.where((cols < n_cols)[None, :], x, float("-inf"))
        part = tl.max(x, axis=1)
        top = part
    else:
        e = tl.where(cols[None, :] == label[:, None], 0.0, exp(x - base[:, None]))
        if RAGGED:
            e = tl.where((cols < n_cols)[None, :], e, 0.0)
        part = tl.sum(e, axis=1)
        top = part
        if HITS:
            top = tl.max(e, axis=1)
        if MODE == "store":
            page = tl.reshape((e * slope).to(E.dtype), (1, e.shape[0], BN))
            E.store([col // BN, row, 0], page)
    return part, top


@triton.jit
def product_kernel(
    E, PARTIALS, TOPS, X, W, BIAS, BASE, T, AGAIN, COUNT, n_rows, n_cols, n_hidden, m_blocks, n_blocks, inner, outer,
    MODE: tl.constexpr, FORM: tl.constexpr, HAS_BIAS: tl.constexpr, HITS: tl.constexpr, GUARDED: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """PARTIALS[n, row] = sum of E over the n-th block of columns without the label ("sum"), and E dx/dz itself
    ("store"); or the largest x there ("top"). HITS: TOPS[n, row] = the largest E of the block.

    X, W, E: descriptors of [rows, hidden], [columns, hidden], and of pages, half a tile each: halves take fewer
    registers and less shared memory. GUARDED: nothing unless AGAIN is 1. COUNT: rows behind so many are left out.
    """
    HALF: tl.constexpr = BN // 2
    if COUNT is not None:
        m_blocks = tl.minimum(m_blocks, tl.cdiv(tl.load(COUNT), BM))
    tiles = m_blocks * n_blocks
    if GUARDED:
        tiles *= tl.load(AGAIN)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        m, n = grouped(t, m_blocks, n_blocks, GROUP)
        z = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, n_hidden, BK, num_stages=STAGES):
            z += dot(X.load([m * BM, k]), W.load([n * BN, k]).T, PRECISION)
        rows = m * BM + tl.arange(0, BM)
        base = tl.load(BASE + rows, mask=rows < n_rows, other=float("inf"))
        label = tl.load(T + rows, mask=rows < n_rows, other=-1).to(tl.int32)
        left, right = halves(z, BM, HALF)
        part, top = _exponentials(
            left, E, m * BM, n * BN, base, label, BIAS, n_cols, inner, outer,
            MODE, FORM, HAS_BIAS, HITS, RAGGED, HALF,
        )  # fmt: skip
        more, higher = _exponentials(
            right, E, m * BM, n * BN + HALF, base, label, BIAS, n_cols, inner, outer,
            MODE, FORM, HAS_BIAS, HITS, RAGGED, HALF,
        )  # fmt: skip
        part = tl.maximum(part, more) if MODE == "top" else part + more
        at = row_base(n, n_rows) + rows
        tl.store(PARTIALS + at, part, mask=rows < n_rows)
        if HITS:
            tl.store(TOPS + at, tl.maximum(top, higher), mask=rows < n_rows)


@triton.jit(do_not_specialize=["n_rows", "n_blocks"])
def rebase_kernel(
    BASE, REST, PARTIALS, AGAIN, n_rows, n_blocks, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):
    """base = the row's maximum where `rest` was too large."""
    if tl.load(AGAIN) != 0:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        rest = tl.load(REST + rows, mask=rows < n_rows, other=0.0)
        m_rows = rest >= _MOST
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        for start in range(0, n_blocks, BLOCKS):
            ns = start + tl.arange(0, BLOCKS)
            at = PARTIALS + row_base(ns, n_rows)[:, None] + rows[None, :]
            part = tl.load(at, mask=(ns < n_blocks)[:, None] & m_rows[None, :], other=float("-inf"))
            top = tl.maximum(top, tl.max(part, axis=0))
        tl.store(BASE + rows, top, mask=m_rows)


@triton.jit(do_not_specialize=["n_rows", "n_blocks"])
def finish_kernel(
    LOGP, TOTAL, REST, CORRECT, AGAIN, PARTIALS, TOPS, X_Y, BASE, n_rows, n_blocks,
    HITS: tl.constexpr, GUARDED: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """rest, total = E_y + rest and logp of every row; AGAIN = 1 if a `rest` is too large. An ignored row: logp = 0,
    total = 1. HITS: CORRECT = 1 where the label's logit is above all others, 0 in ignored rows.
    """
    wanted = 1
    if GUARDED:
        wanted = tl.load(AGAIN)
    if wanted != 0:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        m_rows = rows < n_rows
        base = tl.load(BASE + rows, mask=m_rows, other=0.0)
        absent = base == float("inf")  # E = 0, or nothing was summed
        rest, top = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
        for start in range(0, n_blocks, BLOCKS):
            ns = start + tl.arange(0, BLOCKS)
            at = row_base(ns, n_rows)[:, None] + rows[None, :]
            mask = (ns < n_blocks)[:, None] & (m_rows & ~absent)[None, :]
            rest += tl.sum(tl.load(PARTIALS + at, mask=mask, other=0.0), axis=0)
            if HITS:
                top = tl.maximum(top, tl.max(tl.load(TOPS + at, mask=mask, other=0.0), axis=0))
        x_y = tl.load(X_Y + rows, mask=m_rows, other=0.0)
        e_y = exp(x_y - base)
        total = tl.where(absent, 1.0, e_y + rest)
        ratio = rest / e_y
        far = tl.log2(total) * LN2 + (base - x_y)
        nll = tl.where(absent, 0.0, tl.where(ratio < 0.5, log1p(ratio), far))
        tl.store(LOGP + rows, -nll, mask=m_rows)
        tl.store(TOTAL + rows, total, mask=m_rows)
        tl.store(REST + rows, rest, mask=m_rows)
        if HITS:
            tl.store(CORRECT + rows, tl.where(absent, 0.0, (top < e_y).to(tl.float32)), mask=m_rows)
        if not GUARDED:
            over = tl.max((m_rows & (rest >= _MOST)).to(tl.int32), axis=0)
            if over != 0:
                tl.store(AGAIN, 1)


@triton.jit(do_not_specialize=["ignore_index"])
def close_kernel(
    SCALED, F, E, X, A, TOTAL, REST, SLOPE_Y, T, sSCALED, sE_page, sE_row, sX, n_cols, n_hidden, ignore_index, slope,
    FORM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """F = f, SCALED = f h, and E' from E: its entry at the label, and zeros in an ignored row. slope: the constant part
    of dx/dz.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    y = tl.load(T + row).to(tl.int64)
    E += row_base(row, sE_row)
    ks = part * BLOCK + tl.arange(0, BLOCK)
    at = SCALED + row_base(row, sSCALED) + ks
    if y == ignore_index:
        tl.store(at, tl.zeros((BLOCK,), SCALED.dtype.element_ty), mask=ks < n_hidden)
        if part == 0:
            tl.store(F + row, 0.0)
            for start in range(0, n_cols, PAGE):
                page = E + row_base(start // PAGE, sE_page)
                tl.store(page + tl.arange(0, PAGE), tl.zeros((PAGE,), E.dtype.element_ty))
    else:
        f = tl.load(A + row).to(tl.float32) * -slope / tl.load(TOTAL + row)
        x = tl.load(X + row_base(row, sX) + ks, mask=ks < n_hidden, other=0.0).to(tl.float32)
        tl.store(at, (x * f).to(SCALED.dtype.element_ty), mask=ks < n_hidden)
        if part == 0:
            tl.store(F + row, f)
        if (part == 0) & (y >= 0) & (y < n_cols):
            entry = -tl.load(REST + row)
            if FORM == "capped":
                entry *= tl.load(SLOPE_Y + row)
            at_y = E + row_base(y // PAGE, sE_page) + y % PAGE
            tl.store(at_y, entry.to(E.dtype.element_ty))


@triton.jit
def back_kernel(
    DH, E, W, FACTOR, n_rows, n_cols, m_blocks, n_blocks,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dh = f (E' W), rounded once. DH, E, W: descriptors of [rows, hidden], pages, [columns, hidden]."""
    PAGE: tl.constexpr = BN // 2
    for t in tl.range(tl.program_id(0), m_blocks * n_blocks, tl.num_programs(0), flatten=True):
        m, n = grouped(t, m_blocks, n_blocks, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, n_cols, BK, num_stages=STAGES):
            e = E.load([k // PAGE, m * BM, k % PAGE]).reshape(BM, BK)
            acc += dot(e, W.load([k, n * BN]), PRECISION)
        rows = m * BM + tl.arange(0, BM)
        f = tl.load(FACTOR + rows, mask=rows < n_rows, other=0.0)
        DH.store([m * BM, n * BN], (acc * f[:, None]).to(DH.dtype))
