"""Log-probabilities of rows of logits, then the gradient of anything that was computed from them.

For a row of V logits z with target y,

    x = post_scale * cap * tanh(pre_scale * z / cap)      x = post_scale * pre_scale * z without a cap
    lse = log sum_v exp(x_v)    logp = x_y - lse    p_v = exp(x_v - lse)    H = -sum_v p_v log p_v

`logp_rows` reads the row once. `logp_gradient` then takes the derivatives of some loss L, a = dL/dlogp and b = dL/dH,
and writes dL/dz; c = a and d = 0, unless L uses more of the row (lse: c -= dL/dlse; the mean m of all log p:
c += dL/dm, d = dL/dm / V):

    dz_v = (a * [v = y] - c * p_v + d - b * p_v * (log p_v + H)) * dx/dz

Entries of -inf have probability 0 and add nothing, to H too. A target outside [0, V) gives logp = 0 and no gradient
when it is ignore_index, else NaN; with `sharded`, target V lies in another part of the vocabulary: logp = -inf, the
rest as for any target. fp32 inside. lse is kept as maximum and log sum exp(x - maximum), apart, and entropy comes from
exp(x - maximum) * (x - maximum), so that an offset common to a row costs no digits.
"""
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernel.ops._ce_lanes import transform
from liger_kernel.ops._columns import EDGES, column_flags, edges, first_column, whole_and_behind
from liger_kernel.ops._device import LN2, exp
from liger_kernel.ops._op import dense
from liger_kernel.ops._triton import UNFUSED, block_of, cdiv, launch, tl, triton

_MAX_BLOCK = 8192  # columns a program visits at a time
_NOWHERE = tl.constexpr(2147483647)


class LogpStats(NamedTuple):
    """Per row, fp32; what was not asked for is empty."""

    logp: Tensor  # [C]
    top: Tensor  # [C], the largest logit
    log_total: Tensor  # [C], lse - top
    entropy: Tensor  # [C]
    argmax: Tensor  # [C] int64, the lowest index of the largest logit; -1 without a valid target
    gaps: Tensor  # [C], sum_v (x_v - top)
    labels: Tensor | None = None  # [C], the targets as a slice reads them (`head.shard`)

    @property
    def lse(self) -> Tensor:
        return self.top + self.log_total


@triton.jit
def _piece(Z, cols, mask, shift, inner, outer, FORM: tl.constexpr):
    z = tl.load(Z + cols, mask=mask, other=0.0).to(tl.float32) + shift
    x, slope = transform(z, inner, outer, FORM)
    return tl.where(mask, x, float("-inf")), slope


@triton.jit
def _absorb(
    x, cols, mask, seen, top, total, spread, gaps, best,
    WANT_H: tl.constexpr, WANT_ARGMAX: tl.constexpr, WANT_GAPS: tl.constexpr,
):  # fmt: skip
    """Take a piece of the row into what is known of `seen` columns."""
    peak = tl.maximum(tl.max(x, axis=0), top)
    if WANT_ARGMAX:
        first = tl.min(tl.where(x == peak, cols, _NOWHERE), axis=0)
        best = tl.where(peak > top, first, tl.minimum(best, first))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    e = exp(x - base)
    shrink = exp(top - base)
    moved = tl.where(top == float("-inf"), 0.0, top - base)
    if WANT_H:
        gap = tl.where(e > 0.0, x - base, 0.0)
        spread = shrink * (spread + total * moved) + tl.sum(e * gap, axis=0)
    if WANT_GAPS:
        gaps += seen * moved + tl.sum(tl.where(mask, x - base, 0.0), axis=0)
    return peak, total * shrink + tl.sum(e, axis=0), spread, gaps, best


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def _stats_kernel(
    LOGP, TOP, TOTAL, ENTROPY, ARGMAX, GAPS, Z, sZ, T, SHIFT, n_rows, n_cols, ignore_index, inner, outer,
    FORM: tl.constexpr, WANT_H: tl.constexpr, WANT_ARGMAX: tl.constexpr, WANT_GAPS: tl.constexpr,
    SHARDED: tl.constexpr, HAS_SHIFT: tl.constexpr, RAGGED: tl.constexpr, SHIFTED: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at_z, before = first_column(row, sZ, EACH, SHIFTED)
    whole, behind = whole_and_behind(n_cols, before)
    Z += at_z
    shift = tl.load(SHIFT + row) if HAS_SHIFT else 0.0
    y = tl.load(T + row).to(tl.int64)
    top, total, spread, gaps, best = float("-inf"), 0.0, 0.0, 0.0, -before
    if RAGGED:
        few, there = edges(tl.arange(0, EDGES), before, whole, behind)
        x_few, _few = _piece(
            Z, few, there, shift, inner, outer, FORM
        )  # `_` has another shape below
        top, total, spread, gaps, best = _absorb(
            x_few, few, there, 0, top, total, spread, gaps, best, WANT_H, WANT_ARGMAX, WANT_GAPS
        )
    for start in range(0, whole, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < whole
        x, _ = _piece(Z, cols, mask, shift, inner, outer, FORM)
        top, total, spread, gaps, best = _absorb(
            x, cols, mask, before + behind + start, top, total, spread, gaps, best,
            WANT_H, WANT_ARGMAX, WANT_GAPS,
        )  # fmt: skip
    base = tl.where(top == float("-inf"), 0.0, top)
    log_total = tl.log2(total) * LN2
    known = (y >= 0) & (y < n_cols) & (y != ignore_index)
    x_y, _ = _piece(
        Z,
        tl.where(known, y, 0) - before + tl.arange(0, 1),
        tl.full((1,), True, tl.int1),
        shift,
        inner,
        outer,
        FORM,
    )
    logp = tl.sum(x_y - base, axis=0) - log_total
    absent = tl.where(y == ignore_index, 0.0, float("nan"))
    if SHARDED:
        elsewhere = y == n_cols
        logp = tl.where(elsewhere, float("-inf"), logp)
        known = known | elsewhere
    tl.store(LOGP + row, tl.where(known, logp, absent))
    tl.store(TOP + row, base)
    tl.store(TOTAL + row, log_total)
    if WANT_H:
        tl.store(ENTROPY + row, tl.where(known, log_total - spread / total, absent))
    if WANT_GAPS:
        tl.store(GAPS + row, tl.where(known, gaps, absent))
    if WANT_ARGMAX:
        best = tl.minimum(best + before, n_cols - 1)
        tl.store(ARGMAX + row, tl.where(known, best, -1).to(tl.int64))


@triton.jit
def _gradient(
    OUT, Z, cols, mask, row, y, shift, TOP, TOTAL, ENTROPY, A, C, B, D, n_classes, before, inner, outer, slope,
    FORM: tl.constexpr, HAS_B: tl.constexpr, HAS_D: tl.constexpr, SHARDED: tl.constexpr,
):  # fmt: skip
    """The gradient of some columns of a row."""
    x, varying = _piece(Z, cols, mask, shift, inner, outer, FORM)
    a = tl.load(A + row).to(tl.float32)
    a = tl.where((y >= 0) & (y < n_classes + SHARDED), a, float("nan"))
    c = tl.load(C + row).to(tl.float32)
    log_p = x - tl.load(TOP + row) - tl.load(TOTAL + row)
    p = exp(log_p)
    here = cols == y - before
    g = tl.where(here, a, 0.0 * a) - c * p  # 0 * a: NaN for a target that is nowhere
    if HAS_D:
        g += tl.load(D + row).to(tl.float32)
    if HAS_B:
        b = tl.load(B + row).to(tl.float32)
        h = tl.load(ENTROPY + row)
        g -= b * p * (tl.where(p > 0.0, log_p, 0.0) + h)
    g *= varying * slope
    tl.store(OUT + cols, g.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["ignore_index"])
def _gradient_kernel(
    OUT, sOUT, Z, sZ, T, SHIFT, TOP, TOTAL, ENTROPY, A, C, B, D, n_cols, ignore_index, inner, outer, slope,
    FORM: tl.constexpr, HAS_B: tl.constexpr, HAS_D: tl.constexpr, SHARDED: tl.constexpr, HAS_SHIFT: tl.constexpr,
    RAGGED: tl.constexpr, SHIFTED: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at_z, before = first_column(row, sZ, EACH, SHIFTED)
    at_out, _ = first_column(row, sOUT, EACH, SHIFTED)
    whole, behind = whole_and_behind(n_cols, before)
    OUT += at_out
    Z += at_z
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < whole
    y = tl.load(T + row).to(tl.int64)
    few, there = edges(tl.arange(0, EDGES), before, whole, behind)
    there &= tl.program_id(1) == 0
    if y == ignore_index:
        tl.store(OUT + cols, tl.zeros((BLOCK,), OUT.dtype.element_ty), mask=mask)
        if RAGGED:
            tl.store(OUT + few, tl.zeros((EDGES,), OUT.dtype.element_ty), mask=there)
    else:
        shift = tl.load(SHIFT + row) if HAS_SHIFT else 0.0
        _gradient(
            OUT, Z, cols, mask, row, y, shift, TOP, TOTAL, ENTROPY, A, C, B, D, n_cols, before, inner, outer, slope,
            FORM, HAS_B, HAS_D, SHARDED,
        )  # fmt: skip
        if RAGGED:
            _gradient(
                OUT, Z, few, there, row, y, shift, TOP, TOTAL, ENTROPY, A, C, B, D, n_cols, before, inner, outer,
                slope, FORM, HAS_B, HAS_D, SHARDED,
            )  # fmt: skip


def transform_of(
    pre_scale: float, softcap: float | None, post_scale: float
) -> tuple[str, float, float, float]:
    """FORM, inner, outer, and the constant part of dx/dz."""
    scale = pre_scale * post_scale
    if softcap:
        return "capped", pre_scale / softcap, post_scale * softcap, scale
    return ("plain" if scale == 1.0 else "scaled"), 1.0, scale, scale


def logp_rows(
    logits: Tensor, target: Tensor, *, V: int, ignore_index: int = -100, pre_scale: float = 1.0,
    softcap: float | None = None, post_scale: float = 1.0, want_entropy: bool = False, want_argmax: bool = False,
    want_gaps: bool = False, sharded: bool = False, shift: Tensor | None = None,
) -> LogpStats:  # fmt: skip
    """Statistics of every row (formulas: top of this file).

    logits `[C, >= V]`: the first V columns count; adjacent columns, any row stride. target `[C]` int64 or int32. shift
    `[C]` fp32 is added to each row's logits first.
    """
    n, new = logits.shape[0], logits.new_empty
    logp, top, log_total = new(3, n, dtype=torch.float32).unbind(0)
    entropy = new(n if want_entropy else 0, dtype=torch.float32)
    argmax = new(n if want_argmax else 0, dtype=torch.int64)
    gaps = new(n if want_gaps else 0, dtype=torch.float32)
    form, inner, outer, _ = transform_of(pre_scale, softcap, post_scale)
    block = min(block_of(V), _MAX_BLOCK)
    launch(
        _stats_kernel, (n,), logits.device, logp, top, log_total, entropy, argmax, gaps, logits, logits.stride(0),
        dense(target), logp if shift is None else shift, n, V, ignore_index, inner, outer, FORM=form,
        WANT_H=want_entropy, WANT_ARGMAX=want_argmax, WANT_GAPS=want_gaps, SHARDED=sharded, HAS_SHIFT=shift is not None,
        **column_flags(V, logits.element_size(), logits.stride(0)), BLOCK=block, num_warps=8 if block > 2048 else 4,
        **UNFUSED,
    )  # fmt: skip
    return LogpStats(logp, top, log_total, entropy, argmax, gaps)


def logp_gradient(
    out: Tensor, logits: Tensor, target: Tensor, stats: LogpStats, a: Tensor, c: Tensor, b: Tensor | None = None,
    d: Tensor | None = None, *, V: int, ignore_index: int = -100, pre_scale: float = 1.0,
    softcap: float | None = None, post_scale: float = 1.0, sharded: bool = False, shift: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradient to `out` `[C, >= V]`, which may be `logits`; a, c, b, d `[C]`, see the top of this file."""
    form, inner, outer, slope = transform_of(pre_scale, softcap, post_scale)
    block = min(block_of(V), 4096)
    launch(
        _gradient_kernel, (logits.shape[0], cdiv(V, block)), logits.device, out, out.stride(0), logits,
        logits.stride(0), dense(target), stats.top if shift is None else shift, stats.top, stats.log_total,
        stats.entropy, dense(a), dense(c), a if b is None else dense(b), a if d is None else dense(d), V, ignore_index,
        inner, outer, slope, FORM=form, HAS_B=b is not None, HAS_D=d is not None, SHARDED=sharded,
        HAS_SHIFT=shift is not None, **column_flags(V, logits.element_size(), out.stride(0), logits.stride(0)),
        BLOCK=block, num_warps=8 if block > 2048 else 4, **UNFUSED,
    )  # fmt: skip
