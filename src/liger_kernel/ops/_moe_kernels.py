"""The matrix products of `fused_moe`.

Rows are sorted by expert, see `_moe_routing.py`: a tile of them meets the weight of one expert. Every product is a
persistent kernel: a program works through tiles of its result, and the first loads of a tile are in flight while the
last one is being finished and stored. GROUP row tiles share columns of a weight while these are in L2.

TMA      weights, and rows that lie together, come through tensor descriptors, else through pointers. Rows of x and of
         the output's gradient are gathered by pointer, in the loads of the product itself.
PAIR     which columns are gate and up of one another: "halves" (c and n + c) or "interleaved" (2c and 2c + 1). A tile
         holds both, in that order; column blocks then count pairs.
K_MAJOR  a weight is contiguous along the dimension that is summed over.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

from liger_kernel.ops._device import row_base
from liger_kernel.ops._dot import dot
from liger_kernel.ops._gated import _activation
from liger_kernel.ops._triton import tl, triton


@triton.jit
def _decode(t, n_tiles, n_blocks, TILES, GROUP: tl.constexpr):
    """The t-th tile: its column block, expert, first row and end of rows. A group's row tiles vary fastest."""
    first = t // (GROUP * n_blocks) * GROUP
    size = tl.minimum(n_tiles - first, GROUP)
    rest = t % (GROUP * n_blocks)
    entry = TILES + (first + rest % size) * 3
    return rest // size, tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


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
    A, sA_row, rows, m_rows, first, W, sW_e, sW_k, sW_n, expert, n0, cols, m_cols, n_k,
    GATHER: tl.constexpr, PAIR: tl.constexpr, TMA: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BM, BN] fp32: `rows` of A, from `first` on unless they are gathered, times `cols` of an expert's weight."""
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
            a = A.load([first, k0])
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
def _split(both, PAIR: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr):
    """gate and up, [BM, PAIRS] each, of a tile that holds both."""
    if PAIR == "halves":
        gate, up = tl.split(tl.permute(tl.reshape(both, (BM, 2, PAIRS)), (0, 2, 1)))
    else:
        gate, up = tl.split(tl.reshape(both, (BM, PAIRS, 2)))
    return gate, up


@triton.jit
def _merge(gate, up, PAIR: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr):
    """The reverse of `_split`."""
    both = tl.join(gate, up)
    if PAIR == "halves":
        both = tl.permute(both, (0, 2, 1))
    return tl.reshape(both, (BM, 2 * PAIRS))


@triton.jit
def _gate(gate, up, alpha, limit, shift, ACT: tl.constexpr, CLAMP: tl.constexpr):
    """a(gate), a'(gate) and up + shift of the clamped gate and up, a(g) = act(alpha g) / alpha. A NaN stays one."""
    if CLAMP:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value, slope = _activation(gate * alpha, ACT)
    return value / alpha, slope, up + shift


@triton.jit
def up_kernel(
    Y, BOTH, X, sX_row, W, sW_e, sW_k, sW_n, BIAS, TOKEN, TILES, N_TILES, n_k, n_n, n_blocks, alpha, limit, shift,
    PAIR: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
    TMA: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BOTH = gate and up of gathered rows of x, [rows, 2 n_n]; Y = their activation, [rows, n_n]."""
    n_tiles = tl.load(N_TILES)
    for t in tl.range(tl.program_id(0), n_tiles * n_blocks, tl.num_programs(0), flatten=True):
        block, expert, first, end = _decode(t, n_tiles, n_blocks, TILES, GROUP)
        rows = first + tl.arange(0, BM)
        m_rows = rows < end
        tokens = tl.load(TOKEN + rows, mask=m_rows, other=0)
        n0 = block * (BN // 2)
        cols, m_cols = _columns(n0, n_n, PAIR, BN)
        both = _product(
            X, sX_row, tokens, m_rows, first, W, sW_e, sW_k, sW_n, expert, n0, cols, m_cols, n_k,
            True, PAIR, TMA, K_MAJOR, PRECISION, BM, BN, BK, STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(BIAS + row_base(expert, n_n * 2) + cols, mask=m_cols, other=0.0)
            both += bias.to(tl.float32)[None, :]
        if KEEP:
            at = BOTH + row_base(rows, n_n * 2)[:, None] + cols[None, :]
            kept = both.to(BOTH.dtype.element_ty)
            tl.store(at, kept, mask=m_rows[:, None] & m_cols[None, :])
        gate, up = _split(both, PAIR, BM, BN // 2)
        value, _, factor = _gate(gate, up, alpha, limit, shift, ACT, CLAMP)
        cols = n0 + tl.arange(0, BN // 2)
        at = Y + row_base(rows, n_n)[:, None] + cols[None, :]
        y = (value * factor).to(Y.dtype.element_ty)
        tl.store(at, y, mask=m_rows[:, None] & (cols < n_n)[None, :])


@triton.jit
def rows_kernel(
    Y, A, sA_row, W, sW_e, sW_k, sW_n, BIAS, TILES, N_TILES, n_k, n_n, n_blocks,
    HAS_BIAS: tl.constexpr, TMA: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y = sorted rows of A times the weights of their experts, [rows, n_n]."""
    n_tiles = tl.load(N_TILES)
    for t in tl.range(tl.program_id(0), n_tiles * n_blocks, tl.num_programs(0), flatten=True):
        block, expert, first, end = _decode(t, n_tiles, n_blocks, TILES, GROUP)
        rows = first + tl.arange(0, BM)
        m_rows = rows < end
        n0 = block * BN
        cols = n0 + tl.arange(0, BN)
        m_cols = cols < n_n
        acc = _product(
            A, sA_row, rows, m_rows, first, W, sW_e, sW_k, sW_n, expert, n0, cols, m_cols, n_k,
            False, "none", TMA, K_MAJOR, PRECISION, BM, BN, BK, STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(BIAS + row_base(expert, n_n) + cols, mask=m_cols, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        at = Y + row_base(rows, n_n)[:, None] + cols[None, :]
        tl.store(at, acc.to(Y.dtype.element_ty), mask=m_rows[:, None] & m_cols[None, :])


@triton.jit
def _both_places(rows, m_rows, n0, n_n, PAIR: tl.constexpr, BN: tl.constexpr):
    """Offsets and mask of gate and up of BN pairs from n0 on."""
    cols, m_cols = _columns(n0, n_n, PAIR, 2 * BN)
    at = row_base(rows, n_n * 2)[:, None] + cols[None, :]
    return at, m_rows[:, None] & m_cols[None, :]


@triton.jit
def _gate_backward_part(
    DBOTH, WEIGHTED, both, at, m_both, u, route, rows, m_rows, n0, n_n, alpha, limit, shift,
    PAIR: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr,
    NEED_BOTH: tl.constexpr, NEED_WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    gate, up = _split(both, PAIR, BM, BN)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    value, slope, factor = _gate(gate, up, alpha, limit, shift, ACT, CLAMP)
    sums = tl.sum(u * value * factor, axis=1)
    u *= route[:, None]
    if NEED_WEIGHTED:
        cols = n0 + tl.arange(0, BN)
        place = WEIGHTED + row_base(rows, n_n)[:, None] + cols[None, :]
        weighted = (route[:, None] * value * factor).to(WEIGHTED.dtype.element_ty)
        tl.store(place, weighted, mask=m_rows[:, None] & (cols < n_n)[None, :])
    if NEED_BOTH:
        dgate, dup = u * factor * slope, u * value
        if CLAMP:
            dgate = tl.where(gate > limit, 0.0, dgate)
            dup = tl.where((up > limit) | (up < -limit), 0.0, dup)
        dtype = DBOTH.dtype.element_ty
        tl.store(DBOTH + at, _merge(dgate.to(dtype), dup.to(dtype), PAIR, BM, BN), mask=m_both)
    return sums


@triton.jit
def _gate_backward(
    DBOTH, WEIGHTED, BOTH, u, route, rows, m_rows, n0, n_n, alpha, limit, shift,
    PAIR: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr,
    NEED_BOTH: tl.constexpr, NEED_WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What `gate_backward_kernel` says, for u [BM, BN] from column n0 on; -> sums of u a.

    32 columns at a time, more would not fit in registers; two such parts are loaded before the first is stored.
    """
    HALF: tl.constexpr = BN // 2
    left, right = _split(u, "halves", BM, HALF)
    if BN > 64:
        sums = _gate_backward(
            DBOTH, WEIGHTED, BOTH, left, route, rows, m_rows, n0, n_n, alpha, limit, shift,
            PAIR, ACT, CLAMP, NEED_BOTH, NEED_WEIGHTED, BM, HALF,
        )  # fmt: skip
        sums += _gate_backward(
            DBOTH, WEIGHTED, BOTH, right, route, rows, m_rows, n0 + HALF, n_n, alpha, limit, shift,
            PAIR, ACT, CLAMP, NEED_BOTH, NEED_WEIGHTED, BM, HALF,
        )  # fmt: skip
    else:
        at, mask = _both_places(rows, m_rows, n0, n_n, PAIR, HALF)
        next_at, next_mask = _both_places(rows, m_rows, n0 + HALF, n_n, PAIR, HALF)
        both = tl.load(BOTH + at, mask=mask, other=0.0)
        next_both = tl.load(BOTH + next_at, mask=next_mask, other=0.0)
        sums = _gate_backward_part(
            DBOTH, WEIGHTED, both, at, mask, left, route, rows, m_rows, n0, n_n, alpha, limit, shift,
            PAIR, ACT, CLAMP, NEED_BOTH, NEED_WEIGHTED, BM, HALF,
        )  # fmt: skip
        sums += _gate_backward_part(
            DBOTH, WEIGHTED, next_both, next_at, next_mask, right, route, rows, m_rows, n0 + HALF, n_n,
            alpha, limit, shift, PAIR, ACT, CLAMP, NEED_BOTH, NEED_WEIGHTED, BM, HALF,
        )  # fmt: skip
    return sums


@triton.jit
def gate_backward_kernel(
    DBOTH, WEIGHTED, DROUTE, DY, sDY_row, W, sW_e, sW_k, sW_n, BOTH, ROUTE, PAIRS, TOKEN, TILES, N_TILES,
    n_rows, n_k, n_n, n_blocks, alpha, limit, shift,
    PAIR: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr,
    NEED_BOTH: tl.constexpr, NEED_WEIGHTED: tl.constexpr, NEED_ROUTE: tl.constexpr,
    TMA: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From gathered rows of dy, with a = act(gate, up) recomputed from BOTH and r the routing weight of a row:

    u = dy W, [rows, n_n];  DBOTH = gradient of gate and up for da = r u;  WEIGHTED = r a;  DROUTE = sums of u a over
    the columns of a block, [n_blocks, n_rows].
    """
    n_tiles = tl.load(N_TILES)
    for t in tl.range(tl.program_id(0), n_tiles * n_blocks, tl.num_programs(0), flatten=True):
        block, expert, first, end = _decode(t, n_tiles, n_blocks, TILES, GROUP)
        rows = first + tl.arange(0, BM)
        m_rows = rows < end
        tokens = tl.load(TOKEN + rows, mask=m_rows, other=0)
        n0 = block * BN
        cols = n0 + tl.arange(0, BN)
        u = _product(
            DY, sDY_row, tokens, m_rows, first, W, sW_e, sW_k, sW_n, expert, n0, cols, cols < n_n, n_k,
            True, "none", TMA, K_MAJOR, PRECISION, BM, BN, BK, STAGES,
        )  # fmt: skip
        pair = tl.load(PAIRS + rows, mask=m_rows, other=0)
        route = tl.load(ROUTE + pair, mask=m_rows, other=0.0).to(tl.float32)
        sums = _gate_backward(
            DBOTH, WEIGHTED, BOTH, u, route, rows, m_rows, n0, n_n, alpha, limit, shift,
            PAIR, ACT, CLAMP, NEED_BOTH, NEED_WEIGHTED, BM, BN,
        )  # fmt: skip
        if NEED_ROUTE:
            tl.store(DROUTE + row_base(block, n_rows) + rows, sums, mask=m_rows)


@triton.jit
def _steps(first, n_experts, per_expert, OFFSETS, BK: tl.constexpr, MANY: tl.constexpr):
    """How many blocks of BK rows this program's tiles have in all; an expert without rows counts as one."""
    total = 0
    n_tiles = n_experts * per_expert
    for start in range(first, n_tiles, tl.num_programs(0) * MANY):
        tiles = start + tl.arange(0, MANY) * tl.num_programs(0)
        mask = tiles < n_tiles
        at = OFFSETS + tiles // per_expert
        rows = tl.load(at + 1, mask=mask, other=0) - tl.load(at, mask=mask, other=0)
        steps = tl.maximum((rows + (BK - 1)) // BK, 1)
        total += tl.sum(tl.where(mask, steps, 0), axis=0)
    return total


@triton.jit
def weight_grad_kernel(
    DW, sDW_e, sDW_m, sDW_n, P, Q, sQ_row, TOKEN, OFFSETS, n_experts, n_m, n_n, m_blocks, n_blocks,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DW[e] = sum over the rows of e of P[row]^T Q[token of row], [n_m, n_n]; zeros for an expert without rows.

    Experts differ in rows, so that tiles and blocks of rows make one loop by hand: loads of the next tile run ahead.
    """
    per_expert = m_blocks * n_blocks
    tile = tl.program_id(0) - tl.num_programs(0)
    row, end, expert = 0, 0, 0
    ms, ns = tl.arange(0, BM), tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    steps = _steps(tl.program_id(0), n_experts, per_expert, OFFSETS, BK, 128)
    for _ in tl.range(0, steps, num_stages=STAGES):
        if row >= end:
            tile += tl.num_programs(0)
            expert = tile // per_expert
            row, end = tl.load(OFFSETS + expert), tl.load(OFFSETS + expert + 1)
            ms = tile % per_expert % m_blocks * BM + tl.arange(0, BM)
            ns = tile % per_expert // m_blocks * BN + tl.arange(0, BN)
        rows = row + tl.arange(0, BK)
        m_rows = rows < end
        p_at = P + row_base(rows, n_m)[:, None] + ms[None, :]
        p = tl.load(p_at, mask=m_rows[:, None] & (ms < n_m)[None, :], other=0.0)
        tokens = tl.load(TOKEN + rows, mask=m_rows, other=0)
        q_at = Q + row_base(tokens, sQ_row)[:, None] + ns[None, :]
        q = tl.load(q_at, mask=m_rows[:, None] & (ns < n_n)[None, :], other=0.0)
        acc += dot(p.T, q, PRECISION)
        row += BK
        if row >= end:
            dw_at = row_base(ms, sDW_m)[:, None] + row_base(ns, sDW_n)[None, :]
            mask = (ms < n_m)[:, None] & (ns < n_n)[None, :]
            dw = acc.to(DW.dtype.element_ty)
            tl.store(DW + row_base(expert, sDW_e) + dw_at, dw, mask=mask)
            acc = tl.zeros((BM, BN), tl.float32)
