"""Any loss on log-probabilities, in one pass over the vocabulary head: three matrix products.

A loss is local when it is a sum over tokens, or over groups of tokens (a sequence, a pair of sequences), of something
that depends on the log-probabilities and entropies of that token or group alone. Then a chunk of whole groups is enough
to know its derivatives, and the gradient of the head can be made while the chunk's logits are there:

    z = h W^T + b            statistics of its rows        the product and one read
    loss, a, b               objective(logp, entropy) and its derivatives, by autograd on `[C]` vectors
    dz                       in place over z               one read and one write
    dh = dz W, dW += dz^T h, db                            the products

A group that does not fit the memory budget takes four products: log-probabilities of everything first
(`linear_logprob`), then the objective once, then the logits again. Ignored tokens are dropped either way.

Memory  As `fused_linear_cross_entropy`: the gradients from forward to backward, one chunk of logits meanwhile. A
        quantised weight is dense during the pass alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._logp_kernels import LogpStats
from liger_kernel.ops._op import compute_dtype, first_order, require
from liger_kernel.ops._scale import scale_
from liger_kernel.ops.head import exponentials
from liger_kernel.ops.head.engine import Gradients, Wanted, part, plan_for, run
from liger_kernel.ops.head.logits import DTYPES, form_of
from liger_kernel.ops.head.module import takes_module
from liger_kernel.ops.head.params import HeadParams, check_head
from liger_kernel.ops.head.plan import resolve_budget
from liger_kernel.ops.head.rows import RowMath
from liger_kernel.ops.head.shard import local_head
from liger_kernel.ops.head.valid import Counting, valid_tokens_later
from liger_kernel.ops.linear_logprob import OP, linear_logprob


@dataclass
class Tokens:
    """What an objective sees: one chunk of the tokens that count.

    logp       `[C]` fp32 log-probabilities of the targets, part of the graph when gradients are wanted
    entropy    `[C]` fp32 likewise, None unless asked for
    index      `[C]` int64 positions in the flattened batch
    groups     half-open range of the groups that lie in this chunk, each of them whole; a group without tokens too
    lse        `[C]` fp32 log of the sum of the exponentials of the logits, None unless asked for
    mean_logp  `[C]` fp32 mean log-probability of all classes, None unless asked for
    argmax     `[C]` int64 most likely class, the lowest on ties; None unless asked for
    """

    logp: Tensor
    entropy: Tensor | None
    index: Tensor
    groups: tuple[int, int]
    lse: Tensor | None = None
    mean_logp: Tensor | None = None
    argmax: Tensor | None = None


Objective = Callable[[Tokens], tuple[Tensor, Any]]


@dataclass(frozen=True)
class _Order:
    """Which tokens go through the head, in which order (None: all, as they come), cut where."""

    keep: Tensor | Counting | None
    cuts: list[tuple[int, int]] | None = None  # None: anywhere
    groups: Sequence[tuple[int, int]] = ()

    def groups_of(self, start: int, stop: int) -> tuple[int, int]:
        """The first group of a chunk and the one behind its last; (0, 0) without groups."""
        return self.groups[self.cuts.index((start, stop))] if self.cuts and self.groups else (0, 0)


def _order(
    hidden: Tensor, head: HeadParams, labels: Tensor, ignore_index: int, group: Tensor | None, n_groups: int,
    sizes: Sequence[int] | None, budget: int, later: bool,
) -> _Order | None:  # fmt: skip
    """The kept tokens group by group, in chunks of whole groups; None if a group is larger than a chunk may be.
    later: without groups they may still be counted when their first chunk begins.
    """
    if later and group is None and sizes is None:
        return _Order(valid_tokens_later(labels, ignore_index, None))
    valid = labels != ignore_index
    n = int(valid.sum()) if sizes is None else sum(sizes)  # waits for the count, unless it is known
    every = group is None and n == labels.numel()
    keep = None if every else torch.nonzero_static(valid, size=n).view(-1)
    if group is None:
        return _Order(keep)
    most = plan_for(hidden, head, n, budget, dropped=True).rows
    assert keep is not None
    of_kept = group.reshape(-1)[keep]
    order = of_kept.argsort(stable=True)
    if sizes is None:
        sizes = torch.bincount(of_kept, minlength=n_groups).tolist()
    if max(sizes, default=0) > most:
        return None
    cuts, groups, start, first, filled = [], [], 0, 0, 0
    for g, size in enumerate(sizes):
        if filled + size > most:
            cuts.append((start, start + filled))
            groups.append((first, g))
            start, first, filled = start + filled, g, 0
        filled += size
    cuts.append((start, start + filled))
    groups.append((first, len(sizes)))
    return _Order(keep[order], cuts, groups)


@dataclass(frozen=True)
class _Call:
    """Everything a pass needs beside its tensors and their order."""

    objective: Objective
    n_groups: int
    asked: frozenset[str]  # optional fields of Tokens
    ignore_index: int
    accum_dtype: torch.dtype | None
    budget: int
    kernels: bool
    dense: bool


def _one_pass(
    hidden: Tensor, head: HeadParams, targets: Tensor, order: _Order, call: _Call, wanted: Wanted
) -> tuple[Tensor, list[Any], Gradients]:
    """Loss, extras and gradients in three products."""
    labels = targets.reshape(-1)
    way = {
        "keep": order.keep, "budget": call.budget, "accum_dtype": call.accum_dtype, "cuts": order.cuts,
        "targets": labels,
    }  # fmt: skip

    if _without_logits(hidden, head, call):

        def per_token(
            known: exponentials.Targets, start: int, stop: int, index: Tensor | None
        ) -> Any:
            leaves = {"logp": known.logp}
            index = _positions(labels, start, stop, index)
            loss, extras = _share(
                call, leaves, None, index, order.groups_of(start, stop), wanted.any
            )
            return (loss.detach(), extras), _derivatives(loss, leaves)["logp"]

        ignored = call.ignore_index
        found, grads = exponentials.run(
            hidden, head, per_token, wanted, ignore_index=ignored, **way
        )
    else:
        math = RowMath.of(head, call.ignore_index, call.kernels)

        def per_row(
            logits: Tensor, start: int, stop: int, index: Tensor | None, out: Tensor | None, shift: Tensor | None = None
        ) -> Any:  # fmt: skip
            y, asked = part(labels, start, stop, index), call.asked
            index = _positions(labels, start, stop, index)
            want = {
                "entropy": "entropy" in asked,
                "argmax": "argmax" in asked,
                "gaps": "mean_logp" in asked,
            }
            stats = math.stats(logits, y, shift, **want)
            leaves = _leaves(stats, asked, head.vocab)
            argmax = stats.argmax if "argmax" in asked else None
            loss, extras = _share(
                call, leaves, argmax, index, order.groups_of(start, stop), out is not None
            )
            if out is not None:
                factors = _coefficients(_derivatives(loss, leaves), head.vocab)
                math.gradient(out, logits, y, stats, *factors, shift)
            return loss.detach(), extras

        found, grads = run(hidden, head, per_row, wanted, **way)
    total = torch.stack([loss for loss, _ in found]).sum() if found else _nothing(hidden, call)
    return total, [extras for _, extras in found], grads


def _without_logits(hidden: Tensor, head: HeadParams, call: _Call) -> bool:
    return not call.asked and exponentials.apply_to(hidden, head, call.kernels)


def _positions(labels: Tensor, start: int, stop: int, index: Tensor | None) -> Tensor:
    """Those of a chunk's tokens in the batch."""
    return torch.arange(start, stop, device=labels.device) if index is None else index


def _leaves(stats: LogpStats, asked: frozenset[str], vocab: int) -> dict[str, Tensor]:
    """What a loss may be differentiated by."""
    found = {"logp": stats.logp.detach()}
    if "entropy" in asked:
        found["entropy"] = stats.entropy.detach()
    if "lse" in asked:
        found["lse"] = stats.lse
    if "mean_logp" in asked:
        found["mean_logp"] = stats.gaps / vocab - stats.log_total
    return found


def _share(
    call: _Call, leaves: dict[str, Tensor], argmax: Tensor | None, index: Tensor, groups: tuple[int, int], train: bool,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The objective of a chunk's tokens, in the graph of the leaves if train."""
    with torch.set_grad_enabled(train):
        for leaf in leaves.values():
            leaf.requires_grad_(train)
        some = leaves.get("entropy"), index, groups, leaves.get("lse"), leaves.get("mean_logp")
        return call.objective(Tokens(leaves["logp"], *some, argmax))


def _derivatives(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """dloss by name, by autograd on `[C]` vectors: that of logp always, zeros where the loss does not depend on it."""
    grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = dict(zip(leaves, grads, strict=True))
    if found["logp"] is None:
        found["logp"] = torch.zeros_like(leaves["logp"])
    return found


def _coefficients(
    d: dict[str, Tensor | None], vocab: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """a, c, b, d of `_logp_kernels` from the loss's derivatives."""
    a, lse, mean = d["logp"], d.get("lse"), d.get("mean_logp")
    assert a is not None
    c = a if lse is None else a - lse
    return (
        a,
        c if mean is None else c + mean,
        d.get("entropy"),
        None if mean is None else mean / vocab,
    )


def _nothing(hidden: Tensor, call: _Call) -> Tensor:
    """The loss of no tokens at all."""
    empty = hidden.new_empty(0, dtype=compute_dtype(hidden))
    index = torch.empty(0, dtype=torch.int64, device=hidden.device)
    optional = {name: index if name == "argmax" else empty for name in call.asked}
    tokens = Tokens(empty, optional.pop("entropy", None), index, (0, call.n_groups), **optional)
    return call.objective(tokens)[0].detach()


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Any, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
        head: HeadParams, targets: Tensor, order: _Order, call: _Call, train: bool, extras: list[Any],
    ) -> Tensor:  # fmt: skip
        ctx.needed = tuple(needed and train for needed in ctx.needs_input_grad[:5])
        loss, seen, grads = _one_pass(hidden, head, targets, order, call, Wanted(*ctx.needed))
        extras += seen
        ctx.ready = grads.all()
        kept = weight if isinstance(weight, Tensor) else None
        ctx.save_for_backward(hidden, kept, bias, down, up, targets)
        ctx.head, ctx.order, ctx.call = head, order, call
        return loss

    @staticmethod
    @first_order("fused_linear_objective")
    def backward(ctx: Any, dloss: Tensor) -> Any:
        ready, ctx.ready = ctx.ready, None
        if (
            ready is None
        ):  # a second backward makes the gradients again: the first has given them away
            hidden, *_, targets = ctx.saved_tensors
            wanted = Wanted(*ctx.needed)
            _, _, grads = _one_pass(hidden, ctx.head, targets, ctx.order, ctx.call, wanted)
            ready = grads.all()
        scaled = [None if g is None else scale_(g, dloss.to(g.dtype)) for g in ready]
        return *scaled, *(None,) * 6


@takes_module("hidden")
def fused_linear_objective(
    hidden: Tensor, weight: Any, targets: Tensor, objective: Objective, *, bias: Tensor | None = None,
    group: Tensor | None = None, n_groups: int = 0, entropy: bool = False, lse: bool = False, mean_logp: bool = False,
    argmax: bool = False, ignore_index: int = -100, temperature: float = 1.0, softcap: float | None = None,
    pre_scale: float = 1.0, post_scale: float = 1.0, accum_dtype: torch.dtype | None = None,
    memory_budget: int | float | str | None = None, process_group: Any = None, logits_dtype: Any = None,
    dense: bool = False, group_sizes: Sequence[int] | None = None, impl: str | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, list[Any]]:  # fmt: skip
    """A loss of your own on the log-probabilities of a linear head, without the logits.

    Args:
        hidden: `[*, H]`; fp16, bf16, fp32 (fp64 on the torch path).
        weight: `[V, H]`, or the head as a module. targets: `[*]`, `ignore_index` where there is none. bias: `[V]` or
            None. low_rank: as in `linear_logprob`.
        objective: called once for each chunk with `Tokens`; returns that chunk's share of the loss (a scalar; the total
            is the sum) and anything else worth keeping. It must use nothing of tokens in other chunks, and divide by
            denominators known beforehand.
        group: int64 `[*]`, the group of each token, in [0, n_groups); None if the objective is local to tokens.
        entropy, lse, mean_logp, argmax: also give the objective these fields of `Tokens`. Losses that use lse or
            mean_logp exist in one pass only: not for fp16, not under torch.compile, no group larger than a chunk.
        temperature, softcap, pre_scale, post_scale: as in `linear_logprob`.
        accum_dtype, memory_budget, impl: as in `fused_linear_cross_entropy`.
        process_group, logits_dtype: as `linear_logprob`'s group and logits_dtype.
        dense: under torch.compile the objective gets ignored tokens as well, with 0 in logp and entropy and -1 in
            argmax: set it if they add nothing. No shape then depends on the labels, and nothing waits for their count.
        group_sizes: the exact number of valid tokens of each group (without groups: of all tokens, in one element) if
            the host knows them: it then waits for nothing.
    Returns:
        The loss, fp32, differentiable in hidden, weight, bias and low_rank; and what the objective returned beside it,
        a list in the order of the groups.
    Memory:
        The gradients from forward to backward. See the module.
    Raises:
        ValueError: shapes that do not fit, an empty or flat (sharded) weight. IndexError: a target out of range (CPU).
    """
    name = "fused_linear_objective"
    tokens = hidden.shape[:-1].numel()
    weight, bias, shard = local_head(name, weight, bias, process_group, tokens)
    head = HeadParams(
        weight, bias, pre_scale, softcap, post_scale, temperature, shard, low_rank=low_rank
    )
    hidden = check_head(name, hidden, targets, head, ignore_index)
    head = replace(head, logits=form_of(name, logits_dtype, hidden.dtype))
    require(
        group is None or (group.shape == targets.shape and (n_groups > 0 or not targets.numel())),
        f"{name}: group must have the shape of targets {list(targets.shape)} and n_groups must be positive; got "
        f"{None if group is None else list(group.shape)} and {n_groups}.",
    )
    pair = low_rank or (None, None)
    kernels = OP.uses_kernels((hidden, weight, targets, bias, *pair), impl)
    budget = resolve_budget(memory_budget, hidden.device)
    fields = {"entropy": entropy, "lse": lse, "mean_logp": mean_logp, "argmax": argmax}
    asked = frozenset(name for name, wanted in fields.items() if wanted)
    call = _Call(objective, n_groups, asked, ignore_index, accum_dtype, budget, kernels, dense)
    order = None
    if not (torch.compiler.is_compiling() or _needs_late_gradient(hidden, head)):
        flat = targets.reshape(-1)
        order = _order(
            hidden, head, flat, ignore_index, group, n_groups, group_sizes, budget,
            later=_without_logits(hidden, head, call),
        )  # fmt: skip
    if order is None:
        require(
            not asked & {"lse", "mean_logp"},
            f"{name}: a loss that uses lse or mean_logp cannot be made in two passes, which fp16, torch.compile or a "
            "group larger than a chunk would need. Use bf16 or fp32, or a larger memory_budget.",
            NotImplementedError,
        )  # fmt: skip
        return _two_passes(hidden, head, targets, call, impl)
    extras: list[Any] = []
    train = torch.is_grad_enabled()
    loss = _Objective.apply(hidden, weight, bias, *pair, head, targets, order, call, train, extras)
    return loss, extras


def _needs_late_gradient(hidden: Tensor, head: HeadParams) -> bool:
    """fp16 needs the upstream loss scale before its gradient is rounded."""
    leaves = (hidden, head.weight, head.bias, *(head.low_rank or ()))
    wanted = any(t is not None and t.requires_grad for t in leaves)
    return hidden.dtype == torch.float16 and wanted and torch.is_grad_enabled()


def _two_passes(
    hidden: Tensor, head: HeadParams, targets: Tensor, call: _Call, impl: str | None
) -> tuple[Tensor, list[Any]]:
    shard = None if head.shard is None else head.shard.process_group
    asked = call.asked
    found = linear_logprob(
        hidden, head.weight, targets, bias=head.bias, temperature=head.temperature, softcap=head.softcap,
        pre_scale=head.pre_scale, post_scale=head.post_scale, ignore_index=call.ignore_index,
        return_entropy="entropy" in asked, return_argmax="argmax" in asked, accum_dtype=call.accum_dtype,
        memory_budget=call.budget, group=shard,
        logits_dtype=DTYPES[head.logits], low_rank=head.low_rank, impl=impl,
    )  # fmt: skip
    flat = [None if t is None else t.reshape(-1) for t in (found.logp, found.entropy, found.argmax)]
    if call.dense and torch.compiler.is_compiling():
        index = torch.arange(targets.numel(), device=targets.device)
    else:
        index = (targets.reshape(-1) != call.ignore_index).nonzero().view(-1)
        flat = [None if t is None else t[index] for t in flat]
    logp, entropy, argmax = flat
    assert logp is not None
    tokens = Tokens(logp, entropy, index, (0, call.n_groups), argmax=argmax)
    loss, extras = call.objective(tokens)
    return loss, [extras]
