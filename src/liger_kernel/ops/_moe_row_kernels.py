"""What `fused_moe` does row by row in backward: rows laid out for the products, and the activation's derivative.

Slots    a tile of ROWS rows of one expert has ROWS slots, whatever number of rows it holds, so that products over an
         expert's rows meet nobody else's: slot ROWS * tile + i is the tile's i-th row. Slots without a row are zero
         up to the next multiple of STEP, the rows a product takes at a time, and undefined beyond.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

from liger_kernel.ops._device import row_base
from liger_kernel.ops._moe_kernels import _gate
from liger_kernel.ops._triton import tl, triton


@triton.jit
def _places(TILES, ROWS: tl.constexpr, STEP: tl.constexpr, MANY: tl.constexpr):
    """This program's slots: themselves, their rows, which rows exist and which slots are to be written."""
    tile = tl.program_id(0) // (ROWS // MANY)
    i = tl.program_id(0) % (ROWS // MANY) * MANY + tl.arange(0, MANY)
    first, end = tl.load(TILES + tile * 3 + 1), tl.load(TILES + tile * 3 + 2)
    rows = first + i
    return tile * ROWS + i, rows, rows < end, i < (end - first + (STEP - 1)) // STEP * STEP


@triton.jit
def gather_kernel(
    Y, X, sX_row, TOKEN, TILES, N_TILES, n_cols,
    ROWS: tl.constexpr, STEP: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Y[slot] = X[token of its row]. The same rows of X are read for several experts; Y is not read soon."""
    if tl.program_id(0) // (ROWS // MANY) < tl.load(N_TILES):
        slots, rows, m_rows, m_slots = _places(TILES, ROWS, STEP, MANY)
        tokens = tl.load(TOKEN + rows, mask=m_rows, other=0)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        m_cols = (cols < n_cols)[None, :]
        at = X + row_base(tokens, sX_row)[:, None] + cols[None, :]
        x = tl.load(at, mask=m_rows[:, None] & m_cols, other=0.0, eviction_policy="evict_last")
        at = Y + row_base(slots, n_cols)[:, None] + cols[None, :]
        tl.store(at, x, mask=m_slots[:, None] & m_cols, eviction_policy="evict_first")


@triton.jit
def gate_backward_kernel(
    DBOTH, WEIGHTED, SUMS, U, BOTH, ROUTE, PAIRS, TILES, N_TILES, n_cols, alpha, limit, shift,
    PAIR: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr,
    NEED_BOTH: tl.constexpr, NEED_WEIGHTED: tl.constexpr, NEED_ROUTE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From U[slot], the gradient of a = act(gate, up) before the routing weight r, and BOTH[row] = gate and up:

    DBOTH[slot] = gradient of gate and up for da = r u;  WEIGHTED[slot] = r a;  SUMS[row] = <u, a>.
    """
    if tl.program_id(0) // (ROWS // MANY) < tl.load(N_TILES):
        slots, rows, m_rows, m_slots = _places(TILES, ROWS, STEP, MANY)
        pair = tl.load(PAIRS + rows, mask=m_rows, other=0)
        route = tl.load(ROUTE + pair, mask=m_rows, other=0.0).to(tl.float32)[:, None]
        apart = 1 if PAIR == "interleaved" else n_cols
        sums = tl.zeros((MANY,), tl.float32)
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            m_in = m_rows[:, None] & (cols < n_cols)[None, :]
            m_out = m_slots[:, None] & (cols < n_cols)[None, :]
            gates = (cols * 2 if PAIR == "interleaved" else cols)[None, :]
            at = row_base(rows, n_cols * 2)[:, None] + gates
            gate = tl.load(BOTH + at, mask=m_in, other=0.0).to(tl.float32)
            up = tl.load(BOTH + at + apart, mask=m_in, other=0.0).to(tl.float32)
            at_slot = row_base(slots, n_cols)[:, None] + cols[None, :]
            u = tl.load(U + at_slot, mask=m_in, other=0.0).to(tl.float32)
            value, slope, factor = _gate(gate, up, alpha, limit, shift, ACT, CLAMP)
            a = value * factor
            sums += tl.sum(tl.where(m_in, u * a, 0.0), axis=1)
            if NEED_WEIGHTED:
                weighted = tl.where(m_in, route * a, 0.0)
                tl.store(WEIGHTED + at_slot, weighted.to(WEIGHTED.dtype.element_ty), mask=m_out)
            if NEED_BOTH:
                u *= route
                dgate, dup = u * factor * slope, u * value
                if CLAMP:
                    dgate = tl.where(gate > limit, 0.0, dgate)
                    dup = tl.where((up > limit) | (up < -limit), 0.0, dup)
                at = DBOTH + row_base(slots, n_cols * 2)[:, None] + gates
                dtype = DBOTH.dtype.element_ty
                tl.store(at, tl.where(m_in, dgate, 0.0).to(dtype), mask=m_out)
                tl.store(at + apart, tl.where(m_in, dup, 0.0).to(dtype), mask=m_out)
        if NEED_ROUTE:
            tl.store(SUMS + rows, sums, mask=m_rows)
