"""The sums around the products of `fused_moe`: the rows of a token, gradients of routing weights and of biases.

Every sum runs in one order and in fp32; see `_moe_routing.py` for rows, pairs and positions.
"""

from liger_kernel.ops._device import row_base
from liger_kernel.ops._triton import tl, triton


@triton.jit
def combine_kernel(
    OUT, Y, ROUTE, POSITION, n_tokens, n_cols,
    K: tl.constexpr, HAS_ROUTE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT[t] = sum over k of r[t, k] Y[row of (t, k)] in the order of k, in fp32; without ROUTE r = 1."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_tokens, m_cols = tokens < n_tokens, cols < n_cols
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(POSITION + tokens * K + k, mask=m_tokens, other=-1)
        at = Y + row_base(row, n_cols)[:, None] + cols[None, :]
        y = tl.load(at, mask=(row >= 0)[:, None] & m_cols[None, :], other=0.0).to(tl.float32)
        if HAS_ROUTE:
            route = tl.load(ROUTE + tokens * K + k, mask=m_tokens, other=0.0)
            y *= route.to(tl.float32)[:, None]
        total += y
    at = OUT + row_base(tokens, n_cols)[:, None] + cols[None, :]
    tl.store(at, total.to(OUT.dtype.element_ty), mask=m_tokens[:, None] & m_cols[None, :])


@triton.jit
def route_grad_kernel(
    DROUTE, SUMS, POSITION, INDEX, DY, sDY_row, BIAS, n_pairs, n_cols, top_k,
    HAS_BIAS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """DROUTE = the sum of a pair's row, and dy of its token times its expert's bias; 0 for a pair without a row."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    row = tl.load(POSITION + pair, mask=pair < n_pairs, other=-1)
    m_pair = row >= 0
    total = tl.load(SUMS + row, mask=m_pair, other=0.0)
    if HAS_BIAS:
        expert = tl.load(INDEX + pair, mask=m_pair, other=0)
        products = tl.zeros((PAIRS, BLOCK), tl.float32)
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            m_both = m_pair[:, None] & (cols < n_cols)[None, :]
            dy_at = DY + row_base(pair // top_k, sDY_row)[:, None] + cols[None, :]
            bias_at = BIAS + row_base(expert, n_cols)[:, None] + cols[None, :]
            dy = tl.load(dy_at, mask=m_both, other=0.0).to(tl.float32)
            products += dy * tl.load(bias_at, mask=m_both, other=0.0).to(tl.float32)
        total += tl.sum(products, axis=1)
    tl.store(DROUTE + pair, total.to(DROUTE.dtype.element_ty), mask=pair < n_pairs)


@triton.jit
def bias_grad_kernel(
    DBIAS, P, ROUTE, PAIRS, FIRST, OFFSETS, n_cols,
    WEIGHTED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """DBIAS[e] = sum over the rows of e of P[slot], or with WEIGHTED of r P[slot]; FIRST is an expert's first tile."""
    expert = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_cols = cols < n_cols
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    begin, end = tl.load(OFFSETS + expert), tl.load(OFFSETS + expert + 1)
    shift = tl.load(FIRST + expert) * TILE - begin
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        m_rows = rows < end
        at = P + row_base(rows + shift, n_cols)[:, None] + cols[None, :]
        p = tl.load(at, mask=m_rows[:, None] & m_cols[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            pair = tl.load(PAIRS + rows, mask=m_rows, other=0)
            p *= tl.load(ROUTE + pair, mask=m_rows, other=0.0).to(tl.float32)[:, None]
        total += p
    at = DBIAS + row_base(expert, n_cols) + cols
    tl.store(at, tl.sum(total, axis=0).to(DBIAS.dtype.element_ty), mask=m_cols)
