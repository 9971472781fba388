"""Rows of a student's logits against a teacher's: the losses, and their gradient where the logits stood.

For a row of student logits z with label c, a teacher's row w, and the transforms of either head

    x = post_scale * cap * tanh(pre_scale * z / cap) / temperature      post_scale * pre_scale * z / temperature without
    y likewise of w ("logits"), or w itself ("log_probs", "probs")      a cap
    log Q = x - lse(x)     log P = y - lse(y)     or y as it is ("log_probs"), or log max(y, eps) for P = y ("probs")

the soft loss is a sum over the vocabulary, of which g is the derivative by log Q and G the sum of g:

    form         loss                                               g
    kl           P (log P - log Q)                                  -P
    reverse_kl   Q (log Q - log P)                                  Q (log Q - log P) + Q
    jsd          beta P (log P - log M) + (1 - beta) Q (log Q - log M)      (1 - beta) Q (log Q - log M)
                 M = beta P + (1 - beta) Q
    tvd          |P - Q| / 2                                        Q sign(Q - P) / 2
    cosine       beta (1 - x.y / (|x| |y|)), of the logits          (directly by x, below)

    dx = s (g - Q G) + h temperature (softmax(temperature x) - [c])       s, h: what soft and hard loss are scaled by

and the hard loss is the cross entropy of the logits without the temperature. A student with fewer classes than the
teacher gets logits of 0 for the rest, in the soft loss alone.

Never NaN from numbers: a probability of 0, however it is written, adds 0 and has gradient 0 on its own side. kl and
reverse_kl are infinite where the distribution they are measured against has probability 0; reverse_kl then has the
gradient of its other terms. cosine leaves out entries of -inf. NaN and rows without any finite logit stay NaN.

A row is visited up to three times, forwards, backwards, forwards: what was read last is still in L2. First maxima and
sums; then, for the forms whose G depends on them (reverse_kl, jsd, tvd), loss and G; then the gradient, and for the
others the loss. Everything is reduced within a thread until the row ends. fp32 inside; the gradient is rounded once.
"""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from liger_kernel.ops._ce_lanes import transform
from liger_kernel.ops._device import LN2, exp, log_of_normal, row_base
from liger_kernel.ops._pair_kernels import _TINY, _jsd
from liger_kernel.ops._triton import tl, triton

COSINE_EPS = tl.constexpr(1e-8)  # the shortest vector, as in torch.nn.functional.cosine_similarity
# log-probability of columns past the end: finite, so that differences are 0
_LOWEST = tl.constexpr(-1e30)
_NONE = tl.constexpr(float("-inf"))


@triton.jit
def lane_sum(x):
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def online(top, total, x):
    """A piece [LANES, K, E] into LANES running maxima and sums of exp(x - maximum); -> also the base in use."""
    peak = tl.maximum(top, tl.max(tl.max(x, axis=2), axis=1))
    base = tl.where(peak == _NONE, 0.0, peak)
    total = total * exp(top - base) + lane_sum(exp(x - base[:, None, None]))
    return peak, total, base


@triton.jit
def collapse(top, total):
    """All lanes as one: -> base, the lanes' distances to it, sum."""
    peak = tl.max(top, axis=0)
    base = tl.where(peak == _NONE, 0.0, peak)
    gap = top - base
    return base, gap, tl.sum(total * exp(gap), axis=0)


@triton.jit
def log(x):
    return tl.log2(x) * LN2


@triton.jit
def element(x, y, p, beta, rest, FORM: tl.constexpr):
    """Loss and g of one entry from log Q, log P and P."""
    if FORM == "kl":
        loss, g = p * tl.where(p == 0.0, 0.0, y - x), -p
    elif FORM == "reverse_kl":
        q = exp(x)
        absent = y == _NONE
        gap = q * tl.where(absent | (q == 0.0), 0.0, x - y)
        loss = tl.where(absent & (q > 0.0), float("inf"), gap)
        g = tl.where(absent, 0.0, gap + q)
    elif FORM == "jsd":
        loss, g = _jsd(x, y, beta, rest)
    else:
        tl.static_assert(FORM == "tvd")
        gap = exp(x) - p
        loss = 0.5 * tl.abs(gap)
        g = exp(x) * tl.where(gap > 0.0, 0.5, tl.where(gap < 0.0, -0.5, 0.0))
    return loss, g


@triton.jit
def _load(Z, cols, limit, eviction: tl.constexpr):
    return tl.load(Z + cols, mask=cols < limit, other=0.0, eviction_policy=eviction)


@triton.jit
def _student(
    z, cols, n_own, n_cols, final, inner, outer, S_FORM: tl.constexpr, PADDED: tl.constexpr
):
    """-> x, -inf past the end, and the part of dx/dz that varies. final: whether the piece may reach past the end."""
    z = z.to(tl.float32)
    if PADDED:
        z = tl.where(cols < n_own, z, 0.0)
    x, slope = transform(z, inner, outer, S_FORM)
    if final:
        x = tl.where(cols < n_cols, x, _NONE)
    return x, slope


@triton.jit
def _teacher(w, cols, n_cols, final, inner, outer, T_FORM: tl.constexpr, TEACHER: tl.constexpr):
    """-> y, "nothing" past the end."""
    y, _ = transform(w.to(tl.float32), inner, outer, T_FORM)
    if final:
        y = tl.where(cols < n_cols, y, 0.0 if TEACHER == "probs" else _NONE)
    return y


@triton.jit
def _both(
    x, y, cols, n_cols, final, base_x, log_x, base_y, log_y, eps, TEACHER: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """-> log Q, log P, P."""
    x = x - base_x - log_x
    if final:
        x = tl.where(cols < n_cols, x, _LOWEST)
    if TEACHER == "probs":
        return x, log_of_normal(tl.maximum(y, tl.maximum(eps, _TINY) if PTX else eps), PTX), y
    if TEACHER == "logits":
        y = y - base_y - log_y
    if final:
        y = tl.where(cols < n_cols, y, _LOWEST)
    return x, y, exp(y)


@triton.jit
def _measure(
    X, Y, piece, x_limit, y_limit, n_own, n_cols, in_x, out_x, in_y, out_y, temperature, S_FORM: tl.constexpr,
    T_FORM: tl.constexpr, TEACHER: tl.constexpr, FORM: tl.constexpr, HARD: tl.constexpr, PADDED: tl.constexpr,
    LANES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """-> base and log-sum-exp over it of x and y, log-sum-exp over T base of T x, sum of P; and x.y, x.x, y.y."""
    READ_Y: tl.constexpr = TEACHER == "logits" or FORM == "kl"
    SUM_X: tl.constexpr = FORM != "cosine" or HARD != "none"
    SUM_Y: tl.constexpr = FORM != "cosine" and TEACHER == "logits"
    none = tl.full((LANES,), float("-inf"), tl.float32)
    zero = tl.zeros((LANES,), tl.float32)
    top_x, sum_x, sum_h, top_y, sum_y, xy, xx, yy = none, zero, zero, none, zero, zero, zero, zero
    z = _load(X, piece, x_limit, "evict_last")  # every piece is asked for one ahead
    w = z
    if READ_Y:
        w = _load(Y, piece, y_limit, "evict_last")
    for start in range(0, n_cols, SIZE):
        cols = start + piece
        final = start + SIZE > n_cols
        z_after = _load(X, cols + SIZE, x_limit, "evict_last")
        w_after = z_after
        if READ_Y:
            w_after = _load(Y, cols + SIZE, y_limit, "evict_last")
            y = _teacher(w, cols, n_cols, final, in_y, out_y, T_FORM, TEACHER)
        x, _ = _student(z, cols, n_own, n_cols, final, in_x, out_x, S_FORM, PADDED)
        if FORM == "cosine":
            some = (x != _NONE) & (y != _NONE)
            a, b = tl.where(some, x, 0.0), tl.where(some, y, 0.0)
            xy, xx, yy = xy + lane_sum(a * b), xx + lane_sum(a * a), yy + lane_sum(b * b)
        elif SUM_Y:
            top_y, sum_y, _base = online(top_y, sum_y, y)
        elif FORM == "kl":
            sum_y += lane_sum(y if TEACHER == "probs" else exp(y))
        if SUM_X:
            before = top_x
            top_x, sum_x, base = online(top_x, sum_x, x)
            if HARD == "own":
                if PADDED:
                    x = tl.where(cols < n_own, x, _NONE)
                e = exp((x - base[:, None, None]) * temperature)
                sum_h = sum_h * exp((before - base) * temperature) + lane_sum(e)
        z, w = z_after, w_after
    base_x, log_x, gap = 0.0, 0.0, 0.0
    if SUM_X:
        base_x, gap, sum_x = collapse(top_x, sum_x)
        log_x = log(sum_x)
    log_h = log_x
    if HARD == "own":
        log_h = log(tl.sum(sum_h * exp(gap * temperature), axis=0))
    base_y, log_y, mass = 0.0, 0.0, 1.0
    if SUM_Y:
        base_y, _gap, sum_y = collapse(top_y, sum_y)
        log_y = log(sum_y)
    elif FORM == "kl":
        mass = tl.sum(sum_y, axis=0)
    return (
        base_x, log_x, log_h, base_y, log_y, mass, tl.sum(xy, axis=0), tl.sum(xx, axis=0), tl.sum(yy, axis=0),
    )  # fmt: skip


@triton.jit
def _cosine(xy, xx, yy, beta):
    """-> loss, and the factors of y and x in its derivative by x."""
    length_x, length_y = tl.maximum(tl.sqrt(xx), COSINE_EPS), tl.maximum(tl.sqrt(yy), COSINE_EPS)
    both = length_x * length_y
    cos = xy / both
    of_x = tl.where(tl.sqrt(xx) > COSINE_EPS, beta * cos / (length_x * length_x), 0.0)
    return beta * (1.0 - cos), -beta / both, of_x


@triton.jit
def _row(
    row, label, SOFT, NLL, LSE_X, LSE_Y, SUM_G, OUT, X, Y, SCALE, UP_SOFT, sSOFT, UP_HARD, sHARD, n_rows, x_limit,
    y_limit, out_limit, n_own, n_cols, parameter, rest, temperature, soft, hard, in_x, out_x, slope, in_y, out_y,
    FORM: tl.constexpr, TEACHER: tl.constexpr, HARD: tl.constexpr, S_FORM: tl.constexpr, T_FORM: tl.constexpr,
    PADDED: tl.constexpr, STAGE: tl.constexpr, PTX: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = STEPS * LANES * EACH
    LATE: tl.constexpr = FORM != "kl" and FORM != "cosine"  # G needs a pass of its own
    lane = tl.arange(0, LANES)[:, None, None]
    piece = tl.arange(0, STEPS)[None, :, None] * (LANES * EACH) + lane * EACH
    piece += tl.arange(0, EACH)[None, None, :]
    last = (n_cols - 1) // SIZE * SIZE
    of_x, of_y, sum_g = 0.0, 0.0, 0.0
    losses = tl.zeros((LANES,), tl.float32)
    if STAGE != "whole":
        base_x, log_x = tl.load(LSE_X + row), tl.load(LSE_X + n_rows + row)
        base_y, log_y = tl.load(LSE_Y + row), tl.load(LSE_Y + n_rows + row)
        log_h = log_x
        if HARD == "own":
            log_h = tl.load(LSE_X + 2 * n_rows + row)
    if STAGE == "gradient":
        sum_g = tl.load(SUM_G + row)
    elif STAGE == "whole":
        x_c = 0.0
        if (
            HARD != "none"
        ):  # before the row is measured: no warp may be late when its place is overwritten
            x_c, _slope = transform(tl.load(X + label).to(tl.float32), in_x, out_x, S_FORM)
        base_x, log_x, log_h, base_y, log_y, mass, xy, xx, yy = _measure(
            X, Y, piece, x_limit, y_limit, n_own, n_cols, in_x, out_x, in_y, out_y, temperature,
            S_FORM, T_FORM, TEACHER, FORM, HARD, PADDED, LANES, SIZE,
        )  # fmt: skip
        if HARD != "none":
            tl.store(NLL + row, log_h + (base_x - x_c) * temperature)
        if FORM == "cosine":
            loss, of_y, of_x = _cosine(xy, xx, yy, parameter)
            tl.store(SOFT + row, loss)
        sum_g = -mass
        if LSE_X is not None:
            tl.store(LSE_X + row, base_x)
            tl.store(LSE_X + n_rows + row, log_x)
            tl.store(LSE_Y + row, base_y)
            tl.store(LSE_Y + n_rows + row, log_y)
    if (STAGE == "sums") | ((STAGE == "whole") & (FORM != "cosine") & (LATE | (OUT is None))):
        gs = tl.zeros((LANES,), tl.float32)
        for back in range(0, n_cols, SIZE):
            cols, final = last - back + piece, back == 0
            z, w = _load(X, cols, x_limit, "evict_last"), _load(Y, cols, y_limit, "evict_last")
            x, _ = _student(z, cols, n_own, n_cols, final, in_x, out_x, S_FORM, PADDED)
            y = _teacher(w, cols, n_cols, final, in_y, out_y, T_FORM, TEACHER)
            x, y, p = _both(
                x, y, cols, n_cols, final, base_x, log_x, base_y, log_y, parameter, TEACHER, PTX
            )
            loss, g = element(x, y, p, parameter, rest, FORM)
            losses += lane_sum(loss)
            gs += lane_sum(g)
        sum_g = tl.sum(gs, axis=0)
        tl.store(SOFT + row, tl.sum(losses, axis=0))
    if (STAGE != "gradient") & (SUM_G is not None):
        tl.store(SUM_G + row, sum_g)
    if OUT is not None:
        soft, hard = soft * slope, hard * slope * temperature
        if SCALE is not None:
            scale = tl.load(SCALE).to(tl.float32)
            soft, hard = soft * scale, hard * scale
        if UP_SOFT is not None:
            soft *= tl.load(UP_SOFT + row_base(row, sSOFT)).to(tl.float32)
            hard *= tl.load(UP_HARD + row_base(row, sHARD)).to(tl.float32)
        for step in range(0, n_cols, SIZE):
            start = last - step
            if LATE:
                start = step
            cols, final = start + piece, start == last
            z, w = _load(X, cols, x_limit, "evict_first"), _load(Y, cols, y_limit, "evict_first")
            x, varying = _student(z, cols, n_own, n_cols, final, in_x, out_x, S_FORM, PADDED)
            y = _teacher(w, cols, n_cols, final, in_y, out_y, T_FORM, TEACHER)
            gap = x - base_x
            if FORM == "cosine":
                some = (x != _NONE) & (y != _NONE)
                d = soft * (tl.where(some, y, 0.0) * of_y + tl.where(some, x, 0.0) * of_x)
                q = gap
            else:
                x, y, p = _both(
                    x, y, cols, n_cols, final, base_x, log_x, base_y, log_y, parameter, TEACHER, PTX
                )
                loss, g = element(x, y, p, parameter, rest, FORM)
                if (STAGE == "whole") & (not LATE):
                    losses += lane_sum(loss)
                q = exp(x)
                d = soft * (g - q * sum_g)
            if HARD != "none":
                if HARD == "own" or FORM == "cosine":
                    q = exp(gap * temperature - log_h)
                d += hard * (q - tl.where(cols == label, 1.0, 0.0))
            if S_FORM == "capped":
                d *= varying
            mask = cols < out_limit
            tl.store(OUT + cols, d.to(OUT.dtype.element_ty), mask=mask, cache_modifier=".cs")
        if (STAGE == "whole") & (FORM == "kl"):
            tl.store(SOFT + row, tl.sum(losses, axis=0))


@triton.jit
def blank(
    row,
    value,
    SOFT,
    NLL,
    OUT,
    out_limit,
    HARD: tl.constexpr,
    LOSSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row that does not count (value 0), or whose label is none (NaN)."""
    if LOSSES:
        tl.store(SOFT + row, value)
        if HARD != "none":
            tl.store(NLL + row, value)
    if OUT is not None:
        for start in range(0, out_limit, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            filled = tl.zeros((BLOCK,), tl.float32) + value
            tl.store(OUT + cols, filled.to(OUT.dtype.element_ty), mask=cols < out_limit)


@triton.jit(do_not_specialize=["n_rows", "ignore_index", "sSOFT", "sHARD"])
def pair_kernel(
    SOFT, NLL, LSE_X, LSE_Y, SUM_G, OUT, sOUT, X, sX, Y, sY, INDEX, T, SCALE, UP_SOFT, sSOFT, UP_HARD, sHARD, n_rows,
    x_limit, y_limit, out_limit, n_own, n_cols, ignore_index, parameter, rest, temperature, soft, hard, in_x, out_x,
    slope, in_y, out_y, FORM: tl.constexpr, TEACHER: tl.constexpr, HARD: tl.constexpr, S_FORM: tl.constexpr,
    T_FORM: tl.constexpr, PADDED: tl.constexpr, STAGE: tl.constexpr, SLICE: tl.constexpr, PTX: tl.constexpr,
    STEPS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        label = tl.cast(0, tl.int64)
        counts, known = True, True
        if T is not None:
            label = tl.load(T + row).to(tl.int64)
            counts = label != ignore_index
            if HARD != "none":
                known = (label >= 0) & (label < n_own + SLICE)
        OUT_row = OUT
        if OUT is not None:
            OUT_row = OUT + row_base(row, sOUT)
        if counts & known:
            y_row = row
            if INDEX is not None:
                y_row = tl.load(INDEX + row)
            _row(
                row, label.to(tl.int32), SOFT, NLL, LSE_X, LSE_Y, SUM_G, OUT_row, X + row_base(row, sX),
                Y + row_base(y_row, sY), SCALE, UP_SOFT, sSOFT, UP_HARD, sHARD, n_rows, x_limit, y_limit, out_limit,
                n_own, n_cols, parameter, rest, temperature, soft, hard, in_x, out_x, slope, in_y, out_y,
                FORM, TEACHER, HARD, S_FORM, T_FORM, PADDED, STAGE, PTX, STEPS, LANES, EACH,
            )  # fmt: skip
        else:
            value = tl.where(counts, float("nan"), 0.0)
            if (STAGE == "whole") & (LSE_X is not None):
                for i in tl.static_range(2):
                    tl.store(LSE_X + i * n_rows + row, value)
                    tl.store(LSE_Y + i * n_rows + row, value)
            if (STAGE != "gradient") & (SUM_G is not None):
                tl.store(SUM_G + row, value)
            blank(
                row, value, SOFT, NLL, OUT_row, out_limit, HARD, STAGE != "gradient", STEPS * LANES * EACH
            )  # fmt: skip
