"""The schedule of elementwise kernels: tiles of some thousand elements over operands that are never copied
as long as their columns are adjacent, whatever their row stride.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import rows
from liger_kernel.ops._schedules import Table, card_of
from liger_kernel.ops._triton import Launch, block_of, cdiv, planned, tl, triton


def tile_table(name: str) -> Table:
    """One entry for all sizes: (elements a program handles, warps)."""
    fields = {"tile": (512, 1024, 2048, 4096, 8192), "warps": (1, 2, 4, 8, 16)}
    # 16 elements a thread: two 16-byte accesses per bf16 operand
    return Table(name, fields, {1: (2048, 4)}, _fits)


def _fits(size: int, tile: int, warps: int) -> bool:
    return 8 <= tile // (32 * warps) <= 64


_TILES = tile_table("elementwise")


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


def tiled(
    kernel: Any, table: Table = _TILES, constants: tuple[str, ...] = ()
) -> Callable[..., None]:
    """-> run(operands, scalars, values of the constants), which calls

        kernel(*operands, *their row strides, n_rows, n_cols, *scalars, *constants, ROWS, BLOCK)

    on every tile. The operands have one shape and any layout: contiguous ones count as one row, which needs no row
    arithmetic at all; others as `[R, F]` each, copied only where columns are not adjacent. Outputs must not need that.
    """

    @planned
    def plan(
        device: torch.device, itemsize: int, strides: tuple[int, ...], n_rows: int, n_cols: int,
        scalars: tuple[float, ...], values: tuple[Any, ...],
    ) -> Launch:  # fmt: skip
        size, warps = table.choose(1, itemsize, card_of(device))
        block = size if n_rows == 1 else min(block_of(n_cols), size)
        per_program = size // block
        grid = (cdiv(n_rows, per_program) * cdiv(n_cols, block),)
        meta = {**dict(zip(constants, values, strict=True)), "ROWS": per_program, "BLOCK": block}
        numbers = (*strides, n_rows, n_cols, *scalars)
        return Launch(kernel, grid, device, *numbers, **meta, num_warps=warps)

    def run(
        operands: Sequence[Tensor], scalars: tuple[float, ...] = (), values: tuple[Any, ...] = ()
    ) -> None:
        last = operands[-1]
        for operand in operands:
            if not operand.is_contiguous():
                operands = [rows(x) for x in operands]
                (n_rows, n_cols), strides = operands[-1].shape, tuple(x.stride(0) for x in operands)
                break
        else:
            n_rows, n_cols = 1, last.numel()
            strides = (n_cols,) * len(operands)
        sizes = (last.element_size(), strides, n_rows, n_cols)
        plan(last.device, *sizes, scalars, values)(*operands)

    return run
