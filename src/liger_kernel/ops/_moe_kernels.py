"""The matrix products of `fused_moe`.

Rows are sorted by expert, see `_moe_routing.py`: a tile of them meets the weight of one expert. Every product is a
persistent kernel with one loop over the steps of all of a program's tiles, fused by the compiler or, where experts
differ in length, by hand: the first loads of a tile are in flight while the last one is being finished. GROUP row tiles
share columns of a weight while these are in L2.

TMA      weights, rows that lie together, and results go through tensor descriptors, else through pointers. A result
         leaves in halves, through shared memory and while the next tile is computed. Forward gathers rows of x by
         pointer, in the loads of the product itself.
SLOTS    rows in the layout of `_moe_row_kernels.py`.
PAIR     which columns are gate and up of one another: "halves" (c and n + c) or "interleaved" (2c and 2c + 1). A tile
         holds both, in that order; column blocks then count pairs.
K_MAJOR  a weight is contiguous along the dimension that is summed over.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

from liger_kernel.ops._device import LOG2E, SQRT_HALF, row_base
from liger_kernel.ops._dot import dot, grouped, halves
from liger_kernel.ops._gated import _CUBIC, _TWICE_SQRT_2_OVER_PI, _activation
from liger_kernel.ops._triton import tl, triton

CLIP: tl.constexpr = tl.constexpr(1 << 30)  # more rows than any result has, see `_store`


@triton.jit
def _decode(t, n_tiles, n_blocks, TILES, GROUP: tl.constexpr):
    """The t-th of all: its column block, its row tile and that one's expert, first row and end of rows."""
    tile, block = grouped(t, n_tiles, n_blocks, GROUP)
    entry = TILES + tile * 3
    return block, tile, tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def _columns(n0, n_n, PAIR: tl.constexpr, BN: tl.constexpr):
    """The BN columns, gate and up, of a tile that starts at pair n0 of n_n, and which of them exist."""
    js = tl.arange(0, BN)
    if PAIR == "halves":
        pairs = n0 + js % (BN // 2)
        cols = pairs + js // (BN // 2) * n_n
    else:
        pairs = n0 + js // 2
        cols = n0 * 2 + js
    return cols, pairs < n_n


@triton.jit
def _product(
    A, sA_row, rows, m_rows, first, size, W, sW_e, sW_k, sW_n, expert, n0, cols, m_cols, n_k,
    GATHER: tl.constexpr, PAIR: tl.constexpr, TMA: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BM, BN] fp32: `rows` of A, gathered or `size` from `first` on, times `cols` of an expert's weight."""
    acc = tl.zeros((BM, BN), tl.float32)
    ks = tl.arange(0, BK)
    if GATHER or not TMA:
        a_at = A + row_base(rows, sA_row)[:, None] + ks[None, :]
    if not TMA:
        w_at = W + row_base(expert, sW_e) + row_base(cols, sW_n)[None, :]
    n_first = n0 * 2 if PAIR == "interleaved" else n0
    for k0 in tl.range(0, n_k, BK, num_stages=STAGES):
        m_k = ks < n_k - k0
        if GATHER or not TMA:
            a = tl.load(a_at + k0, mask=m_rows[:, None] & m_k[None, :], other=0.0)
        else:
            a = A.load([CLIP, first + size, CLIP - size, k0]).reshape(BM, BK)
        if not TMA:
            at = w_at + row_base(k0 + ks, sW_k)[:, None]
            w = tl.load(at, mask=m_k[:, None] & m_cols[None, :], other=0.0)
        elif PAIR == "halves":
            w = W.load([expert, 0, n0, k0]) if K_MAJOR else W.load([expert, k0, 0, n0])
        else:
            w = W.load([expert, n_first, k0]) if K_MAJOR else W.load([expert, k0, n_first])
        if TMA:
            w = w.reshape(BN, BK).T if K_MAJOR else w.reshape(BK, BN)
        acc += dot(a, w, PRECISION)
    return acc


@triton.jit
def _store(
    Y, first, size, part, n0, n_n, y,
    PARTS: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Y[first + i, part, n0 + j] = y[i, j] for i < size; Y is [rows, PARTS, n_n].

    A descriptor of `clipped` ends at row CLIP, whence it counts back from row first + size: the TMA unit then leaves
    out what a mask would. `_product` loads rows so: those of the next expert stay where they are.
    """
    if TMA:
        block = tl.reshape(y.to(Y.dtype), (1, 1, BM, 1, BN))
        Y.store([CLIP, first + size, CLIP - size, part, n0], block)
    else:
        i, cols = tl.arange(0, BM), n0 + tl.arange(0, BN)
        at = Y + row_base(first + i, PARTS * n_n)[:, None] + (part * n_n + cols)[None, :]
        tl.store(at, y.to(Y.dtype.element_ty), mask=(i < size)[:, None] & (cols < n_n)[None, :])


@triton.jit
def _clamped(gate, up, limit):
    """A NaN stays one."""
    gate = tl.where(gate > limit, limit, gate)
    return gate, tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def _gate(gate, up, alpha, limit, shift, ACT: tl.constexpr, CLAMP: tl.constexpr):
    """a(gate), a'(gate) and up + shift of the clamped gate and up, a(g) = act(alpha g) / alpha."""
    if CLAMP:
        gate, up = _clamped(gate, up, limit)
    value, slope = _activation(gate * alpha, ACT)
    return value / alpha, slope, up + shift


@triton.jit
def _gated(gate, up, alpha, limit, shift, ACT: tl.constexpr, CLAMP: tl.constexpr):
    """a(gate) (up + shift), with one division and no slope: the tensor cores wait for it."""
    if CLAMP:
        gate, up = _clamped(gate, up, limit)
    if ACT == "gelu":
        value = gate * (0.5 + 0.5 * tl.erf(gate * (alpha * SQRT_HALF)))
    else:
        if ACT == "silu":
            exponent = gate * (alpha * -LOG2E)
        else:
            tl.static_assert(ACT == "gelu_tanh")
            g = gate * alpha
            exponent = g * ((g * g * _CUBIC + 1.0) * (_TWICE_SQRT_2_OVER_PI * -LOG2E))
        value = gate / (1.0 + tl.exp2(exponent))
    return value * (up + shift)


@triton.jit
def up_kernel(
    Y, BOTH, X, sX_row, W, sW_e, sW_k, sW_n, BIAS, TOKEN, TILES, N_TILES, n_k, n_n, n_blocks, alpha, limit, shift,
    PAIR: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
    TMA: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BOTH = gate and up of gathered rows of x, [rows, 2 n_n]; Y = their activation, [rows, n_n]."""
    HALF: tl.constexpr = BN // 2
    n_tiles = tl.load(N_TILES)
    for t in tl.range(tl.program_id(0), n_tiles * n_blocks, tl.num_programs(0), flatten=True):
        block, _, expert, first, end = _decode(t, n_tiles, n_blocks, TILES, GROUP)
        rows, size = first + tl.arange(0, BM), end - first
        m_rows = rows < end
        tokens = tl.load(TOKEN + rows, mask=m_rows, other=0)
        n0 = block * HALF
        cols, m_cols = _columns(n0, n_n, PAIR, BN)
        both = _product(
            X, sX_row, tokens, m_rows, first, size, W, sW_e, sW_k, sW_n, expert, n0, cols, m_cols, n_k,
            True, PAIR, TMA, K_MAJOR, PRECISION, BM, BN, BK, STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(BIAS + row_base(expert, n_n * 2) + cols, mask=m_cols, other=0.0)
            both += bias.to(tl.float32)[None, :]
        left, right = halves(both, BM, HALF)
        # left, y, right: y is computed while left is on its way
        if PAIR == "halves":
            if KEEP:
                _store(BOTH, first, size, 0, n0, n_n, left, 2, TMA, BM, HALF)
            y = _gated(left, right, alpha, limit, shift, ACT, CLAMP)
            _store(Y, first, size, 0, n0, n_n, y, 1, TMA, BM, HALF)
            if KEEP:
                _store(BOTH, first, size, 1, n0, n_n, right, 2, TMA, BM, HALF)
        else:
            if KEEP:
                _store(BOTH, first, size, 0, n0 * 2, n_n * 2, left, 1, TMA, BM, HALF)
            gate, up = tl.split(tl.reshape(both, (BM, HALF, 2)))
            y = _gated(gate, up, alpha, limit, shift, ACT, CLAMP)
            _store(Y, first, size, 0, n0, n_n, y, 1, TMA, BM, HALF)
            if KEEP:
                _store(BOTH, first, size, 0, n0 * 2 + HALF, n_n * 2, right, 1, TMA, BM, HALF)


@triton.jit
def rows_kernel(
    Y, A, sA_row, W, sW_e, sW_k, sW_n, BIAS, TILES, N_TILES, n_k, n_n, n_blocks,
    FROM_SLOTS: tl.constexpr, TO_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y = rows of A times the weights of their experts, [rows, n_n]; each in the order of experts or in slots."""
    n_tiles = tl.load(N_TILES)
    for t in tl.range(tl.program_id(0), n_tiles * n_blocks, tl.num_programs(0), flatten=True):
        block, tile, expert, first, end = _decode(t, n_tiles, n_blocks, TILES, GROUP)
        lanes, size = tl.arange(0, BM), end - first
        a_first = tile * BM if FROM_SLOTS else first
        n0 = block * BN
        cols = n0 + tl.arange(0, BN)
        m_cols = cols < n_n
        acc = _product(
            A, sA_row, a_first + lanes, lanes < size, a_first, size, W, sW_e, sW_k, sW_n, expert, n0, cols, m_cols,
            n_k, False, "none", TMA, K_MAJOR, PRECISION, BM, BN, BK, STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(BIAS + row_base(expert, n_n) + cols, mask=m_cols, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        y_first = tile * BM if TO_SLOTS else first
        left, right = halves(acc, BM, BN // 2)
        _store(Y, y_first, size, 0, n0, n_n, left, 1, TMA, BM, BN // 2)
        _store(Y, y_first, size, 0, n0 + BN // 2, n_n, right, 1, TMA, BM, BN // 2)


@triton.jit
def _store_grad(
    DW, sDW_e, sDW_m, sDW_n, expert, m0, n0, n_m, n_n, dw,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DW[expert, m0 + i, n0 + j] = dw[i, j]."""
    if TMA:
        DW.store([expert, m0, n0], tl.reshape(dw.to(DW.dtype), (1, BM, BN)))
    else:
        ms, ns = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
        at = row_base(ms, sDW_m)[:, None] + row_base(ns, sDW_n)[None, :]
        at += DW + row_base(expert, sDW_e)
        tl.store(at, dw.to(DW.dtype.element_ty), mask=(ms < n_m)[:, None] & (ns < n_n)[None, :])


@triton.jit
def weight_grad_kernel(
    DW, sDW_e, sDW_m, sDW_n, P, Q, FIRST, TOTALS, n_experts, n_m, n_n, m_blocks, n_blocks,
    TMA: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DW[e] = sum over the slots of e of P[slot]^T Q[slot], [n_m, n_n]; zeros for an expert without rows.

    FIRST is an expert's first tile, TOTALS its rows: the slots up to the next multiple of BK hold rows or zeros.

    The compiler fuses loops over tiles and steps only if all tiles have equally many steps. All that loads depend on
    comes from the `if` before them, where a tile begins: one number changed after them (a counter advanced, n0 moved on
    to the right half), and none is prefetched.
    """
    pid, n_programs, per_expert = tl.program_id(0), tl.num_programs(0), m_blocks * n_blocks
    es = tl.arange(0, EXPERTS)
    totals = tl.load(TOTALS + es, mask=es < n_experts, other=0)
    # its own of the tiles of each expert: those of all experts up to it, less those of all before it
    before = es * per_expert + (n_programs - 1 - pid)
    mine = (before + per_expert) // n_programs - before // n_programs
    # an expert without rows has one step, for its zeros
    steps = tl.maximum((totals + (BK - 1)) // BK, 1)
    n_steps = tl.sum(tl.where(es < n_experts, mine * steps, 0))
    ks = tl.arange(0, BK)
    tile, step, n_here = pid - n_programs, -1, 0
    expert, total, first, m0, n0 = 0, 0, 0, 0, 0
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, n_steps, num_stages=STAGES):
        step += 1
        if step == n_here:
            step = 0
            tile += n_programs
            expert = tile // per_expert
            m, n = grouped(tile % per_expert, m_blocks, n_blocks, GROUP)
            m0, n0 = m * BM, n * BN
            total = tl.load(TOTALS + expert)
            # beyond all slots for an expert without rows: descriptors bring zeros from there
            first = tl.where(total > 0, tl.load(FIRST + expert) * ROWS, CLIP)
            n_here = tl.maximum((total + (BK - 1)) // BK, 1)
        slot = first + step * BK
        if TMA:
            p, q = P.load([slot, m0]), Q.load([slot, n0])
        else:
            ms, ns = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
            m_rows = (step * BK + ks < total)[:, None]
            p_at = P + row_base(slot + ks, n_m)[:, None] + ms[None, :]
            p = tl.load(p_at, mask=m_rows & (ms < n_m)[None, :], other=0.0)
            q_at = Q + row_base(slot + ks, n_n)[:, None] + ns[None, :]
            q = tl.load(q_at, mask=m_rows & (ns < n_n)[None, :], other=0.0)
        acc += dot(p.T, q, PRECISION)
        if step == n_here - 1:
            left, right = halves(acc, BM, BN // 2)
            _store_grad(DW, sDW_e, sDW_m, sDW_n, expert, m0, n0, n_m, n_n, left, TMA, BM, BN // 2)
            n1 = n0 + BN // 2
            _store_grad(DW, sDW_e, sDW_m, sDW_n, expert, m0, n1, n_m, n_n, right, TMA, BM, BN // 2)
            acc = tl.zeros((BM, BN), tl.float32)
