"""The kernels of `group_norm`: groups held in registers, and groups too large for that.

x, dy, y, dx `[B, C, S]` contiguous, so that group i of B * G is one run of n = per_group * S values, and row r of
B * C one of S. w, b `[C]` or None. STATS `[3, B * G]` fp32 holds shift, step and rstd of every group: its mean is
shift + step, apart, so that (x - shift) - step has all its digits where mean >> std. P `[2, parts * B, C]` fp32 holds
the sums of dy * xhat and of dy over (a part of) the S values of each row; the rest of backward is made from them.
"""
# pyright: reportGeneralTypeIssues=false

from liger_kernel.ops._device import row_base
from liger_kernel.ops._triton import tl, triton


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _parameter(P, channel, mask, ABSENT: tl.constexpr):
    """A parameter of some channels in fp32, ABSENT where there is none."""
    p = tl.where(mask, ABSENT, 0.0)
    if P is not None:
        p = tl.load(P + channel, mask=mask, other=0.0).to(tl.float32)
    return p


@triton.jit
def _store_stats(STATS, pid, shift, step, rstd):
    n_groups = tl.num_programs(0)
    tl.store(STATS + pid, shift)
    tl.store(STATS + n_groups + pid, step)
    tl.store(STATS + 2 * n_groups + pid, rstd)


@triton.jit
def _load_stats(STATS, pid, n_groups):
    step, rstd = tl.load(STATS + n_groups + pid), tl.load(STATS + 2 * n_groups + pid)
    return tl.load(STATS + pid), step, rstd


@triton.jit
def _affine(Y, at, mask, d, rstd, W, B, channel, m_c):
    w, b = _parameter(W, channel, m_c, 1.0), _parameter(B, channel, m_c, 0.0)
    y = d * (rstd * w)[:, None] + b[:, None]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def forward_kernel(
    Y, X, W, B, STATS, groups, per_group, size, n, eps, CH: tl.constexpr, SP: tl.constexpr
):
    pid = tl.program_id(0)
    c, s = tl.arange(0, CH), tl.arange(0, SP)
    m_c = c < per_group
    mask = m_c[:, None] & (s < size)[None, :]
    at = row_base(pid, n) + c[:, None] * size + s[None, :]
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    shift = _total(x) / n
    d = tl.where(mask, x - shift, 0.0)
    step = _total(d) / n
    d = tl.where(mask, d - step, 0.0)
    rstd = tl.rsqrt(_total(d * d) / n + eps)
    _store_stats(STATS, pid, shift, step, rstd)
    _affine(Y, at, mask, d, rstd, W, B, (pid % groups) * per_group + c, m_c)


@triton.jit
def _moments(X, count, SPAN: tl.constexpr):
    """Mean of `count` values, as shift + step, and the sum of squares about it."""
    lane = tl.arange(0, SPAN)
    x = tl.load(X + lane, mask=lane < count, other=0.0).to(tl.float32)
    shift = tl.sum(x, axis=0) / tl.minimum(count, SPAN)
    first = tl.zeros((SPAN,), tl.float32)
    second = tl.zeros((SPAN,), tl.float32)
    for start in range(0, count, SPAN):
        mask = start + lane < count
        x = tl.load(X + start + lane, mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, x - shift, 0.0)
        first += d
        second += d * d
    step = tl.sum(first, axis=0) / count
    return shift, step, tl.maximum(tl.sum(second, axis=0) - step * step * count, 0.0)


@triton.jit
def moments_kernel(MOMENTS, X, n, share, SPAN: tl.constexpr):
    """MOMENTS `[B * G, parts, 3]`: shift, step and sum of squares of each part of each group."""
    pid, part = tl.program_id(0), tl.program_id(1)
    first = row_base(part, share)
    count = tl.minimum(n - first, share).to(tl.int32)
    shift, step, squares = _moments(X + row_base(pid, n) + first, count, SPAN)
    at = MOMENTS + row_base(pid * tl.num_programs(1) + part, 3)
    tl.store(at, shift)
    tl.store(at + 1, step)
    tl.store(at + 2, squares)


@triton.jit
def _merged(MOMENTS, n, share, parts, PARTS: tl.constexpr):
    """Mean, as shift + step, and sum of squares of a group from those of its parts."""
    p = tl.arange(0, PARTS)
    m_p = p < parts
    counts = tl.where(m_p, tl.minimum(n - row_base(p, share), share), 0).to(tl.float32)
    shift = tl.load(MOMENTS)
    gaps = tl.load(MOMENTS + 3 * p, mask=m_p, other=0.0) - shift
    gaps += tl.load(MOMENTS + 3 * p + 1, mask=m_p, other=0.0)
    squares = tl.load(MOMENTS + 3 * p + 2, mask=m_p, other=0.0)
    step = tl.sum(gaps * counts, axis=0) / n
    gaps -= step
    return shift, step, tl.sum(squares + gaps * gaps * counts, axis=0)


@triton.jit
def _tile(pid, tile, per_group, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Channels of the group, their mask, addresses and mask of one of its tiles."""
    blocks = tl.cdiv(size, BLOCK)
    c = (tile // blocks) * ROWS + tl.arange(0, ROWS)
    s = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
    at = row_base(pid * per_group + c, size)[:, None] + s[None, :]
    m_c = c < per_group
    return c, m_c, at, m_c[:, None] & (s < size)[None, :]


@triton.jit
def forward_wide_kernel(
    Y, X, W, B, STATS, MOMENTS, groups, per_group, size, n, eps, share, parts, tiles, tiles_per_program,
    PARTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A group, or with MOMENTS the tiles of a group that are this program's: backwards, what was read last is in L2."""
    pid, part = tl.program_id(0), tl.program_id(1)
    if MOMENTS is None:
        shift, step, squares = _moments(X + row_base(pid, n), n, SPAN)
    else:
        moments = MOMENTS + row_base(pid * parts, 3)
        shift, step, squares = _merged(moments, n, share, parts, PARTS)
    rstd = tl.rsqrt(squares / n + eps)
    if part == 0:
        _store_stats(STATS, pid, shift, step, rstd)
    last = tl.minimum((part + 1) * tiles_per_program, tiles)
    for i in range(part * tiles_per_program, last):
        tile = last - 1 - (i - part * tiles_per_program)
        c, m_c, at, mask = _tile(pid, tile, per_group, size, ROWS, BLOCK)
        d = (tl.load(X + at, mask=mask, other=0.0).to(tl.float32) - shift) - step
        _affine(Y, at, mask, d, rstd, W, B, (pid % groups) * per_group + c, m_c)


@triton.jit
def _store_sums(P, parts, part, batch, groups, pid, per_group, c, m_c, along, plain):
    channels = groups * per_group
    at = P + row_base(part * batch + pid // groups, channels) + (pid % groups) * per_group + c
    tl.store(at, along, mask=m_c)
    tl.store(at + row_base(parts * batch, channels), plain, mask=m_c)


@triton.jit
def backward_kernel(
    DX, P, DY, X, W, STATS, batch, groups, per_group, size, n,
    NEED_DX: tl.constexpr, NEED_P: tl.constexpr, CH: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    c, s = tl.arange(0, CH), tl.arange(0, SP)
    m_c = c < per_group
    mask = m_c[:, None] & (s < size)[None, :]
    at = row_base(pid, n) + c[:, None] * size + s[None, :]
    dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    shift, step, rstd = _load_stats(STATS, pid, batch * groups)
    xhat = tl.where(mask, ((x - shift) - step) * rstd, 0.0)
    along, plain = tl.sum(dy * xhat, axis=1), tl.sum(dy, axis=1)
    if NEED_P:
        _store_sums(P, 1, 0, batch, groups, pid, per_group, c, m_c, along, plain)
    if NEED_DX:
        w = _parameter(W, (pid % groups) * per_group + c, m_c, 1.0)
        slope, level = tl.sum(w * along, axis=0) / n, tl.sum(w * plain, axis=0) / n
        dx = rstd * (dy * w[:, None] - level - xhat * slope)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def _channel_sums(
    DY, X, shift, step, rstd, row, m_c, first, last, size, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums of dy * xhat and of dy over columns [first, last) of some rows."""
    along = tl.zeros((ROWS, BLOCK), tl.float32)
    plain = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first, last, BLOCK):
        s = start + tl.arange(0, BLOCK)
        mask = m_c[:, None] & (s < last)[None, :]
        at = row_base(row, size)[:, None] + s[None, :]
        dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        along += dy * (tl.where(mask, (x - shift) - step, 0.0) * rstd)
        plain += dy
    return tl.sum(along, axis=1), tl.sum(plain, axis=1)


@triton.jit
def channel_sums_kernel(
    P, DY, X, STATS, batch, groups, per_group, size, span, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(per_group, ROWS)
    pid, part = tl.program_id(0) // blocks, tl.program_id(1)
    c = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    m_c = c < per_group
    shift, step, rstd = _load_stats(STATS, pid, batch * groups)
    last = tl.minimum((part + 1) * span, size)
    along, plain = _channel_sums(
        DY, X, shift, step, rstd, pid * per_group + c, m_c, part * span, last, size, ROWS, BLOCK
    )
    _store_sums(P, tl.num_programs(1), part, batch, groups, pid, per_group, c, m_c, along, plain)


@triton.jit
def _group_sums(
    P, W, batch, groups, pid, per_group, parts, PARTS: tl.constexpr, CHUNK: tl.constexpr
):
    """Sums of w * dy * xhat and of w * dy over a group, from the channels' sums."""
    channels = groups * per_group
    p = tl.arange(0, PARTS)
    slope, level = 0.0, 0.0
    for start in range(0, per_group, CHUNK):
        c = start + tl.arange(0, CHUNK)
        m_c = c < per_group
        w = _parameter(W, (pid % groups) * per_group + c, m_c, 1.0)[None, :]
        mask = (p < parts)[:, None] & m_c[None, :]
        at = row_base(p * batch + pid // groups, channels)[:, None]
        at += ((pid % groups) * per_group + c)[None, :]
        slope += _total(w * tl.load(P + at, mask=mask, other=0.0))
        level += _total(
            w * tl.load(P + at + row_base(parts * batch, channels), mask=mask, other=0.0)
        )
    return slope, level


@triton.jit
def dx_wide_kernel(
    DX, P, DY, X, W, STATS, batch, groups, per_group, size, n, parts, tiles, tiles_per_program,
    SPLIT: tl.constexpr, NEED_DX: tl.constexpr, NEED_P: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A group with its channels' sums, or under SPLIT, where those are in P, some tiles of a group."""
    pid, part = tl.program_id(0), tl.program_id(1)
    shift, step, rstd = _load_stats(STATS, pid, batch * groups)
    if SPLIT:
        slope, level = _group_sums(P, W, batch, groups, pid, per_group, parts, PARTS, CHUNK)
    else:
        slope, level = 0.0, 0.0
        for start in range(0, per_group, ROWS):
            c = start + tl.arange(0, ROWS)
            m_c = c < per_group
            along, plain = _channel_sums(
                DY, X, shift, step, rstd, pid * per_group + c, m_c, 0, size, size, ROWS, BLOCK
            )
            if NEED_P:
                _store_sums(P, 1, 0, batch, groups, pid, per_group, c, m_c, along, plain)
            w = _parameter(W, (pid % groups) * per_group + c, m_c, 1.0)
            slope += tl.sum(w * along, axis=0)
            level += tl.sum(w * plain, axis=0)
    if NEED_DX:
        last = tl.minimum((part + 1) * tiles_per_program, tiles)
        for i in range(part * tiles_per_program, last):
            tile = last - 1 - (i - part * tiles_per_program)
            c, m_c, at, mask = _tile(pid, tile, per_group, size, ROWS, BLOCK)
            dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
            w = _parameter(W, (pid % groups) * per_group + c, m_c, 1.0)
            xhat = ((x - shift) - step) * rstd
            dx = rstd * (dy * w[:, None] - level / n - xhat * (slope / n))
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
