"""The kernels of `fused_neighborhood_attention`.

With dilation d the positions r, r + d, r + 2d, ... see only one another: they are a sequence of
their own, a lane, with an ordinary window. A program owns BLOCK consecutive positions of one lane of
one head and streams over the `BLOCK + 2 reach` positions around them, STEP at a time.

q, k, v, o, do: `[B, H, S, D]` with adjacent columns and any other strides; lse `[B, H, S]` fp32 in
units of log2, +inf where a query sees no key. SCALE2 is scale * log2(e).
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

from liger_kernel.ops._device import row_base
from liger_kernel.ops._dot import dot
from liger_kernel.ops._triton import tl, triton


@triton.jit
def _place(seq, n_heads, dilation, BLOCK: tl.constexpr):
    """This program's batch row, head, lane, the lane's length and the first position it owns."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(tl.cdiv(seq, dilation), BLOCK)
    first = (pid % blocks) * BLOCK
    lane = (pid // blocks) % dilation
    head = pid // blocks // dilation
    return head // n_heads, head % n_heads, lane, tl.cdiv(seq - lane, dilation), first


@triton.jit
def _head(P, batch, head, sP_batch, sP_head):
    return P + row_base(batch, sP_batch) + row_base(head, sP_head)


@triton.jit
def _tile(P, sP_row, place, m_place, cols, m_cols):
    at = row_base(place, sP_row)[:, None] + cols[None, :]
    return tl.load(P + at, mask=m_place[:, None] & m_cols[None, :], other=0.0)


@triton.jit
def _write(P, sP_row, place, m_place, cols, m_cols, value):
    at = row_base(place, sP_row)[:, None] + cols[None, :]
    tl.store(P + at, value.to(P.dtype.element_ty), mask=m_place[:, None] & m_cols[None, :])


@triton.jit
def _kept(MASK, place, m_place, HAS_MASK: tl.constexpr):
    """Which keys exist and are not padding."""
    if HAS_MASK:
        m_place = m_place & (tl.load(MASK + place, mask=m_place, other=0) != 0)
    return m_place


@triton.jit
def forward_kernel(
    OUT, sOUT_batch, sOUT_head, sOUT_row, LSE, Q, sQ_batch, sQ_head, sQ_row, K, sK_batch, sK_head, sK_row,
    V, sV_batch, sV_head, sV_row, MASK, n_heads, seq, dim, dilation, reach, SCALE2,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    batch, head, lane, length, first = _place(seq, n_heads, dilation, BLOCK)
    Q = _head(Q, batch, head, sQ_batch, sQ_head)
    K = _head(K, batch, head, sK_batch, sK_head)
    V = _head(V, batch, head, sV_batch, sV_head)
    OUT = _head(OUT, batch, head, sOUT_batch, sOUT_head)
    LSE += row_base(batch * n_heads + head, seq)
    MASK += row_base(batch, seq)
    cols = tl.arange(0, DIM)
    m_cols = cols < dim
    i = first + tl.arange(0, BLOCK)
    m_i = i < length
    q = _tile(Q, sQ_row, i * dilation + lane, m_i, cols, m_cols)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    o = tl.zeros((BLOCK, DIM), tl.float32)
    last = tl.minimum(first + BLOCK + reach, length)
    for start in range(tl.maximum(first - reach, 0), last, STEP):
        j = start + tl.arange(0, STEP)
        place = j * dilation + lane
        k = _tile(K, sK_row, place, j < last, cols, m_cols)
        v = _tile(V, sV_row, place, j < last, cols, m_cols)
        kept = _kept(MASK, place, j < last, HAS_MASK)
        seen = (tl.abs(i[:, None] - j[None, :]) <= reach) & kept[None, :]
        s = tl.where(seen, dot(q, tl.trans(k), PRECISION) * SCALE2, float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p, axis=1)
        o = o * fade[:, None] + dot(p, v, PRECISION)
        top = higher
    empty = total == 0.0
    _write(
        OUT,
        sOUT_row,
        i * dilation + lane,
        m_i,
        cols,
        m_cols,
        o / tl.where(empty, 1.0, total)[:, None],
    )
    lse = tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(LSE + i * dilation + lane, lse, mask=m_i)


@triton.jit
def _key_gradients(
    DK, sDK_row, DV, sDV_row, DO, sDO_row, OUT, sOUT_row, LSE, Q, sQ_row, K, sK_row, V, sV_row, MASK,
    lane, first, length, dim, dilation, reach, scale, SCALE2,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK keys, from the queries around them."""
    cols = tl.arange(0, DIM)
    m_cols = cols < dim
    j = first + tl.arange(0, BLOCK)
    at = j * dilation + lane
    k = _tile(K, sK_row, at, j < length, cols, m_cols)
    v = _tile(V, sV_row, at, j < length, cols, m_cols)
    kept = _kept(MASK, at, j < length, HAS_MASK)
    dk = tl.zeros((BLOCK, DIM), tl.float32)
    dv = tl.zeros((BLOCK, DIM), tl.float32)
    last = tl.minimum(first + BLOCK + reach, length)
    for start in range(tl.maximum(first - reach, 0), last, STEP):
        i = start + tl.arange(0, STEP)
        place = i * dilation + lane
        q = _tile(Q, sQ_row, place, i < last, cols, m_cols)
        do = _tile(DO, sDO_row, place, i < last, cols, m_cols)
        o = _tile(OUT, sOUT_row, place, i < last, cols, m_cols)
        lse = tl.load(LSE + place, mask=i < last, other=float("inf"))
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
        seen = (tl.abs(j[:, None] - i[None, :]) <= reach) & kept[:, None]
        s = dot(k, tl.trans(q), PRECISION) * SCALE2 - lse[None, :]
        p = tl.where(seen, tl.exp2(s), 0.0)
        dv += dot(p, do, PRECISION)
        ds = p * (dot(v, tl.trans(do), PRECISION) - delta[None, :])
        dk += dot(ds, q, PRECISION)
    _write(DK, sDK_row, at, j < length, cols, m_cols, dk * scale)
    _write(DV, sDV_row, at, j < length, cols, m_cols, dv)


@triton.jit
def _query_gradients(
    DQ, sDQ_row, DO, sDO_row, OUT, sOUT_row, LSE, Q, sQ_row, K, sK_row, V, sV_row, MASK,
    lane, first, length, dim, dilation, reach, scale, SCALE2,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK queries, from the keys around them."""
    cols = tl.arange(0, DIM)
    m_cols = cols < dim
    i = first + tl.arange(0, BLOCK)
    at = i * dilation + lane
    q = _tile(Q, sQ_row, at, i < length, cols, m_cols)
    do = _tile(DO, sDO_row, at, i < length, cols, m_cols)
    o = _tile(OUT, sOUT_row, at, i < length, cols, m_cols)
    lse = tl.load(LSE + at, mask=i < length, other=float("inf"))
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
    dq = tl.zeros((BLOCK, DIM), tl.float32)
    last = tl.minimum(first + BLOCK + reach, length)
    for start in range(tl.maximum(first - reach, 0), last, STEP):
        j = start + tl.arange(0, STEP)
        place = j * dilation + lane
        k = _tile(K, sK_row, place, j < last, cols, m_cols)
        v = _tile(V, sV_row, place, j < last, cols, m_cols)
        kept = _kept(MASK, place, j < last, HAS_MASK)
        seen = (tl.abs(i[:, None] - j[None, :]) <= reach) & kept[None, :]
        s = dot(q, tl.trans(k), PRECISION) * SCALE2 - lse[:, None]
        p = tl.where(seen, tl.exp2(s), 0.0)
        ds = p * (dot(do, tl.trans(v), PRECISION) - delta[:, None])
        dq += dot(ds, k, PRECISION)
    _write(DQ, sDQ_row, at, i < length, cols, m_cols, dq * scale)


@triton.jit
def backward_kernel(
    DQ, sDQ_batch, sDQ_head, sDQ_row, DK, sDK_batch, sDK_head, sDK_row, DV, sDV_batch, sDV_head, sDV_row,
    DO, sDO_batch, sDO_head, sDO_row, OUT, sOUT_batch, sOUT_head, sOUT_row, LSE,
    Q, sQ_batch, sQ_head, sQ_row, K, sK_batch, sK_head, sK_row, V, sV_batch, sV_head, sV_row,
    MASK, n_heads, seq, dim, dilation, reach, scale, SCALE2,
    HAS_MASK: tl.constexpr, NEED_DQ: tl.constexpr, NEED_DKV: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Windows are symmetric: the queries that see a key are those the key's own query would see. So a
    program makes dk, dv of its positions as keys and dq of the same positions as queries, and both
    halves walk over the same neighbours, which the second finds in the cache."""
    batch, head, lane, length, first = _place(seq, n_heads, dilation, BLOCK)
    Q = _head(Q, batch, head, sQ_batch, sQ_head)
    K = _head(K, batch, head, sK_batch, sK_head)
    V = _head(V, batch, head, sV_batch, sV_head)
    OUT = _head(OUT, batch, head, sOUT_batch, sOUT_head)
    DO = _head(DO, batch, head, sDO_batch, sDO_head)
    LSE += row_base(batch * n_heads + head, seq)
    MASK += row_base(batch, seq)
    if NEED_DKV:
        _key_gradients(
            _head(DK, batch, head, sDK_batch, sDK_head), sDK_row,
            _head(DV, batch, head, sDV_batch, sDV_head), sDV_row,
            DO, sDO_row, OUT, sOUT_row, LSE, Q, sQ_row, K, sK_row, V, sV_row, MASK,
            lane, first, length, dim, dilation, reach, scale, SCALE2, HAS_MASK, PRECISION, BLOCK, STEP, DIM,
        )  # fmt: skip
    if NEED_DQ:
        _query_gradients(
            _head(DQ, batch, head, sDQ_batch, sDQ_head), sDQ_row,
            DO, sDO_row, OUT, sOUT_row, LSE, Q, sQ_row, K, sK_row, V, sV_row, MASK,
            lane, first, length, dim, dilation, reach, scale, SCALE2, HAS_MASK, PRECISION, BLOCK, STEP, DIM,
        )  # fmt: skip
