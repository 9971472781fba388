"""Routing of a mixture of experts: a stable counting sort of (token, slot) pairs by expert, on the device.

A pair t * K + k says that token t sends a copy of itself to expert `index[t, k]`; a copy is a row of everything
between the gather and the combination. Rows stand in the order of their experts, equal experts in the order of their
pairs. An index outside [0, E) belongs to nobody (expert parallelism marks pairs of other ranks so) and makes no row.

Three launches: count pairs per (block, expert); scan the counts over blocks; place every pair and describe the tiles.
No atomics and no look from the host: buffers are sized for the worst case, and the number of tiles stays on the device.
Moved: index twice, four bytes a pair for each result, and the counts, 4 E bytes for every 256 pairs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernel.ops._op import dense, named
from liger_kernel.ops._triton import block_of, cdiv, launch, tl, triton

_PAIRS = 256  # a program counts, or ranks against each other and places
_OTHERS = 32  # against which it ranks them at a time
_COLUMNS, _SCAN = 16, 256  # experts a program scans, blocks at a time
_TILES = 16  # a program describes

# 1 kernels


@triton.jit
def _count_kernel(COUNTS, INDEX, n_pairs, n_experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(INDEX + pair, mask=pair < n_pairs, other=-1)
    m_kept = (expert >= 0) & (expert < n_experts)
    counts = tl.histogram(tl.where(m_kept, expert.to(tl.int32), n_experts), EXPERTS)
    cols = tl.arange(0, EXPERTS)
    tl.store(COUNTS + block * n_experts + cols, counts, mask=cols < n_experts)


@triton.jit
def _scan_kernel(COUNTS, TOTALS, n_blocks, n_experts, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Counts become the number of pairs in earlier blocks."""
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m_cols = cols < n_experts
    before = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, n_blocks, BLOCKS):
        rows = first + tl.arange(0, BLOCKS)
        mask = (rows < n_blocks)[:, None] & m_cols[None, :]
        at = COUNTS + rows[:, None] * n_experts + cols[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        before += tl.sum(counts, axis=0)
    tl.store(TOTALS + cols, before, mask=m_cols)


@triton.jit
def _describe(
    OFFSETS, TILES, N_TILES, first_tile, totals, ends, n_experts,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """MANY tiles from `first_tile` on; with the first one, each expert's first row and the number of tiles."""
    cols, starts = tl.arange(0, EXPERTS), ends - totals
    tiles = (totals + (ROWS - 1)) // ROWS
    tile_ends = tl.cumsum(tiles, axis=0)
    n_tiles = tl.sum(tiles, axis=0)
    if first_tile == 0:
        tl.store(N_TILES, n_tiles)
        tl.store(OFFSETS + cols, starts, mask=cols < n_experts)
        tl.store(OFFSETS + n_experts, tl.sum(totals, axis=0))
    tile = first_tile + tl.arange(0, MANY)
    mine = (tile_ends - tiles)[None, :] <= tile[:, None]
    mine = mine & (tile[:, None] < tile_ends[None, :])
    expert = tl.sum(tl.where(mine, cols[None, :], 0), axis=1)
    shift = tl.sum(tl.where(mine, (starts - (tile_ends - tiles) * ROWS)[None, :], 0), axis=1)
    end = tl.sum(tl.where(mine, ends[None, :], 0), axis=1)
    mask = tile < n_tiles
    tl.store(TILES + tile * 3, expert, mask=mask)
    tl.store(TILES + tile * 3 + 1, tile * ROWS + shift, mask=mask)
    tl.store(TILES + tile * 3 + 2, end, mask=mask)


@triton.jit
def _place(
    PAIR, TOKEN, POSITION, INDEX, COUNTS, block, starts, n_pairs, n_experts, top_k,
    PAIRS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """A row for every pair of a block, and what it holds. `starts`: each expert's first row."""
    lane, first = tl.arange(0, PAIRS), block * PAIRS
    pair = first + lane
    m_pair = pair < n_pairs
    expert = tl.load(INDEX + pair, mask=m_pair, other=-1)
    m_kept = (expert >= 0) & (expert < n_experts)
    earlier = tl.zeros((PAIRS, OTHERS), tl.int32)
    for start in range(0, PAIRS, OTHERS):
        others = start + tl.arange(0, OTHERS)
        other = tl.load(INDEX + first + others, mask=first + others < n_pairs, other=-1)
        same = other[None, :] == expert[:, None]
        earlier += (same & (others[None, :] < lane[:, None])).to(tl.int32)
    expert = tl.where(m_kept, expert, 0).to(tl.int32)
    row = tl.sum(earlier, axis=1) + tl.gather(starts, expert, 0)
    row += tl.load(COUNTS + block * n_experts + expert, mask=m_kept, other=0)
    tl.store(POSITION + pair, tl.where(m_kept, row, -1), mask=m_pair)
    tl.store(PAIR + row, pair, mask=m_kept)
    tl.store(TOKEN + row, pair // top_k, mask=m_kept)


@triton.jit
def _place_kernel(
    PAIR, TOKEN, POSITION, OFFSETS, TILES, N_TILES, INDEX, COUNTS, TOTALS, n_pairs, n_experts, top_k, n_blocks,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, MANY: tl.constexpr, PAIRS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """The first `n_blocks` programs place pairs, the others describe tiles."""
    cols = tl.arange(0, EXPERTS)
    totals = tl.load(TOTALS + cols, mask=cols < n_experts, other=0)
    ends = tl.cumsum(totals, axis=0)
    block = tl.program_id(0)
    if block < n_blocks:
        starts = ends - totals
        _place(
            PAIR, TOKEN, POSITION, INDEX, COUNTS, block, starts, n_pairs, n_experts, top_k, PAIRS, OTHERS,
        )  # fmt: skip
    else:
        tile = (block - n_blocks) * MANY
        _describe(OFFSETS, TILES, N_TILES, tile, totals, ends, n_experts, ROWS, EXPERTS, MANY)


# 2 launch


class Routing(NamedTuple):
    """int32 tensors, S = T * K pairs, M tiles at most; rows from `offsets[E]` on do not exist and hold nothing."""

    pair: Tensor  # [S] the pair of each row
    token: Tensor  # [S] the token of each row
    position: Tensor  # [S] the row of each pair, -1 for none
    totals: Tensor  # [E] rows of each expert
    offsets: Tensor  # [E + 1] first row of each expert; at the end the number of rows
    tiles: Tensor  # [M, 3] expert, first row and end of rows; tiles from n_tiles on hold nothing
    n_tiles: Tensor  # [1]


def most_tiles(pairs: int, n_experts: int, rows: int) -> int:
    """Each expert can leave one tile unfilled."""
    return pairs // rows + n_experts


def _fake(index: Tensor, n_experts: int, rows: int) -> tuple[Tensor, ...]:
    pairs = index.numel()
    shapes = ((pairs,), (pairs,), (pairs,), (n_experts,), (n_experts + 1,))
    tiles = (most_tiles(pairs, n_experts, rows), 3)
    return tuple(index.new_empty(shape, dtype=torch.int32) for shape in (*shapes, tiles, (1,)))


@named("(Tensor index, int n_experts, int rows) -> " + f"({', '.join(['Tensor'] * 7)})", _fake)
def moe_routing(index: Tensor, n_experts: int, rows: int) -> tuple[Tensor, ...]:
    """index `[T, K]`, tiles of `rows` rows -> the tensors of a `Routing`."""
    pairs, device = index.numel(), index.device
    pair, token, position, totals, offsets, tiles, n_tiles = _fake(index, n_experts, rows)
    blocks = max(cdiv(pairs, _PAIRS), 1)
    counts = torch.empty((blocks, n_experts), dtype=torch.int32, device=device)
    index = dense(index)
    known = (pairs, n_experts)
    experts = block_of(n_experts + 1)
    meta = {"PAIRS": _PAIRS, "EXPERTS": experts, "num_warps": 4}
    launch(_count_kernel, (blocks,), device, counts, index, *known, **meta)
    meta = {"BLOCKS": _SCAN, "COLUMNS": _COLUMNS, "num_warps": 8}
    grid = (cdiv(n_experts, _COLUMNS),)
    launch(_scan_kernel, grid, device, counts, totals, blocks, n_experts, **meta)
    meta = {"ROWS": rows, "EXPERTS": experts, "MANY": _TILES, "PAIRS": _PAIRS, "OTHERS": _OTHERS}
    grid = (blocks + cdiv(tiles.shape[0], _TILES),)
    outputs = (pair, token, position, offsets, tiles, n_tiles)
    inputs = (index, counts, totals)
    scalars = (*known, index.shape[-1], blocks)
    launch(_place_kernel, grid, device, *outputs, *inputs, *scalars, **meta, num_warps=8)
    return pair, token, position, totals, offsets, tiles, n_tiles
