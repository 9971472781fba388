"""The schedule of elementwise kernels: tiles of 2,048 elements over operands that are never copied
as long as their columns are adjacent, whatever their row stride.
"""

from typing import Any

from torch import Tensor

from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import rows
from liger_kernel.ops._triton import block_of, cdiv, launch, tl, triton

_TILE = 2048  # elements a program handles: 16 a thread, two 16-byte accesses per bf16 operand
_WARPS = 4


@triton.jit
def tile(n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's rows, first column (64-bit: a flat operand is one row), columns from there, and mask."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (pid // blocks) * ROWS + tl.arange(0, ROWS)
    start = row_base(pid % blocks, BLOCK)
    cols = tl.arange(0, BLOCK)
    return row, start, cols, (row < n_rows)[:, None] & (cols < n_cols - start)[None, :]


@triton.jit
def at(P, row, stride, start, cols):
    """Addresses of a tile of P."""
    return P + start + row_base(row, stride)[:, None] + cols[None, :]


def matrices(*operands: Tensor) -> list[Tensor]:
    """Contiguous operands as one row, which needs no row arithmetic at all; else `[R, F]` each, columns adjacent."""
    if all(x.is_contiguous() for x in operands):
        return [x.view(1, -1) for x in operands]
    return [rows(x) for x in operands]


def launch_tiles(
    kernel: Any, operands: list[Tensor], scalars: tuple[float, ...] = (), **flags: Any
) -> None:
    """Run kernel(operand, its row stride, ..., n_rows, n_cols, *scalars, **flags, ROWS, BLOCK) on every tile."""
    n_rows, n_cols = operands[-1].shape
    block = _TILE if n_rows == 1 else min(block_of(n_cols), _TILE)
    per_program = _TILE // block
    grid = (cdiv(n_rows, per_program) * cdiv(n_cols, block),)
    args = [arg for x in operands for arg in (x, x.stride(0))]
    meta = {"ROWS": per_program, "BLOCK": block, "num_warps": _WARPS}
    launch(kernel, grid, operands[-1].device, *args, n_rows, n_cols, *scalars, **flags, **meta)
