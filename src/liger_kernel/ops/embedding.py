"""Embedding.   y[i] = w[ids[i]];   where ids[i] = padding_idx, y is zero and w gets no gradient

    ids: [*] int32 or int64   w: [V, D]   y: [*, D] in w's dtype

Backward   dw[v] = sum of dy[i] over ids[i] = v, in the order of i, in fp32, rounded once; no atomics.
A stable sort of the ids puts the places of one id side by side, a run. Runs are cut at every 64th sorted place, so that
no program adds more than 64 rows. A piece that is a whole run goes to dw at once; others leave fp32 partial sums, which
a second kernel adds, in order. The length of a run never reaches the host.

Memory  forward reads and writes each row of y once and keeps the ids. Backward reads dy once, writes zeros to dw and
        then the rows that occur; beside dw it takes 16 bytes an id and D / 8 bytes an id of partial sums.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import Cost, Op, dense, first_order, named, observed, require, rows
from liger_kernel.ops._triton import block_of, cdiv, launch, tl, triton

_ROWS, _COLUMNS = 4, 1024  # a program of the forward: four 16-byte accesses a thread in 16 bit
_PIECE = 64  # sorted places after which a run is cut
_SUM_COLUMNS = 2048
_JOIN_ROWS, _JOIN_COLUMNS = 8, 512
_WARPS = 4

# 1 reference


def reference(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """The definition."""
    y = torch.nn.functional.embedding(ids, weight)
    if padding_idx is None:
        return y
    return y.masked_fill((ids == padding_idx % weight.shape[0]).unsqueeze(-1), 0.0)


# 2 kernels


@triton.jit(do_not_specialize=["n_ids", "padding"])
def _forward_kernel(
    Y, IDS, W, sW_row, n_ids, n_cols, n_words, padding, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    pid = tl.program_id(0)
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (pid // blocks) * ROWS + tl.arange(0, ROWS)
    col = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    m_row, m_col = row < n_ids, col < n_cols
    ids = tl.load(IDS + row, mask=m_row, other=0)
    known = (ids >= 0) & (ids < n_words)
    mask = (m_row & known & (ids != padding))[:, None] & m_col[None, :]
    w = tl.load(W + row_base(ids, sW_row)[:, None] + col[None, :], mask=mask, other=0.0)
    y = tl.where(known[:, None], w.to(tl.float32), float("nan"))
    at = Y + row_base(row, n_cols)[:, None] + col[None, :]
    tl.store(at, y.to(Y.dtype.element_ty), mask=m_row[:, None] & m_col[None, :])


@triton.jit(do_not_specialize=["n_ids", "padding"])
def _sum_kernel(
    DW, PARTIALS, DY, sDY_row, KEYS, ORDER, n_ids, n_cols, n_words, padding, PIECE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program for every sorted place; those at which no piece begins return at once."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(n_cols, BLOCK)
    place = pid // blocks
    piece = place // PIECE
    key = tl.load(KEYS + place)
    before = tl.load(KEYS + place - 1, mask=place > 0, other=-1)
    if (key < 0) | (key >= n_words) | (key == padding) | ((place > piece * PIECE) & (before == key)):  # fmt: skip
        return
    near = piece * PIECE + tl.arange(0, PIECE)
    same = tl.load(KEYS + near, mask=near < n_ids, other=-1) == key
    end = place + tl.sum(same.to(tl.int32))
    col = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    m_col = col < n_cols
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(place, end):
        dy = tl.load(DY + row_base(tl.load(ORDER + i), sDY_row) + col, mask=m_col, other=0.0)
        total += dy.to(tl.float32)
    after = tl.load(KEYS + end, mask=end < n_ids, other=-1)
    if (before == key) | (after == key):
        part = 2 * piece + (before != key).to(tl.int32)
        tl.store(PARTIALS + row_base(part, n_cols) + col, total, mask=m_col)
    else:
        tl.store(DW + row_base(key, n_cols) + col, total.to(DW.dtype.element_ty), mask=m_col)


@triton.jit(do_not_specialize=["n_ids", "padding"])
def _join_kernel(
    DW, PARTIALS, KEYS, n_ids, n_cols, n_words, padding, PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program for every cut but the last; those that are not the first cut of their run return at once."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(n_cols, BLOCK)
    piece = pid // blocks
    key = tl.load(KEYS + piece * PIECE + (PIECE - 1))
    after = tl.load(KEYS + piece * PIECE + PIECE)
    before = tl.load(KEYS + piece * PIECE - 1, mask=piece > 0, other=-1)
    if (key < 0) | (key >= n_words) | (key == padding) | (key != after) | (before == key):
        return
    col = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    m_col = col < n_cols
    total = tl.load(PARTIALS + row_base(2 * piece + 1, n_cols) + col, mask=m_col, other=0.0)
    pieces = tl.cdiv(n_ids, PIECE)
    start = piece + 1
    while start < pieces:
        near = start + tl.arange(0, ROWS)
        mine = tl.load(KEYS + near * PIECE, mask=near < pieces, other=-1) == key
        at = PARTIALS + row_base(2 * near, n_cols)[:, None] + col[None, :]
        total += tl.sum(tl.load(at, mask=mine[:, None] & m_col[None, :], other=0.0), axis=0)
        start = tl.where(tl.sum(mine.to(tl.int32)) == ROWS, start + ROWS, pieces)
    tl.store(DW + row_base(key, n_cols) + col, total.to(DW.dtype.element_ty), mask=m_col)


# 3 launch


def _fake_forward(ids: Tensor, weight: Tensor, padding: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@named("(Tensor ids, Tensor weight, int padding) -> Tensor", _fake_forward)
def embedding_forward_kernel(ids: Tensor, weight: Tensor, padding: int) -> Tensor:
    """-> y, contiguous. padding: an id, or -1. NaN where an id is no row of weight."""
    w, ids = rows(weight), dense(ids)
    n_words, n_cols = w.shape
    y = torch.empty((*ids.shape, n_cols), dtype=w.dtype, device=w.device)
    block = min(block_of(n_cols), _COLUMNS)
    per_program = _ROWS * _COLUMNS // block
    grid = (cdiv(ids.numel(), per_program) * cdiv(n_cols, block),)
    scalars = (ids.numel(), n_cols, n_words, padding)
    meta = {"ROWS": per_program, "BLOCK": block, "num_warps": _WARPS}
    launch(_forward_kernel, grid, w.device, y, ids, w, w.stride(0), *scalars, **meta)
    return y


def _fake_backward(dy: Tensor, ids: Tensor, n_words: int, padding: int) -> Tensor:
    return dy.new_empty((n_words, dy.shape[-1]))


@named("(Tensor dy, Tensor ids, int n_words, int padding) -> Tensor", _fake_backward)
def embedding_backward_kernel(dy: Tensor, ids: Tensor, n_words: int, padding: int) -> Tensor:
    """-> dw [n_words, D] in dy's dtype; zero where no id points, and at `padding`."""
    d = rows(dy)
    n_ids, n_cols = d.shape
    dw = d.new_zeros((n_words, n_cols))
    keys, order = torch.sort(ids.reshape(-1).to(torch.int32), stable=True)
    pieces = cdiv(n_ids, _PIECE)
    partials = d.new_empty((2 * pieces if pieces > 1 else 0, n_cols), dtype=torch.float32)
    scalars = (n_ids, n_cols, n_words, padding)
    block = min(block_of(n_cols), _SUM_COLUMNS)
    grid = (n_ids * cdiv(n_cols, block),)
    meta = {"PIECE": _PIECE, "BLOCK": block, "num_warps": _WARPS}
    operands = (dw, partials, d, d.stride(0), keys, order)
    launch(_sum_kernel, grid, d.device, *operands, *scalars, **meta)
    block = min(block, _JOIN_COLUMNS)
    grid = (max(pieces - 1, 0) * cdiv(n_cols, block),)
    meta |= {"ROWS": _JOIN_ROWS, "BLOCK": block}
    launch(_join_kernel, grid, d.device, dw, partials, keys, *scalars, **meta)
    return dw


# 4 op


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        padding = -1 if padding_idx is None else padding_idx
        ctx.save_for_backward(ids)
        ctx.of_weight = weight.shape[0], padding
        return embedding_forward_kernel(ids, weight, padding)

    @staticmethod
    @first_order("embedding")
    def backward(ctx: Any, dy: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        return None, embedding_backward_kernel(dy, ids, *ctx.of_weight), None


def supports(ids: Tensor, weight: Tensor, *_: Any) -> str | None:
    """Every size below 2^31 rows, every layout, on one device."""
    if ids.device != weight.device:
        return f"ids are on {ids.device}, weight on {weight.device}"
    return "weight has 2^31 rows or more" if weight.shape[0] >= 1 << 31 else None


def cost(ids: Tensor, weight: Tensor, *_: Any) -> Cost:
    """A row in and out for every id; then dy in and all of dw out."""
    y = ids.numel() * weight.shape[1] * weight.element_size()
    seen = ids.numel() * ids.element_size()
    whole = weight.numel() * weight.element_size()
    return Cost(forward_bytes=2 * y + seen, backward_bytes=y + whole + seen, saved=0)


OP = Op("embedding", reference, reference, _Embedding.apply, supports, cost)

# 5 public


def embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, impl: str | None = None
) -> Tensor:
    """Rows of a table.

    Args:
        ids: `[*]` of any rank, int32 or int64.
        weight: `[V, D]`, any strides; fp16, bf16, fp32 (fp64 on the torch path).
        padding_idx: an id whose rows come out as zeros (torch returns the table's row) and give no
            gradient; negative counts from the end.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, D]` in weight's dtype, contiguous. The gradient of weight is dense, the same bits on every run.
    Memory:
        Keeps ids for backward.
    Raises:
        ValueError: ids of another dtype, a weight that is no matrix, a padding_idx outside of it.
        IndexError: on a CPU, an id outside [0, V); on an accelerator its row becomes NaN
            (LIGER_KERNEL_VALIDATE=1 raises there too).
    """
    require(weight.dim() == 2, f"embedding: weight must be [V, D]; got shape {list(weight.shape)}.")
    n_words = weight.shape[0]
    _check_ids(ids, n_words)
    if padding_idx is not None:
        require(
            -n_words <= padding_idx < n_words,
            f"embedding: padding_idx must lie within the {n_words} rows of weight; got {padding_idx}.",
        )
        padding_idx %= n_words
    return OP(ids, weight, padding_idx, impl=impl)


def _check_ids(ids: Tensor, n_words: int) -> None:
    """Looks at the ids only where that costs no synchronisation, or where one is asked for."""
    require(
        ids.dtype in (torch.int64, torch.int32),
        f"embedding: ids must be int64 or int32; got {ids.dtype}.",
    )
    if observed() or not (ids.device.type == "cpu" or _env.validate_labels()):
        return
    if _env.capturing(ids.device):
        return
    flat = ids.reshape(-1)
    bad = (flat < 0) | (flat >= n_words)
    if bad.any():
        position = int(bad.nonzero()[0])
        raise IndexError(
            f"embedding: ids.flatten()[{position}] is {int(flat[position])}; weight has {n_words} rows."
        )


class LigerEmbeddingFunction:
    """`apply(embeddings, indices)` is `embedding(indices, embeddings)`."""

    @staticmethod
    def apply(embeddings: Tensor, indices: Tensor) -> Tensor:
        return embedding(indices, embeddings)
