"""A row that several programs share: which of them is which, and what they tell one another.

Programs of a row tell what they found by one 64-bit word each and wait for the others' words. A program's place comes
from a counter, not from its index: places are taken in the order in which programs begin, so those that a program
waits for have begun or will as soon as others end, whatever order a card starts programs in. Words are combined in the
order of the parts: the same bits in each of them, and from run to run.

Waiting needs programs that run at the same time. Triton's interpreter has none, and only Hopper was measured.
"""

# pyright: reportGeneralTypeIssues=false
import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._columns import MULTIPLE, whole_and_behind
from liger_kernel.ops._schedules import measured_on
from liger_kernel.ops._triton import tl, triton

COUNTER = tl.constexpr(1)  # words of the board before those of the parts
_LINE = tl.constexpr(64)  # columns that parts are rounded to


@triton.jit
def take_place(BOARD, PARTS: tl.constexpr):
    """-> row and part of this program; where no row is shared its index is the row, and BOARD None."""
    row, part = tl.program_id(0), 0
    if PARTS > 1:
        place = tl.atomic_add(BOARD, 1, sem="relaxed").to(tl.int32)
        row, part = place // PARTS, place % PARTS
    return row, part


@triton.jit
def part_of(part, n_cols, before, PARTS: tl.constexpr):
    """-> a part's first column, and how many of its columns are before those in pieces (`_columns`), in them, behind
    them.
    """
    whole, behind = whole_and_behind(n_cols, before)
    first = 0
    if PARTS > 1:
        # divided and multiplied once more, because a minimum hides from the compiler that both were multiples
        each = tl.cdiv(tl.cdiv(whole, PARTS), _LINE) * _LINE
        first = tl.minimum(part * each, whole) // MULTIPLE * MULTIPLE
        whole = tl.minimum(whole - first, each) // MULTIPLE * MULTIPLE
        before = tl.where(part == 0, before, 0)
        behind = tl.where(part == PARTS - 1, behind, 0)
    return first, before, whole, behind


@triton.jit
def exchange(BOARD, row, part, top, rest, PARTS: tl.constexpr):
    """Two fp32 numbers of this part -> [PARTS] of each, those of all parts; waits for them.

    A word is stored inverted: all that it could be mistaken for absence by are two NaNs that no arithmetic makes.
    """
    at = BOARD + COUNTER + row * PARTS
    high = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = rest.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(at + part, ~(high | low), sem="relaxed")
    at += tl.arange(0, PARTS)
    words = tl.load(at, volatile=True)
    while tl.sum((words == 0).to(tl.int32), axis=0) > 0:
        words = tl.load(at, volatile=True)
    words = ~words
    tops = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tops, words.to(tl.int32).to(tl.float32, bitcast=True)


def board(device: torch.device, n_rows: int, parts: int) -> Tensor | None:
    """What programs write on, 8 bytes each; None where nothing is shared."""
    if parts == 1:
        return None
    return torch.zeros(COUNTER.value + n_rows * parts, dtype=torch.int64, device=device)


def can_wait(device: torch.device) -> bool:
    """Whether programs may share rows on this device."""
    return measured_on(device) and not _env.interpreting()
