"""Second stage of a two-stage column sum: fp32 partials `[G, D]` -> `[D]` in the parameter's
dtype, in a fixed order.
"""

import torch
from torch import Tensor

from liger_kernel.ops._triton import cdiv, launch, tl, triton

_ROWS, _COLUMNS, _WARPS = 64, 16, 4  # measured up to 16384 columns; beyond, programs abound
_WIDE = 16384


@triton.jit
def _sum_kernel(OUT, P, n_rows, n_cols, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m_cols = cols < n_cols
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & m_cols[None, :]
        total += tl.load(P + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(OUT + cols, tl.sum(total, axis=0).to(OUT.dtype.element_ty), mask=m_cols)


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Column sums of contiguous fp32 `[G, D]` (G x D below 2^31), rounded once to `dtype`."""
    n_rows, n_cols = partials.shape
    out = torch.empty(n_cols, dtype=dtype, device=partials.device)
    columns = _COLUMNS if n_cols <= _WIDE else 8 * _COLUMNS
    meta = {"ROWS": _ROWS, "COLUMNS": columns, "num_warps": _WARPS}
    grid = (cdiv(n_cols, columns),)
    launch(_sum_kernel, grid, partials.device, out, partials, n_rows, n_cols, **meta)
    return out
