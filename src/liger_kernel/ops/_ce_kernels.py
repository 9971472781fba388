"""Softmax cross entropy of rows of logits and its gradient: one launch, one read and one write of
device memory.

Shared by `cross_entropy`, which is given logits, and by the vocabulary head, which makes them a
chunk at a time and lets the gradient take their place. `ce_rows` below is the Triton path,
`_ce_torch.ce_rows_torch` its twin in plain PyTorch.

For a row z of V logits with label y, weights w (1 where absent) and W = sum of w,

    x = post_scale * c * tanh(pre_scale * z / c)     c = softcap;  x = post_scale * pre_scale * z
                                                     without one
    ce = (1 - ls) * w_y * (lse - x_y) + ls/V * sum_v w_v (lse - x_v)       ls = label_smoothing
    zl = lse_square_scale * lse^2
    loss = f * (scales[0] * ce + scales[1] * zl)     f = p_y, held constant, under token_scaling,
                                                     else 1
    dx_v = u * f * (p_v * c_p - [v = y] * c_y - w_v * c_w)       u = upstream, 1 where absent
           c_y = (1 - ls) * w_y * scales[0],   c_w = ls/V * scales[0],
           c_p = c_y + c_w * W + 2 * lse_square_scale * lse * scales[1]

All of it is fp32; the gradient is rounded once. Only differences to the row's maximum are
exponentiated and only differences to x_y are summed, so that an offset common to a row costs no
digits; 1 - p_y is summed, not subtracted, so that a confident row has some. An ignored row gives
0, a label out of range NaN, in loss and gradient; no label reads outside its row. NaN logits give
NaN.

Each program takes a row in two passes, of which the second runs backwards and finds most of it in
L1 and L2. A table says how many rows an SM has under way: with one, nothing hides the end of a pass
and of a row; with many, the second pass reads from memory. Rows that are too long for both are
shared by several programs, which tell one another maximum and sum between their passes.

Accesses have 16 bytes whatever V and the rows' strides are (`_columns`): a program counts columns
from its `origin` on.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._ce_lanes import (
    collapse,
    gradient,
    log1p,
    measure,
    measure_edges,
    transform,
    unite,
)
from liger_kernel.ops._columns import (
    EDGES,
    aligned,
    column_flags,
    edges,
    first_column,
)
from liger_kernel.ops._device import LN2, exp, row_base
from liger_kernel.ops._op import dense
from liger_kernel.ops._row_parts import board, can_wait, exchange, part_of, take_place
from liger_kernel.ops._schedules import WARPS, Table, card_of, resident
from liger_kernel.ops._triton import UNFUSED, Launch, planned, tl, triton


class RowStats(NamedTuple):
    """What is known of every row of a call: `numbers` [3, C] fp32, [4, C] under `want_argmax`, and
    `predicted` [C] int64, the lowest index of the largest logit (-1 on ignored rows; None or empty
    unless asked for).
    """

    numbers: Tensor
    predicted: Tensor | None

    @property
    def loss(self) -> Tensor:
        """[C], z included; 0 on ignored rows."""
        return self.numbers[0]

    @property
    def z(self) -> Tensor:
        """[C], the z-loss part of the loss."""
        return self.numbers[1]

    @property
    def lse(self) -> Tensor:
        """[C], log-sum-exp of x; 0 on ignored rows."""
        return self.numbers[2]

    @property
    def correct(self) -> Tensor:
        """[C], 1 where the label has the largest logit; only under `want_argmax`."""
        return self.numbers[3]


@triton.jit
def _prepare(
    row, y, Z, W, WSUM, SCALES, UP, sUP, n_cols, inner, outer, FORM: tl.constexpr, SMOOTH: tl.constexpr
):  # fmt: skip
    """Everything a row needs from memory beside its logits, asked for before they are: x_y, a
    finite number near it, both scales, w_y, sum of w, upstream.
    """
    x_y, _ = transform(tl.load(Z + y).to(tl.float32), inner, outer, FORM)
    ref = tl.where(tl.abs(x_y) < float("inf"), x_y, 0.0)
    w_y, w_sum, upstream = 1.0, tl.cast(n_cols, tl.float32), 1.0
    if W is not None:
        w_y = tl.load(W + y).to(tl.float32)
        if SMOOTH:
            w_sum = tl.load(WSUM)
    if UP is not None:
        upstream = tl.load(UP + row_base(row, sUP)).to(tl.float32)
    return x_y, ref, tl.load(SCALES), tl.load(SCALES + 1), w_y, w_sum, upstream


@triton.jit
def _conclude(
    row, part, origin, y, x_y, scale, scale_z, w_y, w_sum, upstream, base, rest, gaps, best, STATS,
    PREDICTED, n_rows, n_cols, smoothing, lse_square_scale, slope,
    SMOOTH: tl.constexpr, TOKEN_SCALING: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """Store the row's numbers; -> c_p / total, target's p_y c_p - c_y, and c_w, all of them with
    the constant part of dx/dz.

    Without the target's own term in `rest`, a confident row keeps its digits: 1 - p_y is
    rest / total, and its loss log(1 + rest / e_y).
    """
    e_y = exp(x_y - base)
    total = rest + e_y
    log_total = tl.log2(total) * LN2
    lse = base + log_total
    ratio = rest / e_y
    nll = tl.where(ratio < 0.5, log1p(ratio), log_total + (base - x_y))
    if TOKEN_SCALING:
        scale, scale_z = scale * (e_y / total), scale_z * (e_y / total)
    c_y, c_w = (1.0 - smoothing) * w_y, smoothing / n_cols
    ce = c_y * nll
    if SMOOTH:
        ce += c_w * (w_sum * nll + gaps)
    z_loss = lse_square_scale * lse * lse * scale_z
    tl.store(STATS + row, ce * scale + z_loss, mask=part == 0)
    tl.store(STATS + n_rows + row, z_loss, mask=part == 0)
    tl.store(STATS + 2 * n_rows + row, lse, mask=part == 0)
    if ARGMAX:
        best = tl.minimum(best, n_cols - 1 - origin)  # a row of NaN has no largest logit
        tl.store(STATS + 3 * n_rows + row, tl.where(best == y, 1.0, 0.0))
        tl.store(PREDICTED + row, (origin + best).to(tl.int64))
    scale, scale_z = scale * slope * upstream, scale_z * slope * upstream
    c_y, c_w = c_y * scale, c_w * scale
    more = c_w * w_sum + 2.0 * lse_square_scale * lse * scale_z
    return (c_y + more) / total, (more * e_y - c_y * rest) / total, c_w


@triton.jit
def _skip(
    row, part, before, whole, behind, value, STATS, PREDICTED, OUT, n_rows, ARGMAX: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A row without a usable label: `value` everywhere."""
    for i in tl.static_range(3 + ARGMAX):
        tl.store(STATS + i * n_rows + row, value, mask=part == 0)
    if ARGMAX:
        tl.store(PREDICTED + row, tl.cast(-1, tl.int64))
    if OUT is not None:
        for start in range(0, whole, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            filled = tl.zeros((BLOCK,), tl.float32) + value
            tl.store(OUT + cols, filled.to(OUT.dtype.element_ty), mask=cols < whole)
        cols, mask = edges(tl.arange(0, EDGES), before, whole, behind)
        filled = tl.zeros((EDGES,), tl.float32) + value
        tl.store(OUT + cols, filled.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _read(Z, cols, mask, eviction: tl.constexpr):
    """Logits of a piece, -inf outside the mask."""
    return tl.load(Z + cols, mask=mask, other=float("-inf"), eviction_policy=eviction)


@triton.jit
def _write(
    OUT, z, cols, mask, near, W, y, base, c_p, g_y, c_w, inner, outer,
    FORM: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    g = gradient(
        z.to(tl.float32), cols, mask, near, W, y, base, c_p, g_y, c_w, inner, outer, FORM, SMOOTH
    )
    tl.store(OUT + cols, g.to(OUT.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def _row(
    row, part, origin, before, whole, behind, z, piece, y, BOARD, STATS, PREDICTED, OUT, Z, W, WSUM, SCALES,
    UP, sUP, n_rows, n_cols, smoothing, lse_square_scale, inner, outer, slope, FORM: tl.constexpr,
    SMOOTH: tl.constexpr, TOKEN_SCALING: tl.constexpr, ARGMAX: tl.constexpr, RAGGED: tl.constexpr,
    PARTS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """z: the logits of the first piece; every piece is asked for one ahead."""
    SIZE: tl.constexpr = STEPS * LANES * EACH
    x_y, ref, scale, scale_z, w_y, w_sum, upstream = _prepare(
        row, y, Z, W, WSUM, SCALES, UP, sUP, n_cols, inner, outer, FORM, SMOOTH
    )
    top, rest, gaps, best = measure_edges(
        Z, before, whole, behind, W, y, ref, inner, outer, FORM, SMOOTH, ARGMAX, RAGGED, LANES
    )
    for start in range(0, whole, SIZE):
        cols = start + piece
        after = _read(Z, cols + SIZE, cols + SIZE < whole, "evict_last")
        near = (y >= start) & (y < start + SIZE)
        top, rest, gaps, best = measure(
            top, rest, gaps, best, z.to(tl.float32), cols, cols < whole, near, W, y, ref,
            inner, outer, FORM, SMOOTH, ARGMAX,
        )  # fmt: skip
        z = after
    base, rest, gaps, best = collapse(top, rest, gaps, best, x_y, y, SMOOTH, ARGMAX)
    if PARTS > 1:
        bases, rests = exchange(BOARD, row, part, base, rest, PARTS)
        base, rest = unite(bases, rests, x_y)
    c_p, g_y, c_w = _conclude(
        row, part, origin, y, x_y, scale, scale_z, w_y, w_sum, upstream, base, rest, gaps, best, STATS,
        PREDICTED, n_rows, n_cols, smoothing, lse_square_scale, slope, SMOOTH, TOKEN_SCALING, ARGMAX,
    )  # fmt: skip
    if OUT is not None:
        # Backwards: what was read last is still near.
        for back in range(0, whole, SIZE):
            start = (whole - 1) // SIZE * SIZE - back
            cols = start + piece
            near = (y >= start) & (y < start + SIZE)
            mask = cols < whole
            z = _read(Z, cols, mask, "evict_first")
            _write(OUT, z, cols, mask, near, W, y, base, c_p, g_y, c_w, inner, outer, FORM, SMOOTH)
        if RAGGED:
            cols, mask = edges(tl.arange(0, EDGES), before, whole, behind)
            z = _read(Z, cols, mask, "evict_first")
            _write(OUT, z, cols, mask, True, W, y, base, c_p, g_y, c_w, inner, outer, FORM, SMOOTH)


@triton.jit(do_not_specialize=["n_rows", "ignore_index", "sUP"])
def _rows_kernel(
    BOARD, STATS, PREDICTED, OUT, Z, T, W, WSUM, SCALES, UP, sOUT, sZ, sUP, n_rows, n_cols,
    ignore_index, smoothing, lse_square_scale, inner, outer, slope, FORM: tl.constexpr,
    SMOOTH: tl.constexpr, TOKEN_SCALING: tl.constexpr, ARGMAX: tl.constexpr, RAGGED: tl.constexpr,
    SHIFTED: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    row, part = take_place(BOARD, PARTS)
    label = tl.load(T + row).to(tl.int64)
    at_z, before = first_column(row, sZ, EACH, SHIFTED)
    at_out, _ = first_column(row, sOUT, EACH, SHIFTED)
    origin = before
    first, before, whole, behind = part_of(part, n_cols, before, PARTS)
    origin += first
    Z += at_z + first
    if OUT is not None:
        OUT += at_out + first
    if W is not None:
        W += origin
    lane = tl.arange(0, LANES)[:, None, None]
    piece = tl.arange(0, STEPS)[None, :, None] * (LANES * EACH) + lane * EACH
    piece += tl.arange(0, EACH)[None, None, :]
    if PARTS > 1:  # at once: a program's turns are short; what an ignored row then reads is little
        z = _read(Z, piece, piece < whole, "evict_last")
    if (label == ignore_index) | (label < 0) | (label >= n_cols):
        value = tl.where(label == ignore_index, 0.0, float("nan"))
        _skip(
            row, part, before, whole, behind, value, STATS, PREDICTED, OUT, n_rows, ARGMAX,
            STEPS * LANES * EACH,
        )  # fmt: skip
    else:
        if PARTS == 1:
            z = _read(Z, piece, piece < whole, "evict_last")
        _row(
            row, part, origin, before, whole, behind, z, piece, label.to(tl.int32) - origin, BOARD,
            STATS, PREDICTED, OUT, Z, W, WSUM, SCALES, UP, sUP, n_rows, n_cols, smoothing,
            lse_square_scale, inner, outer, slope, FORM, SMOOTH, TOKEN_SCALING, ARGMAX, RAGGED,
            PARTS, STEPS, LANES, EACH,
        )  # fmt: skip


def ce_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, upstream: Tensor | None,
    out: Tensor | None, *, V: int, ignore_index: int = -100, label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, pre_scale: float = 1.0, softcap: float | None = None,
    post_scale: float = 1.0, token_scaling: bool = False, weight_sum: Tensor | None = None,
    want_argmax: bool = False,
) -> RowStats:  # fmt: skip
    """Loss of every row and, into `out`, the gradient of the logits (formulas: top of this file).

    Args:
        logits: `[C, >= V]`, the first V columns count. Adjacent columns, any row stride. Accesses
            are narrow where the memory of logits or `out` does not begin on a multiple of 16 bytes,
            or their strides differ by no multiple of 16 bytes of logits.
        target: `[C]` int64 or int32.
        weight: `[V]` class weights of any float dtype, or None.
        scales: `[2]` fp32 on the device, the factors of cross entropy and z-loss (1 / denominators).
        upstream: `[C]` gradients of the rows' losses, any stride (0 too), any float dtype; None for
            ones.
        out: `[C, >= V]` where the gradient goes: `logits` itself, another buffer of any float
            dtype, or None for the loss alone. Nothing beyond column V is written.
        weight_sum: sum of `weight`, one fp32 element; needed with both weights and smoothing.
        want_argmax: fill `correct` and `predicted`.
    Memory:
        12 bytes a row, 12 more with `want_argmax`, and 8 for each program of a shared row. The host
        is never waited for.
    """
    n_rows, device = logits.shape[0], logits.device
    numbers = logits.new_empty((3 + want_argmax, n_rows), dtype=torch.float32)
    predicted = logits.new_empty(n_rows, dtype=torch.int64) if want_argmax else None
    step = logits.stride(0)
    steps = (
        step if out is None else out.stride(0), step, 0 if upstream is None else upstream.stride(0)
    )  # fmt: skip
    table, size = _LOSS if out is None else _GRADIENT, logits.element_size()
    run, parts = _launch(
        device, table, size, steps, n_rows, V, ignore_index, label_smoothing, lse_square_scale,
        pre_scale, softcap, post_scale, token_scaling, want_argmax,
    )  # fmt: skip
    target, weight = dense(target), weight if weight is None else dense(weight)
    shared = board(device, n_rows, parts)
    run(shared, numbers, predicted, out, logits, target, weight, weight_sum, scales, upstream)
    return RowStats(numbers, predicted)


@planned
def _launch(
    device: torch.device, table: Table, size: int, steps: tuple[int, ...], n_rows: int, V: int, ignore_index: int,
    label_smoothing: float, lse_square_scale: float, pre_scale: float, softcap: float | None, post_scale: float,
    token_scaling: bool, want_argmax: bool,
) -> tuple[Launch, int]:  # fmt: skip
    """-> launch, parts of a row; size: bytes of a logit."""
    scale = pre_scale * post_scale
    inner, outer = (pre_scale / softcap, post_scale * softcap) if softcap else (1.0, scale)
    warps, *rest = table.choose(size * V, size, card_of(device))
    runs, programs, parts = rest or (2, 0, 1)
    columns = column_flags(V, size, *steps[:2])
    many = label_smoothing != 0.0 or want_argmax  # registers, and more to tell than a word holds
    if parts > 1 and (many or not can_wait(device)):  # alone with a row: twice as wide
        warps, programs, parts = 2 * warps, programs // 2, 1
    if not (columns["SHIFTED"] or aligned(*steps[:2])):  # accesses of one element each
        runs, programs = 2, 0
    elif many or softcap:
        runs = 2
    warps = min(warps, _env.device_info(device).max_warps)
    form = "capped" if softcap else "plain" if scale == 1.0 else "scaled"
    meta = {
        "FORM": form,
        "SMOOTH": label_smoothing != 0.0,
        "TOKEN_SCALING": token_scaling,
        "ARGMAX": want_argmax,
        **columns,
        "PARTS": parts,
        "STEPS": runs,
        "LANES": 32 * warps,
        "num_warps": warps,
        **resident(device, warps, programs),
        # x_y - x is 0 at the target only if both were rounded
        **(UNFUSED if label_smoothing and form != "plain" else {}),
    }
    numbers = (n_rows, V, ignore_index, label_smoothing, lse_square_scale, inner, outer, scale)
    return Launch(_rows_kernel, (n_rows * parts,), device, *steps, *numbers, **meta), parts


def _fits(size: int, warps: int, runs: int = 2, programs: int = 0, parts: int = 1) -> bool:
    """A part of a row is 1 to 128 pieces, and every thread has the registers it needs."""
    piece, part = 512 * warps * runs, size // parts
    fast = max(part // 128, 1024) <= piece <= max(part, 1024) and programs * warps <= _MOST_WARPS
    return fast and (parts == 1 or (size > _SHARED and programs > 0))


_MOST_WARPS = 32  # that an SM holds at 64 registers a thread
_SHARED = 128 << 10  # bytes of a row: two of them for each SM fit L2

# bytes of a row -> warps of the program that takes it, runs of a piece, how many programs an SM is to hold at a time
# (0: the compiler's choice), and how many share a row. Measured on H200, see NOTES.md.
_FIELDS = {"warps": WARPS, "runs": (2, 4), "programs": (0, 2, 3, 4, 5), "parts": (1, 2, 4, 8)}
_GRADIENT = Table("cross_entropy.gradient", _FIELDS, {
    2 << 10: (1, 2, 0, 1), 8 << 10: (2, 2, 0, 1), 32 << 10: (4, 4, 5, 1), 112 << 10: (8, 4, 3, 1),
    208 << 10: (16, 4, 2, 1), 384 << 10: (8, 4, 4, 4), 1 << 20: (8, 4, 4, 8),
}, _fits)  # fmt: skip
# The loss alone reads a row once.
_LOSS = Table("cross_entropy.loss", {"warps": WARPS}, {
    2 << 10: (1,), 16 << 10: (1,), 32 << 10: (2,), 512 << 10: (4,),
}, _fits)  # fmt: skip
