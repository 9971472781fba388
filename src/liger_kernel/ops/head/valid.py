"""Which tokens go through a head: supervised batches mask 30-80 % of their labels, and those are dropped first.

How many are left decides the sizes of what follows, so the host has to know. `valid_tokens` waits for it; `Counting`
has it sent, and the device can be given its first chunk of work meanwhile.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._ce_batch import SMALL, store_factors
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import dense, like
from liger_kernel.ops._triton import AVAILABLE, Launch, block_of, cdiv, launch, planned, tl, triton

_WORTH_DROPPING = 0.98  # gather only when fewer than this share of the tokens is valid
_BLOCK, _WARPS = 4096, 16  # of the one program that counts
_ROW = 4096  # columns of a program that copies


def valid_tokens(target: Tensor, ignore_index: int, num_valid: int | None) -> Tensor | None:
    """Positions of the tokens that count, or None for "take all of them": few are ignored, or
    nobody may wait.
    """
    n = target.numel()
    if n == 0 or _env.capturing(target.device) or (num_valid or 0) > _WORTH_DROPPING * n:
        return None
    keep = target != ignore_index
    if num_valid is not None:
        return torch.nonzero_static(keep, size=num_valid, fill_value=0).view(-1)
    kept = keep.nonzero().view(-1)  # waits for the count
    return None if kept.numel() > _WORTH_DROPPING * n else kept


def valid_tokens_later(
    target: Tensor, ignore_index: int, num_valid: int | None
) -> "Tensor | Counting | None":
    """`valid_tokens`, or `Counting` where they would have to be waited for."""
    if num_valid is None and target.numel() and not _env.capturing(target.device):
        return Counting(target, ignore_index)
    return valid_tokens(target, ignore_index, num_valid)


def without_ignored(
    hidden: Tensor, target: Tensor, ignore_index: int, factors: Tensor | None = None,
    weight: Tensor | None = None, n_classes: int = 0,
) -> Tensor:  # fmt: skip
    """hidden `[*, H]` with zeros where target `[*]` is ignored: what stands there (NaN, say) reaches no sum of tokens.

    factors `[2]`: where kernels run, memory for `_ce_batch.factors` of "mean" and these class weights, from the same
    launch.
    """
    if not (AVAILABLE and _env.triton_runs_on(hidden.device.type)):
        counts = (target != ignore_index).view(hidden.shape[:-1])
        return torch.where(counts.unsqueeze(-1), hidden, 0.0)
    x, kept = dense(hidden), like(hidden)
    run = _without(x.device, target.numel(), x.shape[-1], n_classes, ignore_index)
    run(kept, factors, x, dense(target), weight if weight is None else dense(weight))
    return kept


def positions(tokens: "Tensor | Counting | None") -> Tensor | None:
    """Of tokens found by either of these; those that are being counted are waited for."""
    return tokens.kept() if isinstance(tokens, Counting) else tokens


class Counting:
    """The tokens of target `[N]` that count, in their order, and their number on its way to the host.

    index, labels `[N]` int64: their positions and labels; behind them position 0 and `ignore_index`. count `[1]` int32.
    """

    def __init__(self, target: Tensor, ignore_index: int) -> None:
        self._n = target.numel()
        both = target.new_empty((2, self._n), dtype=torch.int64)
        self.index, self.labels = both.unbind(0)
        self.count = target.new_empty(1, dtype=torch.int32)
        args = (self.index, self.labels, self.count, dense(target), self._n, ignore_index)
        launch(_compact_kernel, (1,), target.device, *args, BLOCK=_BLOCK, num_warps=_WARPS)
        self._arrived = _sent(self.count)

    def kept(self) -> Tensor | None:
        """The positions alone, or None if every token counts. Waits for what was queued before this object."""
        count = self._arrived()
        return None if count == self._n else self.index[:count]


def _sent(value: Tensor) -> Callable[[], int]:
    """An integer on its way to the host: what is returned waits for it, and for nothing that was queued later."""
    if value.device.type == "cpu":
        return lambda: int(value)
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    with _env.on_device(value.device):  # whose stream the event must be recorded on
        host.copy_(value, non_blocking=True)
        arrived = _env.memory_module(value.device).Event()
        arrived.record()

    def wait() -> int:
        arrived.synchronize()
        return int(host)

    return wait


@planned
def _without(
    device: torch.device, tokens: int, width: int, n_classes: int, ignore_index: int
) -> Launch:
    block = min(block_of(width), _ROW)
    numbers = (width, tokens, n_classes, ignore_index)
    meta = {**SMALL, "BLOCK": block, "TOKENS": SMALL["BLOCK"]}
    return Launch(_without_kernel, (tokens, cdiv(width, block)), device, *numbers, **meta)


@triton.jit(do_not_specialize=["tokens", "n_classes", "ignore_index"])
def _without_kernel(
    KEPT, FACTORS, X, T, W, width, tokens, n_classes, ignore_index, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if FACTORS is not None:  # noqa: SIM102, a constant to the compiler
        if (row == 0) & (tl.program_id(1) == 0):
            store_factors(FACTORS, T, W, tokens, n_classes, ignore_index, TOKENS)
    counts = tl.load(T + row).to(tl.int64) != ignore_index
    at = row_base(row, width) + cols
    x = tl.load(X + at, mask=(cols < width) & counts, other=0.0)
    tl.store(KEPT + at, x, mask=cols < width)


@triton.jit(do_not_specialize=["n", "ignore_index"])
def _compact_kernel(INDEX, LABELS, COUNT, T, n, ignore_index, BLOCK: tl.constexpr):
    found = tl.full((), 0, tl.int32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        label = tl.load(T + at, mask=at < n, other=0).to(tl.int64)
        valid = (at < n) & (label != ignore_index)
        place = found + tl.cumsum(valid.to(tl.int32), axis=0) - 1
        tl.store(INDEX + place, at.to(tl.int64), mask=valid)
        tl.store(LABELS + place, label, mask=valid)
        found += tl.sum(valid.to(tl.int32), axis=0)
    tl.store(COUNT, found)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        behind = (at < n) & (at >= found)
        tl.store(INDEX + at, tl.zeros((BLOCK,), tl.int64), mask=behind)
        tl.store(LABELS + at, tl.zeros((BLOCK,), tl.int64) + ignore_index, mask=behind)
