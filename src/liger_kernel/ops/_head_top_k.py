"""Rows of a student's logits against a teacher of whom K log-probabilities a row are known.

The loss is that of K + 1 classes: the K ids, and all others as one, of mass P_r = 1 - sum P_k, which the student gives
Q_r = sum of its other probabilities. With g and G as in `_head_pair_kernels`, over those classes,

    dx_k = g_k - q_k G        dx_v = q_v (g_r / Q_r - G) for every other v

kl, reverse_kl, jsd, tvd; the hard loss too. The log-probabilities are taken as they are, at the loss's temperature. A
negative id is an unused slot; an id past the vocabulary makes its row NaN. ids of a row must differ.

The K logits are taken out of the row, which is ours, before it is measured: Q_r is then summed, not subtracted, and
keeps its digits where the K ids hold nearly everything. (So a logit of -inf has probability 0 here under a soft cap
too.) Two visits of the row, forwards and backwards.
"""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import torch
from torch import Tensor

from liger_kernel.ops._ce_lanes import transform
from liger_kernel.ops._device import exp, row_base
from liger_kernel.ops._head_pair import PairLoss, factors, hard_form, readable, shape
from liger_kernel.ops._head_pair_kernels import blank, collapse, element, lane_sum, log, online
from liger_kernel.ops._op import dense
from liger_kernel.ops._triton import block_of, launch, tl, triton

_NONE = tl.constexpr(float("-inf"))
# log-probability in an unused slot: finite, so that differences are 0
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _rest(Z, cols, limit, n_cols, inner, outer, S_FORM: tl.constexpr, eviction: tl.constexpr):
    """-> x, -inf past the end and where a logit was taken out, and the part of dx/dz that varies."""
    z = tl.load(Z + cols, mask=cols < limit, other=0.0, eviction_policy=eviction).to(tl.float32)
    x, varying = transform(z, inner, outer, S_FORM)
    return tl.where((z == _NONE) | (cols >= n_cols), _NONE, x), varying


@triton.jit
def _row(
    row, label, SOFT, NLL, OUT, X, IDS, LOG_P, SCALE, limit, out_limit, n_cols, n_k, beta, beta_rest, temperature,
    soft, hard, inner, outer, slope, FORM: tl.constexpr, HARD: tl.constexpr, S_FORM: tl.constexpr, K: tl.constexpr,
    STEPS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = STEPS * LANES * EACH
    piece = tl.arange(0, STEPS)[None, :, None] * (LANES * EACH)
    piece += tl.arange(0, LANES)[:, None, None] * EACH + tl.arange(0, EACH)[None, None, :]
    slots = tl.arange(0, K)
    ids = tl.load(IDS + slots, mask=slots < n_k, other=-1)
    used = (ids >= 0) & (ids < n_cols)
    wrong = tl.sum((ids >= n_cols).to(tl.int32), axis=0) > 0
    x_k, varying_k = transform(
        tl.load(X + ids, mask=used, other=0.0).to(tl.float32), inner, outer, S_FORM
    )
    x_k = tl.where(used, x_k, _NONE)
    y_k = tl.load(LOG_P + slots, mask=used, other=_LOWEST).to(tl.float32)
    x_c = 0.0
    if HARD != "none":
        x_c, _varying = transform(tl.load(X + label).to(tl.float32), inner, outer, S_FORM)
    tl.debug_barrier()  # the label's logit may be one of those
    gone = tl.full((K,), float("-inf"), tl.float32).to(X.dtype.element_ty)
    tl.store(X + ids, gone, mask=used)
    tl.debug_barrier()

    top = tl.full((LANES,), float("-inf"), tl.float32)
    total, total_h = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    for start in range(0, n_cols, SIZE):
        x, varying = _rest(X, start + piece, limit, n_cols, inner, outer, S_FORM, "evict_last")
        before = top
        top, total, base = online(top, total, x)
        if HARD == "own":
            e = exp((x - base[:, None, None]) * temperature)
            total_h = total_h * exp((before - base) * temperature) + lane_sum(e)
    base_r, gap, total_r = collapse(top, total)
    peak_r = tl.max(top, axis=0)
    base = tl.maximum(peak_r, tl.max(x_k, axis=0))
    base = tl.where(base == _NONE, 0.0, base)
    apart = peak_r - base  # -inf where nothing is left
    log_total = log(total_r * exp(apart) + tl.sum(exp(x_k - base), axis=0))
    log_h = log_total
    if HARD == "own":
        total_h = tl.sum(total_h * exp(gap * temperature), axis=0) * exp(apart * temperature)
        log_h = log(total_h + tl.sum(exp((x_k - base) * temperature), axis=0))

    x_r = apart + log(tl.where(total_r == 0.0, 1.0, total_r)) - log_total
    known = tl.sum(exp(y_k), axis=0)
    p_r = tl.where(known > 1.0, 0.0, 1.0 - known)
    y_r = tl.where(p_r == 0.0, _NONE, log(tl.where(p_r == 0.0, 1.0, p_r)))
    log_q = tl.where(used, x_k - base - log_total, _LOWEST)
    loss_k, g_k = element(log_q, y_k, exp(y_k), beta, beta_rest, FORM)
    loss_r, g_r = element(x_r, y_r, p_r, beta, beta_rest, FORM)
    bad = tl.where(wrong, float("nan"), 0.0)
    sum_g = tl.sum(g_k, axis=0) + g_r + bad
    tl.store(SOFT + row, tl.sum(loss_k, axis=0) + loss_r + bad)
    if HARD != "none":
        tl.store(NLL + row, log_h + (base - x_c) * temperature)
    if OUT is not None:
        scale = slope
        if SCALE is not None:
            scale = slope * tl.load(SCALE).to(tl.float32)
        soft, hard = soft * scale, hard * scale * temperature
        # of exp(x - base_r): never the quotient of two numbers that may both vanish
        factor = g_r / tl.where(total_r == 0.0, 1.0, total_r) - sum_g * exp(apart - log_total)
        for back in range(0, n_cols, SIZE):
            cols = (n_cols - 1) // SIZE * SIZE - back + piece
            x, varying = _rest(X, cols, limit, n_cols, inner, outer, S_FORM, "evict_first")
            d = exp(x - base_r) * (soft * factor)
            if HARD != "none":
                q = exp((x - base) * temperature - log_h)
                d += hard * (q - tl.where(cols == label, 1.0, 0.0))
            if S_FORM == "capped":
                d *= varying
            tl.store(OUT + cols, d.to(OUT.dtype.element_ty), mask=cols < out_limit)
        d_k = soft * (g_k - exp(log_q) * sum_g)
        if HARD != "none":
            q_k = exp((x_k - base) * temperature - log_h)
            d_k += hard * (q_k - tl.where(ids == label, 1.0, 0.0))
        d_k *= varying_k
        tl.debug_barrier()
        tl.store(OUT + ids, d_k.to(OUT.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def top_k_kernel(
    SOFT, NLL, OUT, sOUT, X, sX, IDS, sIDS, LOG_P, sLOG_P, INDEX, T, SCALE, n_rows, limit, out_limit, n_cols, n_k,
    ignore_index, beta, beta_rest, temperature, soft, hard, inner, outer, slope, FORM: tl.constexpr,
    HARD: tl.constexpr, S_FORM: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        label = tl.cast(0, tl.int64)
        counts, known = True, True
        if T is not None:
            label = tl.load(T + row).to(tl.int64)
            counts = label != ignore_index
            if HARD != "none":
                known = (label >= 0) & (label < n_cols)
        OUT_row = OUT
        if OUT is not None:
            OUT_row = OUT + row_base(row, sOUT)
        if counts & known:
            given = row
            if INDEX is not None:
                given = tl.load(INDEX + row)
            _row(
                row, label, SOFT, NLL, OUT_row, X + row_base(row, sX), IDS + row_base(given, sIDS),
                LOG_P + row_base(given, sLOG_P), SCALE, limit, out_limit, n_cols, n_k, beta, beta_rest, temperature,
                soft, hard, inner, outer, slope, FORM, HARD, S_FORM, K, STEPS, LANES, EACH,
            )  # fmt: skip
        else:
            value = tl.where(counts, float("nan"), 0.0)
            blank(row, value, SOFT, NLL, OUT_row, out_limit, HARD, True, STEPS * LANES * EACH)


def top_k_rows(
    loss: PairLoss, logits: Tensor, ids: Tensor, log_probs: Tensor, index: Tensor | None, target: Tensor | None,
    scale: Tensor | None, out: Tensor | None, *, V: int,
) -> Tensor:  # fmt: skip
    """Soft and hard loss of every row, `[2, C]` fp32, and into `out` the gradient. logits is written to in any case.

    ids `[C, K]` int64 or int32, log_probs `[C, K]` of any float dtype; `[N, K]` with `index`. The rest as in
    `_head_pair.pair_rows`.
    """
    n, device = logits.shape[0], logits.device
    stats = torch.empty(2, n, dtype=torch.float32, device=device)
    if not loss.want_hard:
        stats[1] = 0
    form, inner, outer, slope = factors(loss.student_transform, loss.temperature)
    programs, meta = shape(logits, V, logits.element_size())
    args = (
        stats[0], stats[1], out, 0 if out is None else out.stride(0), logits, logits.stride(0), ids, ids.stride(0),
        log_probs, log_probs.stride(0), index, None if target is None else dense(target), scale, n,
        readable(logits, V, True), 0 if out is None else readable(out, V, True), V, ids.shape[1], loss.ignore_index,
        loss.parameter, 1.0 - loss.parameter, loss.temperature, loss.soft, loss.hard, inner, outer, slope,
    )  # fmt: skip
    flags = {
        "FORM": loss.form, "HARD": hard_form(loss, False), "S_FORM": form, "K": block_of(ids.shape[1]),
    }  # fmt: skip
    launch(top_k_kernel, (programs,), device, *args, **flags, **meta)
    return stats
