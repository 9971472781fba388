"""Columns of a row whose accesses take 16 bytes each, whatever the width and the stride of rows are.

A program counts columns from the first one of the row that lies on a multiple of 16 bytes; those before it are
negative. It visits `whole` of them in pieces, a multiple of 16, and the few before and behind them apart (`edges`):
else the compiler could not know that the columns of one access are all there or none.
"""

# pyright: reportGeneralTypeIssues=false
from typing import Any

from liger_kernel.ops._device import row_base
from liger_kernel.ops._triton import tl, triton

MULTIPLE = tl.constexpr(16)  # that `whole` is of
EDGES = tl.constexpr(32)  # the most columns of a row that no piece holds, as a power of two


def aligned(*steps: int) -> bool:
    """Whether rows `steps` elements apart begin on multiples of 16 bytes, if the first does."""
    return not any(step % MULTIPLE.value for step in steps)


def column_flags(width: int, size: int, *steps: int) -> dict[str, Any]:
    """Flags of a kernel whose operands have rows of `width` elements of `size` bytes (of the first), `steps` apart.

    EACH    elements of an access
    SHIFTED rows begin on no multiples of 16 bytes, but all of them alike
    RAGGED  there are edges
    """
    alike = all((step - steps[0]) * size % 16 == 0 for step in steps)
    shifted = alike and not aligned(*steps)
    return {
        "RAGGED": shifted or width % MULTIPLE.value != 0,
        "SHIFTED": shifted,
        "EACH": 16 // size,
    }


@triton.jit
def first_column(row, stride, EACH: tl.constexpr, SHIFTED: tl.constexpr):
    """-> element offset of column 0, EACH elements being 16 bytes, and how many columns are before it."""
    at, before = row_base(row, stride), 0
    if SHIFTED:
        aligned = tl.cdiv(at, EACH) * EACH
        at, before = aligned, (aligned - at).to(tl.int32)
    return at, before


@triton.jit
def whole_and_behind(n_cols, before):
    """-> columns from column 0 on that are visited in pieces, and how many are behind them: below 0 where a row ends
    before column 0.
    """
    whole = tl.maximum(n_cols - before, 0) // MULTIPLE * MULTIPLE
    return whole, n_cols - before - whole


@triton.jit
def edges(n, before, whole, behind):
    """-> columns, n counting those before column 0 and then those from column `whole` on; and which of n there are."""
    return n - before + tl.where(n < before, 0, whole), n < before + behind
