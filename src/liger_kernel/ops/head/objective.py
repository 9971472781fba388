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

Memory  As `fused_linear_cross_entropy`: dh, dW and db from forward to backward, one chunk of logits meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._op import first_order, require
from liger_kernel.ops._scale import scale_
from liger_kernel.ops.head.engine import Gradients, Wanted, plan_for, run
from liger_kernel.ops.head.params import HeadParams, check_head
from liger_kernel.ops.head.plan import resolve_budget
from liger_kernel.ops.linear_logprob import (
    OP,
    linear_logprob,
    row_functions,
    transforms,
)


@dataclass
class Tokens:
    """What an objective sees: one chunk of the tokens that count.

    logp      `[C]` fp32 log-probabilities of the targets, part of the graph when gradients are wanted
    entropy   `[C]` fp32 likewise, None unless asked for
    index     `[C]` int64 positions in the flattened batch
    groups    half-open range of the groups that lie in this chunk, each of them whole; a group without tokens too
    """

    logp: Tensor
    entropy: Tensor | None
    index: Tensor
    groups: tuple[int, int]


Objective = Callable[[Tokens], tuple[Tensor, Any]]


@dataclass(frozen=True)
class _Order:
    """Which tokens go through the head, in which order, cut where."""

    keep: Tensor
    cuts: list[tuple[int, int]]
    groups: list[tuple[int, int]]


def _order(
    hidden: Tensor, head: HeadParams, labels: Tensor, ignore_index: int, group: Tensor | None, n_groups: int,
    budget: int,
) -> _Order | None:  # fmt: skip
    """The kept tokens group by group, in chunks of whole groups; None if a group is larger than a chunk may be."""
    keep = (labels != ignore_index).nonzero().view(-1)
    n = keep.numel()
    most = plan_for(hidden, head, n, budget, dropped=True).rows
    if group is None:
        starts = range(0, n, most)
        cuts = [(s, min(s + most, n)) for s in starts]
        return _Order(keep, cuts, [(0, 0)] * len(cuts))
    of_kept = group.reshape(-1)[keep]
    order = of_kept.argsort(stable=True)
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
    entropy: bool
    ignore_index: int
    accum_dtype: torch.dtype | None
    budget: int
    kernels: bool


def _one_pass(
    hidden: Tensor, head: HeadParams, targets: Tensor, order: _Order, call: _Call, wanted: Wanted
) -> tuple[Tensor, list[Any], Gradients]:
    """Loss, extras and gradients in three products."""
    labels = targets.reshape(-1)
    rows, gradient_ = row_functions(call.kernels)
    more = {**transforms(head), "ignore_index": call.ignore_index}
    groups = dict(zip(order.cuts, order.groups, strict=True))

    def per_row(
        logits: Tensor, start: int, stop: int, index: Tensor | None, out: Tensor | None
    ) -> Any:
        assert index is not None
        y = labels.index_select(0, index)
        stats = rows(logits, y, **more, want_entropy=call.entropy)
        leaves = [stats.logp.detach(), *([stats.entropy.detach()] if call.entropy else [])]
        with torch.set_grad_enabled(out is not None):
            for leaf in leaves:
                leaf.requires_grad_(out is not None)
            tokens = Tokens(
                leaves[0], leaves[1] if call.entropy else None, index, groups[start, stop]
            )
            loss, extras = call.objective(tokens)
            if out is not None:
                a, b = _derivatives(loss, leaves)
                gradient_(logits, y, stats, a, a, b, **more)
        return loss.detach(), extras

    found, grads = run(
        hidden, head, per_row, wanted, keep=order.keep, budget=call.budget, accum_dtype=call.accum_dtype,
        cuts=order.cuts,
    )  # fmt: skip
    total = torch.stack([loss for loss, _ in found]).sum() if found else _nothing(hidden, call)
    return total, [extras for _, extras in found], grads


def _derivatives(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """dL/dlogp and dL/dentropy; zeros where the loss does not depend on them."""
    if not loss.requires_grad:
        return torch.zeros_like(leaves[0]), None
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    a = torch.zeros_like(leaves[0]) if found[0] is None else found[0]
    return a, found[1] if len(found) > 1 else None


def _nothing(hidden: Tensor, call: _Call) -> Tensor:
    """The loss of no tokens at all."""
    empty = hidden.new_empty(0, dtype=torch.float32)
    index = torch.empty(0, dtype=torch.int64, device=hidden.device)
    tokens = Tokens(empty, empty if call.entropy else None, index, (0, call.n_groups))
    return call.objective(tokens)[0].detach()


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: HeadParams, targets: Tensor,
        order: _Order, call: _Call, train: bool, extras: list[Any],
    ) -> Tensor:  # fmt: skip
        ctx.needed = tuple(needed and train for needed in ctx.needs_input_grad[:3])
        loss, seen, grads = _one_pass(hidden, head, targets, order, call, Wanted(*ctx.needed))
        extras += seen
        ctx.ready = [grads.hidden, grads.weight, grads.bias]
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.head, ctx.order, ctx.call = head, order, call
        return loss

    @staticmethod
    @first_order("fused_linear_objective")
    def backward(ctx: Any, dloss: Tensor) -> Any:
        ready, ctx.ready = ctx.ready, None
        if (
            ready is None
        ):  # a second backward makes the gradients again: the first has given them away
            hidden, _, _, targets = ctx.saved_tensors
            wanted = Wanted(*ctx.needed)
            _, _, grads = _one_pass(hidden, ctx.head, targets, ctx.order, ctx.call, wanted)
            ready = [grads.hidden, grads.weight, grads.bias]
        scaled = [None if g is None else scale_(g, dloss.to(g.dtype)) for g in ready]
        return *scaled, None, None, None, None, None, None


def fused_linear_objective(
    hidden: Tensor, weight: Tensor, targets: Tensor, objective: Objective, *, bias: Tensor | None = None,
    group: Tensor | None = None, n_groups: int = 0, entropy: bool = False, ignore_index: int = -100,
    temperature: float = 1.0, softcap: float | None = None, pre_scale: float = 1.0, post_scale: float = 1.0,
    accum_dtype: torch.dtype | None = None, memory_budget: int | float | str | None = None, impl: str | None = None,
) -> tuple[Tensor, list[Any]]:  # fmt: skip
    """A loss of your own on the log-probabilities of a linear head, without the logits.

    Args:
        hidden: `[*, H]`; fp16, bf16, fp32 (fp64 on the torch path).
        weight: `[V, H]`. targets: `[*]`, `ignore_index` where there is none. bias: `[V]` or None.
        objective: called once for each chunk with `Tokens`; returns that chunk's share of the loss (a scalar; the total
            is the sum) and anything else worth keeping. It must use nothing of tokens in other chunks, and divide by
            denominators known beforehand.
        group: int64 `[*]`, the group of each token, in [0, n_groups); None if the objective is local to tokens.
        entropy: also give the objective the entropy of each token's distribution.
        temperature, softcap, pre_scale, post_scale: as in `linear_logprob`.
        accum_dtype, memory_budget, impl: as in `fused_linear_cross_entropy`.
    Returns:
        The loss, fp32, differentiable in hidden, weight and bias; and what the objective returned beside it, a list in
        the order of the groups.
    Memory:
        dh, dW and db from forward to backward. See the module.
    Raises:
        ValueError: shapes that do not fit, an empty or flat (sharded) weight. IndexError: a target out of range (CPU).
    """
    name = "fused_linear_objective"
    head = HeadParams(weight, bias, pre_scale, softcap, post_scale, temperature)
    hidden = check_head(name, hidden, targets, head, ignore_index)
    require(
        group is None or (group.shape == targets.shape and (n_groups > 0 or not targets.numel())),
        f"{name}: group must have the shape of targets {list(targets.shape)} and n_groups must be positive; got "
        f"{None if group is None else list(group.shape)} and {n_groups}.",
    )
    kernels = OP.uses_kernels((hidden, weight, targets, bias), impl)
    budget = resolve_budget(memory_budget, hidden.device)
    call = _Call(objective, n_groups, entropy, ignore_index, accum_dtype, budget, kernels)
    order = None
    if not (torch.compiler.is_compiling() or _needs_late_gradient(hidden, head)):
        order = _order(hidden, head, targets.reshape(-1), ignore_index, group, n_groups, budget)
    if order is None:
        return _two_passes(hidden, head, targets, call, impl)
    extras: list[Any] = []
    train = torch.is_grad_enabled()
    loss = _Objective.apply(hidden, weight, bias, head, targets, order, call, train, extras)
    return loss, extras


def _needs_late_gradient(hidden: Tensor, head: HeadParams) -> bool:
    """fp16 needs the upstream loss scale before its gradient is rounded."""
    wanted = hidden.requires_grad or head.weight.requires_grad
    return hidden.dtype == torch.float16 and wanted and torch.is_grad_enabled()


def _two_passes(
    hidden: Tensor, head: HeadParams, targets: Tensor, call: _Call, impl: str | None
) -> tuple[Tensor, list[Any]]:
    found = linear_logprob(
        hidden, head.weight, targets, bias=head.bias, temperature=head.temperature, softcap=head.softcap,
        pre_scale=head.pre_scale, post_scale=head.post_scale, ignore_index=call.ignore_index,
        return_entropy=call.entropy, accum_dtype=call.accum_dtype, memory_budget=call.budget, impl=impl,
    )  # fmt: skip
    index = (targets.reshape(-1) != call.ignore_index).nonzero().view(-1)
    entropy = None if found.entropy is None else found.entropy.reshape(-1)[index]
    tokens = Tokens(found.logp.reshape(-1)[index], entropy, index, (0, call.n_groups))
    loss, extras = call.objective(tokens)
    return loss, [extras]
