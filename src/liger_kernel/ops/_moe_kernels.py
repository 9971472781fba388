"""The matrix products of `fused_moe`.

Rows are sorted by expert, see `_moe_routing.py`: a tile of them meets the weight of one expert. Every product is a
persistent kernel: a program works through tiles of its result. Over rows the first loads of a tile are in flight while
the last one is being finished and stored; over an expert's slots two programs share an SM instead. GROUP row tiles
share columns of a weight while these are in L2.

TMA      weights, and rows that lie together, come through tensor descriptors, else through pointers. Forward gathers
         rows of x by pointer, in the loads of the product itself.
SLOTS    rows in the layout of `_moe_row_kernels.py`.
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
    """The t-th of all: its column block, its row tile and that one's expert, first row and end of rows. Row tiles of a
    group vary fastest."""
    first = t // (GROUP * n_blocks) * GROUP
    size = tl.minimum(n_tiles - first, GROUP)
    rest = t % (GROUP * n_blocks)
    tile = first + rest % size
    entry = TILES + tile * 3
    return rest // size, tile, tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


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
        block, _, expert, first, end = _decode(t, n_tiles, n_blocks, TILES, GROUP)
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
    FROM_SLOTS: tl.constexpr, TO_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y = rows of A times the weights of their experts, [rows, n_n]; each in the order of experts or in slots."""
    n_tiles = tl.load(N_TILES)
    for t in tl.range(tl.program_id(0), n_tiles * n_blocks, tl.num_programs(0), flatten=True):
        block, tile, expert, first, end = _decode(t, n_tiles, n_blocks, TILES, GROUP)
        lanes = tl.arange(0, BM)
        m_rows = lanes < end - first
        a_first = tile * BM if FROM_SLOTS else first
        n0 = block * BN
        cols = n0 + tl.arange(0, BN)
        m_cols = cols < n_n
        acc = _product(
            A, sA_row, a_first + lanes, m_rows, a_first, W, sW_e, sW_k, sW_n, expert, n0, cols, m_cols, n_k,
            False, "none", TMA, K_MAJOR, PRECISION, BM, BN, BK, STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(BIAS + row_base(expert, n_n) + cols, mask=m_cols, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        y_first = tile * BM if TO_SLOTS else first
        at = Y + row_base(y_first + lanes, n_n)[:, None] + cols[None, :]
        tl.store(at, acc.to(Y.dtype.element_ty), mask=m_rows[:, None] & m_cols[None, :])


@triton.jit
def weight_grad_kernel(
    DW, sDW_e, sDW_m, sDW_n, P, Q, FIRST, TOTALS, n_experts, n_m, n_n, m_blocks, n_blocks,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DW[e] = sum over the slots of e of P[slot]^T Q[slot], [n_m, n_n]; zeros for an expert without rows.

    FIRST is an expert's first tile, TOTALS its rows: the slots up to the next multiple of BK hold rows or zeros.
    """
    per_expert = m_blocks * n_blocks
    ks = tl.arange(0, BK)
    for tile in range(tl.program_id(0), n_experts * per_expert, tl.num_programs(0)):
        expert = tile // per_expert
        m0, n0 = tile % per_expert % m_blocks * BM, tile % per_expert // m_blocks * BN
        ms, ns = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
        first = tl.load(FIRST + expert) * ROWS
        acc = tl.zeros((BM, BN), tl.float32)
        for slot in tl.range(first, first + tl.load(TOTALS + expert), BK, num_stages=STAGES):
            if TMA:
                p, q = P.load([slot, m0]), Q.load([slot, n0])
            else:
                p_at = P + row_base(slot + ks, n_m)[:, None] + ms[None, :]
                p = tl.load(p_at, mask=(ms < n_m)[None, :], other=0.0)
                q_at = Q + row_base(slot + ks, n_n)[:, None] + ns[None, :]
                q = tl.load(q_at, mask=(ns < n_n)[None, :], other=0.0)
            acc += dot(p.T, q, PRECISION)
        at = row_base(ms, sDW_m)[:, None] + row_base(ns, sDW_n)[None, :]
        dw = acc.to(DW.dtype.element_ty)
        tl.store(
            DW + row_base(expert, sDW_e) + at, dw, mask=(ms < n_m)[:, None] & (ns < n_n)[None, :]
        )
