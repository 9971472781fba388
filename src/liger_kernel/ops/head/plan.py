"""How many tokens at a time: the memory plan of the engine.

One chunk when its logits fit the budget. Otherwise balanced chunks, never a thin tail; if the
budget asks for more than eight, up to twice the budget is taken where that brings them down to
eight, because every further chunk reads and writes the whole `[V, H]` gradient once more. A budget
that is far smaller is kept to. The plan depends on sizes alone, never on free memory, so runs
repeat.
"""

from dataclasses import dataclass

import torch

from liger_kernel import _env
from liger_kernel.ops._triton import cdiv, planned

MAX_CHUNKS = 8  # up to here bf16 accumulation of dW stays within the tolerance rule
_TILE_ROWS = 128  # rows of a matrix product's tile


@dataclass(frozen=True)
class Plan:
    """`chunks` x `rows` cover `tokens`; `row_stride` pads the vocabulary so that every row is
    aligned.
    """

    tokens: int
    rows: int
    chunks: int
    row_stride: int
    buffer_bytes: int

    def slices(self) -> list[tuple[int, int]]:
        """Start and stop of every chunk."""
        starts = range(0, self.tokens, self.rows)
        return [(s, min(s + self.rows, self.tokens)) for s in starts]

    def __str__(self) -> str:
        size = self.buffer_bytes / _env.MIB
        return f"{self.tokens} tokens in {self.chunks} chunk(s) of {self.rows}, {size:.0f} MiB"


@planned
def plan(
    tokens: int,
    vocab: int,
    hidden: int,
    itemsize: int,
    budget: int,
    gather: bool = False,
    align: int = 64,
) -> Plan:
    """The plan for `tokens` rows of `vocab` logits of `itemsize` bytes within `budget` bytes.

    align: rows start at multiples of this many elements, so that a vocabulary of 50257 keeps wide accesses.
    gather: rows are copied out of a longer batch first (ignored tokens dropped), which takes 2 *
    hidden more a row.
    """
    row_stride = padded(vocab, align)
    return chunked(tokens, row_stride, (row_stride + 2 * hidden * gather) * itemsize, budget)


@planned
def chunked(tokens: int, row_stride: int, row_bytes: int, budget: int) -> Plan:
    """The plan for `tokens` rows that take `row_bytes` each."""
    most = _whole(budget // row_bytes, _TILE_ROWS)
    chunks = max(cdiv(tokens, most), 1)
    if (
        chunks > MAX_CHUNKS
        and cdiv(tokens, _whole(2 * budget // row_bytes, _TILE_ROWS)) <= MAX_CHUNKS
    ):
        chunks = MAX_CHUNKS
    elif chunks > MAX_CHUNKS:
        most = fitting(budget // row_bytes)
        chunks = cdiv(tokens, most)
    rows = _balanced(tokens, chunks, most)
    return Plan(tokens, max(rows, 1), cdiv(tokens, max(rows, 1)), row_stride, rows * row_bytes)


def cuts_of(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """Balanced chunks of at most `most` tokens, which is what a plan's chunk holds, from start to stop."""
    chunks = cdiv(stop - start, most)
    rows = min(_balanced(stop - start, chunks, most), most) if chunks else 1
    return [(s, min(s + rows, stop)) for s in range(start, stop, rows)]


def _balanced(tokens: int, chunks: int, most: int) -> int:
    """Rows of each of so many chunks that hold `most` at most."""
    unit = next(unit for unit in (_TILE_ROWS, _TILE_ROWS // 2, 8) if most % unit == 0)
    return tokens if chunks == 1 else _round_up(cdiv(tokens, chunks), unit)


def padded(vocab: int, align: int) -> int:
    """Elements from one row of logits to the next."""
    return _round_up(vocab, align) if vocab >= align else vocab


def describe(tokens: int, vocab: int, hidden: int, dtype: str, budget: str | None) -> str:
    """The plan of the default device in words; dtype: "bf16", "fp16" or "fp32"."""
    device = _env.default_device()
    size = 4 if dtype == "fp32" else 2
    asked = float(budget) if budget is not None and budget.startswith("0.") else budget
    limit = resolve_budget(asked, device)
    todo = plan(tokens, vocab, hidden, size, limit)

    def mib(n: int) -> str:
        return f"{n * size / _env.MIB:,.0f} MiB"

    source = f"default of {_env.device_info(device).name}" if budget is None else "given"
    return "\n".join(
        (
            f"{tokens:,} tokens of width {hidden:,} into {vocab:,} classes, {dtype}",
            f"budget     {limit / _env.MIB:,.0f} MiB ({source})",
            f"chunks     {todo.chunks} of {todo.rows:,} tokens",
            f"logits     {todo.buffer_bytes / _env.MIB:,.0f} MiB at a time, of {mib(tokens * vocab)}",
            f"gradients  {mib(tokens * hidden)} for the hidden states, {mib(vocab * hidden)} for the head",
            "products   3 for a loss known in the forward pass; 4 for per-token log-probabilities, "
            'reduction="none" and fp16',
        )
    )


def resolve_budget(asked: int | float | str | None, device: torch.device) -> int:
    """Bytes from `memory_budget=`: an int or "256M" is bytes, a float in (0, 1) a share of device
    memory, None the default.
    """
    if asked is None:
        return _env.memory_budget(device)
    if isinstance(asked, str):
        return _env.parse_bytes(asked, "memory_budget")
    if isinstance(asked, float) and 0 < asked < 1:
        return int(asked * _env.device_info(device).total_memory)
    if isinstance(asked, bool) or asked <= 0 or asked != int(asked):
        raise ValueError(
            "memory_budget must be a positive number of bytes, a string such as '256M', or a float in (0, 1) for a "
            f"share of device memory; got {asked!r}."
        )
    return int(asked)


def fitting(rows: int) -> int:
    """Of so many rows whole tiles. Few rows may end with half a tile: with many chunks every further one reads and
    writes dW once more, which costs more than the other half.
    """
    return _whole(rows, _TILE_ROWS if rows >= 4 * _TILE_ROWS else _TILE_ROWS // 2)


def _whole(rows: int, unit: int) -> int:
    """Rows within the budget, whole units where it holds a tile; never fewer than 8, whatever the budget."""
    return rows // unit * unit if rows >= _TILE_ROWS else max(rows // 8 * 8, 8)


def _round_up(n: int, unit: int) -> int:
    return cdiv(n, unit) * unit
