"""Softmax of rows that are too wide for registers or begin anywhere, and its gradient, at one read and one write.

A program visits a row, or its part of one, twice: forwards for maximum and sum (the dot of dy and y in backward), then
backwards for the result, so that what was read last is still in L1 and L2. A table says how many bytes of rows an SM
has under way: with too many the second visit reads from memory, with too few nothing hides the ends of visits. Where
one row is too much for a program, several share it and tell one another what they found (`_row_parts`).

Accesses have 16 bytes whatever the width and the rows' strides are (`_columns`). A piece is [LANES, STEPS, EACH]: lane
l reads STEPS runs of EACH neighbouring columns and keeps maximum and sum for itself until the row ends, so that no
thread waits for another before; it pays one exponential more for each piece.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
import functools
from typing import Any

import torch

from liger_kernel import _env
from liger_kernel.ops._columns import EDGES, aligned, column_flags, edges, first_column
from liger_kernel.ops._device import exp
from liger_kernel.ops._row_parts import can_wait, exchange, part_of, take_place
from liger_kernel.ops._schedules import WARPS, Table, card_of, resident
from liger_kernel.ops._triton import Launch, tl, triton


@triton.jit
def _piece(STEPS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """Columns of the first piece. Lanes come first, else Triton spreads the runs over two threads."""
    lane = tl.arange(0, LANES)[:, None, None] * EACH
    run = tl.arange(0, STEPS)[None, :, None] * (LANES * EACH)
    return run + lane + tl.arange(0, EACH)[None, None, :]


@triton.jit
def _lane_sum(x):
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def _measure(top, total, x):
    """Take a piece into the lanes' maxima and sums of exp(x - maximum)."""
    x = x.to(tl.float32)
    peak = tl.maximum(top, tl.max(tl.max(x, axis=2), axis=1))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, total * exp(top - base) + _lane_sum(exp(x - base[:, None, None]))


@triton.jit
def _unite(tops, totals):
    """Maximum and sum of lanes, or of parts, as one; 0 and 0 where there is nothing but -inf."""
    peak = tl.max(tops, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, base, tl.sum(totals * exp(tops - base), axis=0)


@triton.jit
def _scaled(Y, X, cols, mask, base, scale):
    x = tl.load(X + cols, mask=mask, other=float("-inf"), eviction_policy="evict_first")
    y = exp(x.to(tl.float32) - base) * scale
    tl.store(Y + cols, y.to(Y.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def forward_wide_kernel(
    BOARD, Y, X, sX_row, n_cols, RAGGED: tl.constexpr, SHIFTED: tl.constexpr, PARTS: tl.constexpr,
    STEPS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = STEPS * LANES * EACH
    row, part = take_place(BOARD, PARTS)
    at_x, before = first_column(row, sX_row, EACH, SHIFTED)
    at_y, _ = first_column(row, n_cols, EACH, SHIFTED)
    first, before, whole, behind = part_of(part, n_cols, before, PARTS)
    X += at_x + first
    Y += at_y + first
    piece = _piece(STEPS, LANES, EACH)
    x = tl.load(X + piece, mask=piece < whole, other=float("-inf"), eviction_policy="evict_last")
    top = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    if RAGGED:
        few, there = edges(tl.arange(0, LANES)[:, None, None], before, whole, behind)
        top, total = _measure(top, total, tl.load(X + few, mask=there, other=float("-inf")))
    for start in range(0, whole, SIZE):
        ahead = start + SIZE + piece
        after = tl.load(
            X + ahead, mask=ahead < whole, other=float("-inf"), eviction_policy="evict_last"
        )
        top, total = _measure(top, total, x)
        x = after
    top, base, total = _unite(top, total)
    if PARTS > 1:
        tops, totals = exchange(BOARD, row, part, top, total, PARTS)
        _, base, total = _unite(tops, totals)
    scale = 1.0 / total
    for back in range(0, whole, SIZE):
        cols = (whole - 1) // SIZE * SIZE - back + piece
        _scaled(Y, X, cols, cols < whole, base, scale)
    if RAGGED:
        few, there = edges(tl.arange(0, EDGES), before, whole, behind)
        _scaled(Y, X, few, there, base, scale)


@triton.jit
def _read_both(DY, Y, cols, mask, eviction: tl.constexpr):
    dy = tl.load(DY + cols, mask=mask, other=0.0, eviction_policy=eviction)
    return dy, tl.load(Y + cols, mask=mask, other=0.0, eviction_policy=eviction)


@triton.jit
def _product(dy, y):
    return _lane_sum(dy.to(tl.float32) * y.to(tl.float32))


@triton.jit
def _gradient(DX, DY, Y, cols, mask, dot):
    dy, y = _read_both(DY, Y, cols, mask, "evict_first")
    dx = y.to(tl.float32) * (dy.to(tl.float32) - dot)
    tl.store(DX + cols, dx.to(DX.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def backward_wide_kernel(
    BOARD, DX, DY, Y, sDY_row, sY_row, n_cols, RAGGED: tl.constexpr, SHIFTED: tl.constexpr,
    PARTS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = STEPS * LANES * EACH
    row, part = take_place(BOARD, PARTS)
    at_dy, before = first_column(row, sDY_row, EACH, SHIFTED)
    at_y, _ = first_column(row, sY_row, EACH, SHIFTED)
    at_dx, _ = first_column(row, n_cols, EACH, SHIFTED)
    first, before, whole, behind = part_of(part, n_cols, before, PARTS)
    DY += at_dy + first
    Y += at_y + first
    DX += at_dx + first
    piece = _piece(STEPS, LANES, EACH)
    dy, y = _read_both(DY, Y, piece, piece < whole, "evict_last")
    dots = tl.zeros((LANES,), tl.float32)
    if RAGGED:
        few, there = edges(tl.arange(0, LANES)[:, None, None], before, whole, behind)
        some_dy, some_y = _read_both(DY, Y, few, there, "evict_last")
        dots += _product(some_dy, some_y)
    for start in range(0, whole, SIZE):
        ahead = start + SIZE + piece
        after_dy, after_y = _read_both(DY, Y, ahead, ahead < whole, "evict_last")
        dots += _product(dy, y)
        dy, y = after_dy, after_y
    dot = tl.sum(dots, axis=0)
    if PARTS > 1:
        dots, _ = exchange(BOARD, row, part, dot, tl.cast(0.0, tl.float32), PARTS)
        dot = tl.sum(dots, axis=0)
    for back in range(0, whole, SIZE):
        cols = (whole - 1) // SIZE * SIZE - back + piece
        _gradient(DX, DY, Y, cols, cols < whole, dot)
    if RAGGED:
        few, there = edges(tl.arange(0, EDGES), before, whole, behind)
        _gradient(DX, DY, Y, few, there, dot)


def wide(
    kernel: Any, table: Table, row_bytes: int, device: torch.device, itemsize: int, n_rows: int, n_cols: int,
    *steps: int,
) -> tuple[Launch, int]:  # fmt: skip
    """-> launch, parts of a row; row_bytes: of all that is read of a row; steps: of what is read, in elements."""
    warps, runs, programs, parts = table.choose(row_bytes, itemsize, card_of(device))
    columns = column_flags(n_cols, itemsize, n_cols, *steps)
    if parts > 1 and not can_wait(device):
        warps, runs, programs, parts = _WIDEST, 4 // len(steps), 0, 1
    if not (columns["SHIFTED"] or aligned(n_cols, *steps)):  # accesses of one element each
        runs, programs = min(runs, 2), 0
    warps = min(warps, _env.device_info(device).max_warps)
    meta = {
        **columns,
        "PARTS": parts,
        "STEPS": runs,
        "LANES": 32 * warps,
        "num_warps": warps,
        **resident(device, warps, programs),
    }
    return Launch(kernel, (n_rows * parts,), device, *steps, n_cols, **meta), parts


def _fits(operands: int, size: int, warps: int, runs: int, programs: int, parts: int) -> bool:
    """A part of a row is 1 to 32 pieces, and every thread has the registers it needs."""
    piece, part = 512 * warps * runs * operands, size // parts
    roomy = (
        programs * warps in (0, 16, 24, 32) and runs * operands * warps * max(programs, 1) <= 128
    )
    return roomy and part // 32 <= piece <= part and (parts == 1 or programs > 0)


_WIDEST = 32  # warps alone with a row: an SM holds one then, and L2 all that are held

# bytes of what is read of a row -> warps of the program that takes it, runs of a piece, how many programs an SM is to
# hold at a time (0: the compiler's choice), and how many share a row. Measured on H200 at 2,049, 4,095, 8,191, 65,536
# and 131,072 columns in bf16; others by analogy.
_FIELDS = {"warps": WARPS, "runs": (2, 4), "programs": (0, 2, 3, 4), "parts": (1, 2, 4, 8)}
FORWARD = Table("softmax.forward_wide", _FIELDS, {
    8 << 10: (2, 4, 0, 1), 32 << 10: (4, 4, 4, 1), 112 << 10: (8, 4, 3, 1),
    208 << 10: (16, 4, 2, 1), 272 << 10: (8, 4, 4, 4), 384 << 10: (8, 4, 3, 4), 1 << 20: (8, 4, 4, 8),
}, functools.partial(_fits, 1))  # fmt: skip
# Two operands: half the runs of each. They take fewer registers than they are granted, so that an SM may hold five
# programs of 8 warps where four are asked for.
BACKWARD = Table("softmax.backward_wide", {**_FIELDS, "runs": (1, 2, 4), "parts": (1, 2, 4, 8, 16)}, {
    12 << 10: (4, 1, 0, 1), 16 << 10: (4, 2, 4, 1), 112 << 10: (8, 2, 3, 1),
    208 << 10: (16, 2, 2, 1), 272 << 10: (8, 2, 4, 8), 512 << 10: (8, 4, 2, 4), 1 << 20: (8, 4, 2, 8),
}, functools.partial(_fits, 2))  # fmt: skip
