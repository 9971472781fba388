"""Chunks of tokens through the head: product, rows, two products back.

    z = h W^T + b        [C, V] in a reused buffer         a plain matrix product
    loss, dz             in place over the buffer          one kernel (`ops.cross_entropy.ce_rows`)
    dh = dz W            dW += dz^T h        db += sum dz  plain matrix products

A low-rank term (LoRA), z += d U^T with d `[N, r]` and U `[V, r]`, is one more narrow product each:

    z = d U^T + b first  dd = dz U           dU += dz^T d  summed in fp32

Ignored tokens are dropped before the first product: supervised batches mask 30-80 % of their
labels. The count of what is left is the one value the host waits for (`head.valid`); a hint (`num_valid`) or a
captured CUDA graph skips it.

With a head whose rows lie on several ranks (`head.shard`) the row kernel sees a slice of the columns, dW and dU stay
here; dh and dd are summed over the ranks, in fp32, under the products that make dW and dU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._op import compute_dtype, like, no_autocast, rows
from liger_kernel.ops.head.logits import Logits, accumulate, product
from liger_kernel.ops.head.params import HeadParams
from liger_kernel.ops.head.plan import Plan, plan

# Tokens whose products take as long as an accelerator takes to read the weight; and terms of a product, tokens x
# classes x width, that take less of its time than the launches of the way without logits take of a host's (2 ms).
_FEW, _QUICK = 128, 1 << 37
RowKernel = Callable[..., Any]


class Wanted(NamedTuple):
    """What a pass must produce."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    down: bool = False
    up: bool = False

    @property
    def any(self) -> bool:
        return True in self


@dataclass
class Gradients:
    """Gradients of the head's inputs; None where not wanted."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    down: Tensor | None = None
    up: Tensor | None = None

    def all(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, self.bias, self.down, self.up


def form_for(hidden: Tensor, vocab: int, budget: int) -> str:
    """How logits of 16-bit hidden `[*, H]` are kept where nobody says: few or quickly made ones in fp32, if the budget
    holds them and their gradient. They are as exact as the way without logits, which takes more launches.
    """
    tokens = hidden.shape[:-1].numel() if hidden.element_size() == 2 else 0
    few = 0 < tokens <= max(_FEW, _QUICK // max(vocab * hidden.shape[-1], 1))
    fits = 6 * vocab * tokens <= budget
    return "float32" if few and fits and _env.mixed_products(hidden.device) else "same"


def alignment(device: torch.device) -> int:
    """Elements at whose multiples rows of logits start."""
    # On a CPU unpadded: torch.mm of bf16 reads the padding there (2.13, AMX), and NaN in it spoils the product.
    return 1 if device.type == "cpu" else 64


def part(of: Tensor, start: int, stop: int, index: Tensor | None) -> Tensor:
    """The rows of a chunk, as `run` hands its place to `per_row`."""
    if index is not None:
        return of.index_select(0, index)
    return of if stop - start == of.shape[0] else of[start:stop]


def placed(values: Tensor, keep: Tensor | None, n: int, absent: float = 0) -> Tensor:
    """Values of the kept tokens at their places among all n; `absent` for the dropped ones."""
    if keep is None:
        return values
    return values.new_full((n, *values.shape[1:]), absent).index_copy_(0, keep, values)


def plan_for(hidden: Tensor, head: HeadParams, tokens: int, budget: int, dropped: bool) -> Plan:
    """The plan for `tokens` rows of hidden `[*, H]` through `head`; dropped: they are picked out of more."""
    own, width = head.weight.shape
    vocab = own if head.shard is None else head.shard.most  # the same chunks on every rank
    itemsize = hidden.element_size() + 4 * (head.logits == "float32")
    align = alignment(hidden.device)
    return plan(tokens, vocab, width, itemsize, budget, gather=dropped, align=align)


def run(
    hidden: Tensor, head: HeadParams, per_row: RowKernel, wanted: Wanted, *,
    keep: Tensor | None, budget: int, accum_dtype: torch.dtype | None, cuts: list[tuple[int, int]] | None = None,
    targets: Tensor | None = None, into: Tensor | None = None,
) -> tuple[list[Any], Gradients]:  # fmt: skip
    """Send every (kept) token of hidden `[*, H]` through the head.

    per_row(logits, start, stop, index, out) gets a chunk of logits `[C, V]`, its place among the kept tokens and, if
    tokens were dropped, their positions in the batch; out is None, or where to leave the gradient of the logits.
    cuts are the chunks' starts and stops where the caller must choose them, else the plan's. With offset logits, which
    need the `targets` `[N]`, per_row also gets what is to be added to each row.
    into `[V, H]`: dW is added to what stands there, chunk by chunk, and is not among the gradients returned.
    Returns what per_row returned for every chunk, and the gradients.
    """
    h = rows(hidden)
    cast = head.to(h.dtype)
    down, up = cast.low_rank or (None, None)
    n = h.shape[0] if keep is None else keep.numel()
    dropped, gradient = keep is not None, wanted.any
    todo = plan_for(h, head, n, budget, dropped)
    if cuts is None:
        cuts, longest = todo.slices(), min(todo.rows, n)
    else:
        longest = max((stop - start for start, stop in cuts), default=0)
    sums = Sums(h, cast, head, wanted, len(cuts), n, accum_dtype, hidden.shape, dropped, into)
    logits_of = Logits(cast.weight, cast.bias, head.logits, longest, todo.row_stride, gradient, up)
    found: list[Any] = []
    with no_autocast(h.device.type), _env.exact_products(h.device, h.dtype):
        for start, stop in cuts:
            index = None if keep is None else keep[start:stop]
            x = part(h, start, stop, index)
            y = None if targets is None else part(targets, start, stop, index)
            d = None if down is None else part(down, start, stop, index)
            logits, dz, shift = logits_of(x, y, d)
            more = () if shift is None else (shift,)
            found.append(per_row(logits, start, stop, index, dz if gradient else None, *more))
            if gradient:
                sums.add(dz, x, d, start, stop, index)
        return found, sums.finish()


class Sums:
    """The gradient buffers, filled chunk by chunk."""

    def __init__(
        self, h: Tensor, cast: HeadParams, head: HeadParams, wanted: Wanted, chunks: int, tokens: int,
        accum_dtype: torch.dtype | None, hidden_shape: torch.Size, dropped: bool, into: Tensor | None,
    ):  # fmt: skip
        self.cast, self.head, self.hidden_shape = cast, head, hidden_shape
        # One chunk is rounded once by the product itself: an accumulator would add nothing.
        wide = head.weight.dtype if accum_dtype is None or chunks == 1 else accum_dtype
        self.dh = _room(h, h.dtype, dropped) if wanted.hidden else None
        self.into = into if wanted.weight else None
        make_dw = wanted.weight and into is None
        self.dw = _room(cast.weight, wide, not tokens) if make_dw else self.into
        exact = compute_dtype(h)
        self.db = h.new_zeros(cast.weight.shape[0], dtype=exact) if wanted.bias else None
        self.dd = self.du = None
        if head.low_rank is not None and cast.low_rank is not None:
            d, u = cast.low_rank
            self.dd = _room(d, head.low_rank[0].dtype, dropped) if wanted.down else None
            self.du = _room(u, exact, not tokens) if wanted.up else None
        self.on_the_way: list[tuple[Any, Tensor, Tensor, Tensor | slice]] = []

    def add(
        self, dz: Tensor, x: Tensor, d: Tensor | None, start: int, stop: int, index: Tensor | None
    ) -> None:
        if self.on_the_way:
            self._receive()
        u = None if self.cast.low_rank is None else self.cast.low_rank[1]
        for out, factor in ((self.dh, self.cast.weight), (self.dd, u)):
            if out is None or factor is None:
                continue
            if self.cast.shard is not None:
                self._send(out, dz, factor, slice(start, stop) if index is None else index)
            elif index is None:
                accumulate(part(out, start, stop, None), dz, factor, first=True)
            else:
                out.index_copy_(0, index, product(dz, factor, out.dtype))
        self.add_weight(dz, x, start)
        if self.du is not None and d is not None:
            accumulate(self.du, dz.t(), d, first=start == 0)
        if self.db is not None:
            self.db += dz.sum(0, dtype=self.db.dtype)

    def add_weight(self, dz: Tensor, x: Tensor, start: int, columns: slice | None = None) -> None:
        """dW += dz^T x, if it is wanted; dz of these columns of the logits, or of all."""
        if self.dw is not None:
            first = start == 0 and self.into is None
            total = self.dw if columns is None else self.dw[columns]
            accumulate(total, dz.t(), x, first)

    def _send(self, out: Tensor, dz: Tensor, factor: Tensor, place: Tensor | slice) -> None:
        """Sum this slice's part of dh or dd over the group in fp32, while dW and dU are made."""
        share = product(dz, factor, compute_dtype(dz))
        group = self.cast.shard.process_group  # type: ignore[union-attr]
        work = torch.distributed.all_reduce(share, group=group, async_op=True)
        self.on_the_way.append((work, share, out, place))

    def _receive(self) -> None:
        for work, share, out, place in self.on_the_way:
            work.wait()
            out[place] = share.to(out.dtype)
        self.on_the_way.clear()

    def finish(self) -> Gradients:
        if self.on_the_way:
            self._receive()
        down, up = self.head.low_rank or (None, None)
        return Gradients(
            None if self.dh is None else _shaped(self.dh, self.hidden_shape),
            _cast(self.dw, self.head.weight) if self.into is None else None,
            _cast(self.db, self.head.bias),
            None if self.dd is None or down is None else _shaped(self.dd, down.shape),
            _cast(self.du, up),
        )


# What torch would do for nothing takes a microsecond each time.


def _room(of: Tensor, dtype: torch.dtype, zeros: bool) -> Tensor:
    """Memory for a gradient of this shape."""
    room = like(of, dtype)
    return room.zero_() if zeros else room


def _shaped(total: Tensor, shape: torch.Size) -> Tensor:
    return total if total.shape == shape else total.view(shape)


def _cast(total: Tensor | None, given: Tensor | None) -> Tensor | None:
    if total is None or given is None or total.dtype == given.dtype:
        return total
    return total.to(given.dtype)
