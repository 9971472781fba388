"""Rows that begin anywhere, with accesses of 16 bytes, and each column with one thread as long as a program runs.

EACH elements have 16 bytes. Where row r begins, counted from a multiple of EACH, depends on r modulo
EACH / gcd(row length, EACH) alone: its phase. A program takes rows of one phase. Their columns from the first that lies
on a multiple are a tile, [BLOCK / EACH, ROWS, EACH], in which `whole` are there, a multiple of EACH too: lanes come
first, else Triton spreads a row's columns over fewer of them. The ends of a row, fewer than EACH columns before the
tile's and as many behind, have accesses of one element each. They are a tile [BLOCK / EACH, ROWS, 1]: a thread adds
them to its own sums before it meets other threads. Kernels read ends before tiles: the layout of what comes last wins.
"""

# pyright: reportGeneralTypeIssues=false
import math

from liger_kernel.ops._columns import aligned
from liger_kernel.ops._device import row_base
from liger_kernel.ops._triton import tl, triton

# Elements have two bytes: a warp reads 128 bytes of wider ones at a time anyhow, and their ends take registers that
# backward does not have.
BYTES = 2
EACH = tl.constexpr(16 // BYTES)
# Columns of a row: so many that both ends fit into their tile, so few that registers hold the weight too.
NARROWEST, WIDEST = 128, 8192


def in_phases(itemsize: int, width: int, *steps: int | None) -> bool:
    """Whether operands with rows of `width` elements, `steps` apart (None: not there), and results without gaps are
    such rows, all of them beginning alike.
    """
    given = [width, *(step for step in steps if step is not None)]
    alike = all((step - width) % EACH.value == 0 for step in given)
    return itemsize == BYTES and NARROWEST <= width <= WIDEST and alike and not aligned(*given)


def phases_of(width: int) -> int:
    """How many there are."""
    return EACH.value // math.gcd(width, EACH.value)


@triton.jit
def phase_of(pid, n_cols):
    """-> a program's place among those of its phase, its phase, and how many phases there are."""
    phases = EACH // tl.minimum(n_cols & -n_cols, EACH)
    return pid // phases, pid % phases, phases


@triton.jit
def columns_of(phase, n_cols, BLOCK: tl.constexpr):
    """-> columns before the tile's; how many are in it; its columns, counted from its first; the ends', and which of
    them there are.
    """
    before = (EACH - phase * n_cols % EACH) % EACH
    whole = (n_cols - before) // EACH * EACH
    n = tl.arange(0, BLOCK // EACH)[:, None, None]
    lane = n * EACH + tl.arange(0, EACH)[None, None, :]
    ends = tl.where(n < EACH, n, n - EACH + before + whole)
    return before, whole, lane, ends, ends < tl.where(n < EACH, before, n_cols)


@triton.jit
def tile_base(row, stride, before):
    """Element offset of a row's tile. The division changes nothing and tells the compiler of the multiple."""
    return (row_base(row, stride) + before) // EACH * EACH


@triton.jit
def tile_of_vector(P, before, whole, BLOCK: tl.constexpr):
    """What a tile's columns have in common, 0 elsewhere. Neighbouring lanes read neighbouring elements: as a tile each
    would read 16 bytes apart from the next.
    """
    n = tl.arange(0, BLOCK)
    some = tl.load(P + before + n, mask=n < whole, other=0.0)
    return tl.reshape(some, (BLOCK // EACH, 1, EACH))


@triton.jit
def store_vector(P, tile, few, before, whole, ends, m_ends, BLOCK: tl.constexpr):
    """What `tile` [BLOCK / EACH, EACH] and `few` [BLOCK / EACH, 1], of the ends, hold for a row's columns."""
    n = tl.arange(0, BLOCK)
    tl.store(P + before + n, tl.reshape(tile, (BLOCK,)), mask=n < whole)
    tl.store(P + ends, few[:, None, :], mask=m_ends)


@triton.jit
def row_sum(tile, ends):
    return tl.sum(tl.sum(tile, axis=2) + tl.sum(ends, axis=2), axis=0)[None, :, None]


@triton.jit
def _add_both(a, b, a2, b2):
    return a + a2, b + b2


@triton.jit
def two_row_sums(tile, ends, tile2, ends2):
    """The warps of a program wait for one another once, not twice."""
    own = tl.sum(tile, axis=2) + tl.sum(ends, axis=2)
    own2 = tl.sum(tile2, axis=2) + tl.sum(ends2, axis=2)
    total, total2 = tl.reduce((own, own2), 0, _add_both)
    return total[None, :, None], total2[None, :, None]
