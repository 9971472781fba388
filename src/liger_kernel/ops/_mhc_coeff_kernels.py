"""The kernels of `mhc_coeffs`: a thin product with the norm of its rows, then everything per token.

x `[R, K]`, K = HC * C, with adjacent columns and any row stride; phi `[K, M]`, M = 2 HC + HC^2, its
columns in the order pre, post, res (row-major); everything per token is fp32. HC here is the next
power of two, hc the number of streams. DEN `[2 tmax - 1, R, hc]` holds the divisors of the Sinkhorn
iterations in their order: columns, then rows and columns in turn.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

from liger_kernel.ops._device import exp, row_base
from liger_kernel.ops._dot import dot
from liger_kernel.ops._triton import tl, triton


@triton.jit
def product_kernel(
    PART, SQUARES, X, sX_row, PHI, n_rows, n_in, share,
    n_out: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """x phi and the sums of squares of x's rows, of `share` columns of x each."""
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = row < n_rows
    out = tl.arange(0, OUT)
    m_out = out < n_out
    at = row_base(row, sX_row)[:, None]
    total = tl.zeros((ROWS, OUT), tl.float32)
    squares = tl.zeros((ROWS, STEP), tl.float32)
    last = tl.minimum((part + 1) * share, n_in)
    for start in range(part * share, last, STEP):
        col = start + tl.arange(0, STEP)
        m_col = col < last
        x = tl.load(X + at + col[None, :], mask=m_row[:, None] & m_col[None, :], other=0.0)
        phi = tl.load(
            PHI + col[:, None] * n_out + out[None, :],
            mask=m_col[:, None] & m_out[None, :],
            other=0.0,
        )
        total += dot(x, phi, PRECISION)
        wide = x.to(tl.float32)
        squares += wide * wide
    base = row_base(part, n_rows) + row
    tl.store(SQUARES + base, tl.sum(squares, axis=1), mask=m_row)
    tl.store(
        PART + row_base(base, n_out)[:, None] + out[None, :],
        total,
        mask=m_row[:, None] & m_out[None, :],
    )


@triton.jit
def _mixed(PART, at, mask, rstd, stride, n_parts):
    """The parts of some columns of x phi, summed and divided by the rms of their row."""
    total = tl.load(PART + at, mask=mask, other=0.0)
    for part in range(1, n_parts):
        total += tl.load(PART + row_base(part, stride) + at, mask=mask, other=0.0)
    return total * rstd


@triton.jit
def _sigmoid(z):
    e = exp(-tl.abs(z))
    return tl.where(z >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def _softmax(z, m_h):
    """Over the last axis, of which m_h exists. Rows beyond the matrix are finite and of no meaning."""
    z = tl.where(m_h[None, None, :], z, float("-inf"))
    e = exp(z - tl.max(z, axis=2)[:, :, None])
    return e / tl.sum(e, axis=2)[:, :, None]


@triton.jit
def _columns(hc: tl.constexpr, n_out: tl.constexpr, t, HC: tl.constexpr):
    """Of tokens t: the places of one coefficient a stream, of one a pair of streams, and the streams."""
    h = tl.arange(0, HC)
    token = row_base(t, n_out)
    pair = h[:, None] * hc + h[None, :] + 2 * hc
    return token[:, None] + h[None, :], token[:, None, None] + pair[None, :, :], h


@triton.jit
def coefficients_kernel(
    PRE, POST, RES, MIX, RSTD, DEN, PART, SQUARES, B, A_PRE, A_POST, A_RES,
    n_rows, n_in, n_parts, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult,
    hc: tl.constexpr, TOKENS: tl.constexpr, HC: tl.constexpr,
):  # fmt: skip
    n_out = hc * (hc + 2)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    m_t = t < n_rows
    squares = tl.load(SQUARES + t, mask=m_t, other=0.0)
    for part in range(1, n_parts):
        squares += tl.load(SQUARES + row_base(part, n_rows) + t, mask=m_t, other=0.0)
    rstd = tl.rsqrt(squares / n_in + rms_eps)
    tl.store(RSTD + t, rstd, mask=m_t)
    one, pair, h = _columns(hc, n_out, t, HC)
    m_h = h < hc
    m_one = m_t[:, None] & m_h[None, :]
    m_square = m_h[:, None] & m_h[None, :]
    m_pair = m_t[:, None, None] & m_square[None, :, :]
    stride = row_base(n_rows, n_out)

    mix = _mixed(PART, one, m_one, rstd[:, None], stride, n_parts)
    tl.store(MIX + one, mix, mask=m_one)
    z = tl.load(A_PRE).to(tl.float32) * mix + tl.load(B + h, mask=m_h, other=0.0).to(tl.float32)
    to = row_base(t, hc)[:, None] + h[None, :]
    tl.store(PRE + to, _sigmoid(z) + pre_eps, mask=m_one)

    mix = _mixed(PART + hc, one, m_one, rstd[:, None], stride, n_parts)
    tl.store(MIX + hc + one, mix, mask=m_one)
    b = tl.load(B + hc + h, mask=m_h, other=0.0).to(tl.float32)
    z = tl.load(A_POST).to(tl.float32) * mix + b
    tl.store(POST + to, _sigmoid(z) * post_mult, mask=m_one)

    mix = _mixed(PART, pair, m_pair, rstd[:, None, None], stride, n_parts)
    tl.store(MIX + pair, mix, mask=m_pair)
    square = h[:, None] * hc + h[None, :]
    b = tl.load(B + 2 * hc + square, mask=m_square, other=0.0).to(tl.float32)
    z = tl.load(A_RES).to(tl.float32) * mix + b[None, :, :]
    p = tl.where(m_square[None, :, :], _softmax(z, m_h) + sinkhorn_eps, 0.0)
    step = row_base(n_rows, hc)
    d = tl.where(m_h[None, :], tl.sum(p, axis=1) + sinkhorn_eps, 1.0)
    tl.store(DEN + to, d, mask=m_one)
    p = p / d[:, None, :]
    for i in range(1, tmax):
        d = tl.where(m_h[None, :], tl.sum(p, axis=2) + sinkhorn_eps, 1.0)
        tl.store(DEN + (2 * i - 1) * step + to, d, mask=m_one)
        p = p / d[:, :, None]
        d = tl.where(m_h[None, :], tl.sum(p, axis=1) + sinkhorn_eps, 1.0)
        tl.store(DEN + 2 * i * step + to, d, mask=m_one)
        p = p / d[:, None, :]
    tl.store(RES + row_base(t, hc * hc)[:, None, None] + square[None, :, :], p, mask=m_pair)


@triton.jit
def _sinkhorn_backward(p, g, DEN, to, mask, step, tmax):
    """The gradient before the first division by columns. p and g come as they left the last one; each
    step multiplies p by its divisor again, so that only divisors were kept.

    q = p d, d = sum q + eps:   dq = (dp - sum dp p) / d
    """
    for back in range(1, tmax):
        i = tmax - back
        d = tl.load(DEN + 2 * i * step + to, mask=mask, other=1.0)[:, None, :]
        g = (g - tl.sum(g * p, axis=1)[:, None, :]) / d
        p = p * d
        d = tl.load(DEN + (2 * i - 1) * step + to, mask=mask, other=1.0)[:, :, None]
        g = (g - tl.sum(g * p, axis=2)[:, :, None]) / d
        p = p * d
    d = tl.load(DEN + to, mask=mask, other=1.0)[:, None, :]
    return (g - tl.sum(g * p, axis=1)[:, None, :]) / d


@triton.jit
def _gate_backward(DP, D, MIX, B, alpha, to, one, mask, m_h, h, scale, rstd, HAS: tl.constexpr):
    """One gate scale * sigmoid(alpha mix + b): dz, mix; writes d(x phi)."""
    mix = tl.load(MIX + one, mask=mask, other=0.0)
    z = alpha * mix + tl.load(B + h, mask=m_h, other=0.0).to(tl.float32)
    s = _sigmoid(z)
    dz = tl.zeros_like(mix)
    if HAS:
        g = tl.load(D + to, mask=mask, other=0.0).to(tl.float32)
        dz = g * scale * s * _sigmoid(-z)
    tl.store(DP + one, dz * alpha * rstd, mask=mask)
    return dz, mix


@triton.jit
def coefficients_backward_kernel(
    DP, ALONG, PARTIAL, DPRE, DPOST, DRES, RES, MIX, RSTD, DEN, B, A_PRE, A_POST, A_RES,
    n_rows, n_in, tmax, tokens_per_program, post_mult, hc: tl.constexpr,
    HAS_PRE: tl.constexpr, HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, TOKENS: tl.constexpr, HC: tl.constexpr,
):  # fmt: skip
    """d(x phi) `[R, M]`, ALONG `[R]`, the factor of x in dx, and this program's sums for b and the alphas."""
    n_out = hc * (hc + 2)
    pid = tl.program_id(0)
    h = tl.arange(0, HC)
    m_h = h < hc
    m_square = m_h[:, None] & m_h[None, :]
    a_pre = tl.load(A_PRE).to(tl.float32)
    a_post = tl.load(A_POST).to(tl.float32)
    a_res = tl.load(A_RES).to(tl.float32)
    square = h[:, None] * hc + h[None, :]
    b_res = tl.load(B + 2 * hc + square, mask=m_square, other=0.0).to(tl.float32)
    db_pre = tl.zeros((HC,), tl.float32)
    db_post = tl.zeros((HC,), tl.float32)
    db_res = tl.zeros((HC, HC), tl.float32)
    da_pre = tl.zeros((TOKENS,), tl.float32)
    da_post = tl.zeros((TOKENS,), tl.float32)
    da_res = tl.zeros((TOKENS,), tl.float32)
    first = pid * tokens_per_program
    last = tl.minimum(first + tokens_per_program, n_rows)
    for start in range(first, last, TOKENS):
        t = start + tl.arange(0, TOKENS)
        m_t = t < last
        one, pair, _ = _columns(hc, n_out, t, HC)
        m_one = m_t[:, None] & m_h[None, :]
        m_pair = m_t[:, None, None] & m_square[None, :, :]
        to = row_base(t, hc)[:, None] + h[None, :]
        rstd = tl.load(RSTD + t, mask=m_t, other=0.0)

        dz, mix = _gate_backward(
            DP, DPRE, MIX, B, a_pre, to, one, m_one, m_h, h, 1.0, rstd[:, None], HAS_PRE
        )
        of_pre = tl.sum(dz * mix, axis=1)
        db_pre += tl.sum(dz, axis=0)
        dz, mix = _gate_backward(
            DP + hc, DPOST, MIX + hc, B + hc, a_post, to, one, m_one, m_h, h, post_mult, rstd[:, None], HAS_POST
        )  # fmt: skip
        of_post = tl.sum(dz * mix, axis=1)
        db_post += tl.sum(dz, axis=0)

        mix = tl.load(MIX + pair, mask=m_pair, other=0.0)
        dz = tl.zeros_like(mix)
        if HAS_RES:
            at = row_base(t, hc * hc)[:, None, None] + square[None, :, :]
            p = tl.load(RES + at, mask=m_pair, other=0.0)
            g = tl.load(DRES + at, mask=m_pair, other=0.0).to(tl.float32)
            g = _sinkhorn_backward(p, g, DEN, to, m_one, row_base(n_rows, hc), tmax)
            s = _softmax(a_res * mix + b_res[None, :, :], m_h)
            dz = tl.where(m_pair, s * (g - tl.sum(g * s, axis=2)[:, :, None]), 0.0)
        tl.store(DP + pair, dz * a_res * rstd[:, None, None], mask=m_pair)
        of_res = tl.sum(tl.sum(dz * mix, axis=2), axis=1)
        db_res += tl.sum(dz, axis=0)

        da_pre += of_pre
        da_post += of_post
        da_res += of_res
        along = (a_pre * of_pre + a_post * of_post + a_res * of_res) * rstd * rstd / n_in
        tl.store(ALONG + t, along, mask=m_t)
    PARTIAL += row_base(pid, n_out + 3)
    tl.store(PARTIAL + h, db_pre, mask=m_h)
    tl.store(PARTIAL + hc + h, db_post, mask=m_h)
    tl.store(PARTIAL + 2 * hc + square, db_res, mask=m_square)
    tl.store(PARTIAL + n_out, tl.sum(da_pre, axis=0))
    tl.store(PARTIAL + n_out + 1, tl.sum(da_post, axis=0))
    tl.store(PARTIAL + n_out + 2, tl.sum(da_res, axis=0))


@triton.jit
def product_backward_kernel(
    DX, DPHI, DP, ALONG, X, sX_row, PHI, n_rows, n_in, rows_per_program,
    n_out: tl.constexpr, NEED_DX: tl.constexpr, NEED_DPHI: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """dx = d(x phi) phi^T - along x, and this program's rows of dphi = x^T d(x phi), from one read of x."""
    part = tl.program_id(1)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    m_col = col < n_in
    out = tl.arange(0, OUT)
    m_out = out < n_out
    at_phi = col[:, None] * n_out + out[None, :]
    m_phi = m_col[:, None] & m_out[None, :]
    phi = tl.load(PHI + at_phi, mask=m_phi, other=0.0)
    dphi = tl.zeros((COLS, OUT), tl.float32)
    first = part * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        m_row = row < last
        mask = m_row[:, None] & m_col[None, :]
        x = tl.load(X + row_base(row, sX_row)[:, None] + col[None, :], mask=mask, other=0.0)
        dp = tl.load(
            DP + row_base(row, n_out)[:, None] + out[None, :],
            mask=m_row[:, None] & m_out[None, :],
            other=0.0,
        )
        if NEED_DX:
            along = tl.load(ALONG + row, mask=m_row, other=0.0)
            dx = dot(dp, tl.trans(phi), PRECISION) - along[:, None] * x.to(tl.float32)
            tl.store(
                DX + row_base(row, n_in)[:, None] + col[None, :],
                dx.to(DX.dtype.element_ty),
                mask=mask,
            )
        if NEED_DPHI:
            dphi += dot(tl.trans(x), dp, PRECISION)
    if NEED_DPHI:
        tl.store(DPHI + row_base(part, n_in) * n_out + at_phi, dphi, mask=m_phi)
