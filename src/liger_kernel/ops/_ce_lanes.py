"""What the threads of a program do with their columns of a row of logits; see `_ce_kernels`.

A row is visited in pieces [LANES, K, E]: lane l of a program reads K runs of E neighbouring columns,
16 bytes each. Lanes come first, else Triton spreads the runs over two threads. Everything is reduced
within the lane, so that no thread waits for another before the end of the row, and a lane pays one
exponential more for K * E of them.
"""

# pyright: reportGeneralTypeIssues=false
from liger_kernel.ops._columns import edges
from liger_kernel.ops._device import LN2, exp, tanh_and_slope
from liger_kernel.ops._triton import tl, triton

_NOWHERE = tl.constexpr(2147483647)


@triton.jit
def transform(z, inner, outer, FORM: tl.constexpr):
    """-> x, and the part of dx/dz that varies."""
    x, slope = z, 1.0
    if FORM == "capped":
        x, slope = tanh_and_slope(z * inner)
        x *= outer
    elif FORM == "scaled":
        x = z * outer
    return x, slope


@triton.jit
def _lane_max(x):
    return tl.max(tl.max(x, axis=2), axis=1)


@triton.jit
def _lane_min(x):
    return tl.min(tl.min(x, axis=2), axis=1)


@triton.jit
def _lane_sum(x):
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def measure(
    top, rest, gaps, best, z, cols, mask, near, W, y, ref, inner, outer,
    FORM: tl.constexpr, SMOOTH: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """Take a piece [LANES, K, E] of the row, without the target, into LANES running maxima, sums of
    exp(x - maximum), sums of w (ref - x), and argmaxes. A lane is a thread: nobody waits.

    near: whether the target may be in this piece; others are spared the comparison.
    """
    x, _ = transform(z, inner, outer, FORM)
    if SMOOTH:
        gap = tl.where(mask, ref - x, 0.0)
        if W is not None:
            gap *= tl.load(W + cols, mask=mask, other=0.0).to(tl.float32)
        gaps += _lane_sum(gap)
    if FORM != "plain":
        x = tl.where(mask, x, float("-inf"))
    if near:
        x = tl.where(cols == y, float("-inf"), x)
    peak = tl.maximum(top, _lane_max(x))
    if ARGMAX:
        first = _lane_min(tl.where(x == peak[:, None, None], cols, _NOWHERE))
        best = tl.where(peak > top, first, tl.minimum(best, first))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    rest = rest * exp(top - base) + _lane_sum(exp(x - base[:, None, None]))
    return peak, rest, gaps, best


@triton.jit
def measure_edges(
    Z, before, whole, behind, W, y, ref, inner, outer, FORM: tl.constexpr, SMOOTH: tl.constexpr,
    ARGMAX: tl.constexpr, RAGGED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The lanes before the first piece: nothing yet, or the columns that no piece holds."""
    top = tl.full((LANES,), float("-inf"), tl.float32)
    rest = tl.zeros((LANES,), tl.float32)
    gaps = tl.zeros((LANES,), tl.float32)
    best = tl.full((LANES,), _NOWHERE, tl.int32)
    if RAGGED:
        cols, mask = edges(tl.arange(0, LANES)[:, None, None], before, whole, behind)
        z = tl.load(Z + cols, mask=mask, other=float("-inf")).to(tl.float32)
        top, rest, gaps, best = measure(
            top, rest, gaps, best, z, cols, mask, True, W, y, ref, inner, outer,
            FORM, SMOOTH, ARGMAX,
        )  # fmt: skip
    return top, rest, gaps, best


@triton.jit
def collapse(top, rest, gaps, best, x_y, y, SMOOTH: tl.constexpr, ARGMAX: tl.constexpr):
    """All lanes as one, and the row's maximum over the target too."""
    peak = tl.max(top, axis=0)
    if ARGMAX:
        best = tl.min(tl.where(top == peak, best, _NOWHERE), axis=0)
        best = tl.where(x_y > peak, y, tl.where(x_y == peak, tl.minimum(best, y), best))
    peak = tl.maximum(peak, x_y)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    rest = tl.sum(rest * exp(top - base), axis=0)
    if SMOOTH:
        gaps = tl.sum(gaps, axis=0)
    return base, rest, gaps, best


@triton.jit
def unite(bases, rests, x_y):
    """Parts of a row as one, each as `collapse` gives it: a maximum of logits that are all -inf counts for nothing."""
    bases = tl.where(rests > 0.0, bases, float("-inf"))
    peak = tl.maximum(tl.max(bases, axis=0), x_y)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return base, tl.sum(rests * exp(bases - base), axis=0)


@triton.jit
def gradient(
    z, cols, mask, near, W, y, base, c_p, g_y, c_w, inner, outer,
    FORM: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """dz of a piece of the row in fp32; c_p, g_y, c_w as `_conclude` gives them."""
    x, slope = transform(z, inner, outer, FORM)
    g = exp(x - base) * c_p
    if near:
        g = tl.where(cols == y, g_y, g)
    if SMOOTH:
        if W is not None:
            g -= c_w * tl.load(W + cols, mask=mask, other=0.0).to(tl.float32)
        else:
            g -= c_w
    if FORM == "capped":
        g *= slope
    return g


@triton.jit
def log1p(u):
    """log(1 + u), with the rounding of 1 + u taken back."""
    w = 1.0 + u
    added = w - 1.0
    lost = added == 0.0
    return tl.where(lost, u, tl.log2(w) * LN2 * (u / tl.where(lost, 1.0, added)))
