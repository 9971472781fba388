"""Second stage of a two-stage column sum: fp32 partials `[G, D]` -> `[D]` in the parameter's
dtype, in a fixed order.
"""

import torch
from torch import Tensor

from liger_kernel.ops._device import row_base
from liger_kernel.ops._triton import Launch, cdiv, planned, tl, triton

_ROWS, _COLUMNS, _WARPS = 64, 16, 4  # measured up to 16384 columns; beyond, programs abound
_WIDE, _FEW = 16384, 4


@triton.jit
def _sum_kernel(OUT, OUT2, P, n_rows, n_cols, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    which = tl.program_id(1)
    P += row_base(which * n_rows, n_cols)
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m_cols = cols < n_cols
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & m_cols[None, :]
        total += tl.load(P + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    result = tl.sum(total, axis=0)
    tl.store(OUT + cols, result.to(OUT.dtype.element_ty), mask=m_cols & (which == 0))
    if OUT2 is not None:
        tl.store(OUT2 + cols, result.to(OUT2.dtype.element_ty), mask=m_cols & (which == 1))


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Column sums of contiguous fp32 `[G, D]` (G x D below 2^31), rounded once to `dtype`."""
    n_rows, n_cols = partials.shape
    out = partials.new_empty(n_cols, dtype=dtype)
    _sums(partials.device, n_rows, n_cols, 1)(out, None, partials)
    return out


def sum_two_partials(
    partials: Tensor, first: torch.dtype | None, second: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Two column sums in one launch, from contiguous fp32 `[2, G, D]` (G x D below 2^31).

    A sum whose dtype is None is not wanted: it is empty, and has no place in `partials`.
    """
    if first is None or second is None:
        out, out2 = (
            partials.new_empty(0) if dtype is None else sum_partials(partials[0], dtype)
            for dtype in (first, second)
        )
        return out, out2
    _, n_rows, n_cols = partials.shape
    out, out2 = partials.new_empty(n_cols, dtype=first), partials.new_empty(n_cols, dtype=second)
    _sums(partials.device, n_rows, n_cols, 2)(out, out2, partials)
    return out, out2


@planned
def _sums(device: torch.device, n_rows: int, n_cols: int, outputs: int) -> Launch:
    rows, columns = _ROWS, _COLUMNS if n_cols <= _WIDE else 8 * _COLUMNS
    if n_cols <= _FEW:  # one program: it takes as many rows at a time as it can
        rows, columns = 1024, _FEW
    meta = {"ROWS": rows, "COLUMNS": columns, "num_warps": _WARPS}
    grid = (cdiv(n_cols, columns), outputs)
    return Launch(_sum_kernel, grid, device, n_rows, n_cols, **meta)
