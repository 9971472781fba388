"""How the rows of a norm are spread over programs.

Backward is persistent: a few programs an SM, each with a run of rows of its own, so that what is
summed over rows stays in registers and leaves the program once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from liger_kernel import _env
from liger_kernel.ops._schedules import SM_WARPS, TILE, Entry, Table, fits_tile, resident
from liger_kernel.ops._triton import cdiv

MAX_BLOCK = 32768  # columns of a row that forward holds in registers
WIDE_BLOCK = 8192  # columns a program visits at a time beyond that
_HELD = 8192  # values of the tiles, eight registers each, that an SM holds of rows in phases
# Block of columns -> (rows, warps) of a forward in phases, where it is not the table's: fewer warps read fewer ends.
# H200: layer_norm of 8,192 x 2,047 .0320 -> .0294 ms, of 4,095 .0676 -> .0621; rms_norm .0248 -> .0233, .0455 -> .0418.
_IN_PHASES = {2048: (4, 4), 4096: (1, 4)}
_REDUCTIONS = 4096  # bytes of shared memory a program needs beside its pipeline
_LOOP = {**TILE, "per_sm": (1, 2, 3, 4, 5, 6, 8), "stages": (1, 2, 3)}


def _fits_loop(block: int, rows: int, warps: int, per_sm: int, stages: int) -> bool:
    """As a tile, of fewer values because several operands are held; and enough warps an SM to hide latency."""
    few = rows * block // (32 * warps) <= 32
    return few and fits_tile(block, rows, warps) and 8 <= per_sm * warps <= SM_WARPS


def forward_table(name: str, entries: Mapping[int, Entry]) -> Table:
    """Block of columns -> (rows, warps), for `forward_plan`."""
    return Table(name, TILE, entries, fits_tile)


def loop_table(name: str, entries: Mapping[int, Entry]) -> Table:
    """Block of columns -> (rows, warps, programs per SM, stages), for `backward_plan`."""
    return Table(name, _LOOP, entries, _fits_loop)


def forward_plan(entry: Sequence[int], device: torch.device) -> dict[str, int]:
    """ROWS and num_warps from a `forward_table`'s entry."""
    rows, warps = entry
    return {"ROWS": rows, "num_warps": min(warps, _env.device_info(device).max_warps)}


def forward_phases_plan(
    entry: Sequence[int], n_rows: int, block: int, phases: int, device: torch.device
) -> tuple[tuple[int], dict[str, int]]:
    """Grid, and `forward_plan`, for rows in `phases` (`_row_phases`)."""
    plan = forward_plan(_IN_PHASES.get(block, entry), device)
    return (phases * cdiv(n_rows, phases * plan["ROWS"]),), plan


def backward_plan(
    entry: Entry, n_rows: int, row_bytes: int, device: torch.device, groups: int = 1,
) -> tuple[int, int, dict[str, Any]]:  # fmt: skip
    """(programs, rows of each, ROWS, STAGES and num_warps) from a `loop_table`'s entry.

    row_bytes is what one row takes of all operands that the loop loads: no more stages than shared memory holds.
    Rows that fall into `groups` of their own columns have `programs` for each group.
    """
    rows, warps, per_sm, stages = entry
    info = _env.device_info(device)
    most = max(info.sm_count * per_sm // groups, 1)
    share = cdiv(cdiv(n_rows, most), rows) * rows
    meta = {
        "ROWS": rows,
        "STAGES": pipeline(stages, rows * row_bytes, device),
        "num_warps": min(warps, info.max_warps),
    }
    return cdiv(n_rows, share), share, meta


def backward_phases_plan(
    entry: Entry, n_rows: int, block: int, phases: int, row_bytes: int, device: torch.device
) -> tuple[int, int, dict[str, Any]]:
    """`backward_plan` for rows in `phases` (`_row_phases`). As many programs as an SM's registers have room for: what
    has to wait for a place would come late.
    """
    rows, warps, per_sm, stages = entry
    per_sm = max(min(per_sm, _HELD // (rows * block)), 1)
    entry, n_rows = (rows, warps, per_sm, stages), cdiv(n_rows, phases)
    programs, share, meta = backward_plan(entry, n_rows, row_bytes, device, phases)
    return programs * phases, share, {**meta, **resident(device, meta["num_warps"], per_sm)}


def pipeline(stages: int, tile_bytes: int, device: torch.device) -> int:
    """As many of these stages, of tiles of so many bytes, as shared memory holds."""
    room = (_env.device_info(device).shared_memory - _REDUCTIONS) // tile_bytes
    return max(min(stages, room), 1)


def column_plan(n_rows: int, n_cols: int, block: int, device: torch.device) -> tuple[int, int, int]:
    """(column blocks, parts of the rows, rows of a part) for sums over the rows of wide matrices."""
    columns = cdiv(n_cols, block)
    parts = min(n_rows, max(1, 4 * _env.device_info(device).sm_count // columns))
    share = cdiv(n_rows, parts)
    return columns, cdiv(n_rows, share), share
