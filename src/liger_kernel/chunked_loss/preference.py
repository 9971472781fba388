"""What every preference loss needs around its formula: log-probabilities of whole sequences,
metrics, a reference model.

    z = post_scale * softcap(pre_scale * (h W^T + b))        h: [B, T, H]   W: [V, H]   target: [B, T]
    l = sum over the sequence's tokens of log softmax(z)_y   or their mean

A batch of n pairs is `[2n, T, H]`: the chosen sequences, then the rejected ones in the same order.
A chunk holds whole pairs (or sequences, unpaired), so that the formula's derivatives are known while
the chunk's logits are there: three matrix products, `ops.head.objective`. How many fit follows from
`memory_budget`; a pair that does not fit alone takes four products.

Masks   Tokens of `ignore_index` are dropped before the products. A sequence without any token has l = 0
        and no gradient, and its pair counts among the n; a batch without any token has loss 0.
Metrics Detached. The mean of the logits is that of valid tokens over the vocabulary. It is bilinear, mean(h) mean(W)^T,
        and needs no logits; under a softcap it is exact too, for the price of one more product.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._op import compute_dtype, require
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.head.logit_sums import capped_logit_sums
from liger_kernel.ops.head.module import takes_module
from liger_kernel.ops.head.objective import Tokens, fused_linear_objective
from liger_kernel.ops.head.plan import resolve_budget
from liger_kernel.ops.head.shard import local_head
from liger_kernel.ops.linear_logprob import linear_logprob

_TRANSFORMS = ("softcap", "pre_scale", "post_scale")
# (chosen and rejected log-probabilities, or one vector of them, ...) -> share of the loss, or (it, *metrics)
LossFn = Callable[..., Any]


@dataclass(frozen=True)
class HeadOptions:
    """What the classes of this package take by keyword beyond their contract.

    softcap, pre_scale, post_scale: transforms of the policy's logits, see the module.
    ref_head: those of the reference's, a dict of the same three names; None for the policy's own.
    memory_budget: bytes a chunk of logits may take, as in `fused_linear_cross_entropy`.
    accum_dtype: where the head's gradient is summed over chunks; None for the head's dtype.
    logits_dtype: how 16-bit chunks of logits are kept, as in `fused_linear_cross_entropy`.
    impl: "auto", "triton" or "torch".
    num_items_in_batch: what the sum over pairs (unpaired: sequences) is divided by, a number or a scalar tensor: those
        of all micro-batches of a step, so that their losses add up to one big batch's. None for this call's. Where
        ranks average their gradients, the mean over ranks; 1 for the sum.
    num_tokens_in_batch: the same for the NLL, in tokens of chosen sequences.
    group: the torch.distributed group over which the vocabulary is split, see `linear_logprob`; the reference's head is
        this rank's slice as well. Not needed for DTensors.
    return_count: the metrics end with this call's own `[2]` fp32 counts, pairs (sequences) and tokens of the NLL (0
        unpaired).
    """

    softcap: float | None = None
    pre_scale: float = 1.0
    post_scale: float = 1.0
    ref_head: Mapping[str, Any] | None = None
    memory_budget: int | float | str | None = None
    accum_dtype: torch.dtype | None = None
    logits_dtype: Any = None
    impl: str | None = None
    num_items_in_batch: Tensor | float | None = None
    num_tokens_in_batch: Tensor | float | None = None
    group: Any = None
    return_count: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.ref_head or ()) - set(_TRANSFORMS)
        require(
            not unknown,
            f"ref_head takes {', '.join(_TRANSFORMS)}; got {', '.join(sorted(map(str, unknown)))}.",
        )

    def share(self, n: int) -> Tensor | float:
        """The factor that makes a mean over n items one over the items of the whole batch."""
        return 1.0 if self.num_items_in_batch is None else n / self.num_items_in_batch

    def policy(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _TRANSFORMS}

    def reference(self) -> dict[str, Any]:
        return self.policy() if self.ref_head is None else dict(self.ref_head)


@dataclass(frozen=True)
class Reference:
    """The reference model's hidden states `[B, T, H']` and head `[V, H']`, `[V]`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def reference_of(
    op: str, use: bool, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> Reference | None:
    """The reference if it is to be used; ValueError if it is incomplete."""
    if not use:
        return None
    if hidden is None or weight is None:
        missing = [n for n, t in (("ref_input", hidden), ("ref_weight", weight)) if t is None]
        raise ValueError(
            f"{op}: use_ref_model=True needs {' and '.join(missing)}; pass the reference model's last hidden states "
            "and head weight, or use_ref_model=False."
        )
    return Reference(hidden, weight, bias)


def check_reference_slice(op: str, group: Any, weight: Any, theirs: Any) -> None:
    """ValueError if a reference's head cannot be the slice of classes that the policy's is: a whole one would be taken
    for a slice of a larger vocabulary.
    """
    own = weight.shape[0] if group is not None and isinstance(weight, Tensor) else None
    require(
        own is None or (isinstance(theirs, Tensor) and theirs.shape[0] == own),
        f"{op}: with group the reference's head must be this rank's slice, {own} rows as the policy's; got "
        f"{list(theirs.shape) if isinstance(theirs, Tensor) else type(theirs).__name__}.",
    )


def check_chunk_size(op: str, chunk_size: int) -> None:
    """chunk_size has no effect here (chunks follow from memory_budget), but a wrong one is an
    error.
    """
    require(
        isinstance(chunk_size, int) and chunk_size > 0,
        f"{op}: chunk_size must be a positive integer; got {chunk_size!r}.",
    )


class Batch:
    """Sequences `[B, T]`, which of their tokens count, and the head they go through."""

    def __init__(
        self, op: str, hidden: Tensor, weight: Any, target: Tensor, bias: Tensor | None,
        ignore_index: int, average: bool, options: HeadOptions, low_rank: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        require(
            hidden.dim() == 3 and target.shape == hidden.shape[:2],
            f"{op}: hidden states must be [B, T, H] and target [B, T]; got {list(hidden.shape)} and "
            f"{list(target.shape)}.",
        )
        self.op, self.hidden, self.weight, self.bias = op, hidden, weight, bias
        self.own = local_head(op, weight, bias, options.group, target.numel())
        self.low_rank = low_rank
        self.target, self.ignore_index, self.options = target, ignore_index, options
        self.dtype = compute_dtype(hidden)
        self.valid = target != ignore_index
        tokens = self.valid.sum(-1)
        self.counts = tokens.to(self.dtype)
        self.lengths = self.counts.clamp(min=1) if average else torch.ones_like(self.counts)
        # The one wait, before anything is queued that would have to be waited for.
        self.sizes = None if torch.compiler.is_compiling() else tokens.tolist()

    def logps(self, tokens: Tokens) -> Tensor:
        """l of every sequence `[B]`, right for those whose tokens are in this chunk."""
        sequence = tokens.index // self.target.shape[1]
        sums = torch.zeros_like(self.counts).index_add(0, sequence, tokens.logp.to(self.dtype))
        return sums / self.lengths

    def reference_logps(self, reference: Reference | None) -> Tensor | None:
        """l of every sequence under the reference `[B]`, without gradients."""
        if reference is None:
            return None
        group = self.options.group
        check_reference_slice(self.op, group, self.weight, reference.weight)
        with torch.no_grad():
            found = linear_logprob(
                reference.hidden, reference.weight, self.target, bias=reference.bias, group=group,
                num_valid=None if self.sizes is None else sum(self.sizes),
                ignore_index=self.ignore_index, memory_budget=self.options.memory_budget,
                logits_dtype=self.options.logits_dtype, impl=self.options.impl, **self.options.reference(),
            )  # fmt: skip
            return found.logp.to(self.dtype).sum(-1) / self.lengths

    def run(self, objective: Callable[..., Any], group: Tensor, n: int) -> tuple[Tensor, list[Any]]:
        """The objective over the batch, chunk by chunk of whole groups, and its metrics merged."""
        options, sizes = self.options, self.sizes
        if sizes is not None:  # of the groups, each of one sequence or of two that are n apart
            sizes = [sum(sizes[i::n]) for i in range(n)]
        loss, parts = fused_linear_objective(
            self.hidden, self.weight, self.target, objective, bias=self.bias, n_groups=n, group_sizes=sizes,
            group=group[:, None].expand_as(self.target), ignore_index=self.ignore_index,
            accum_dtype=options.accum_dtype, memory_budget=options.memory_budget,
            logits_dtype=options.logits_dtype, dense=True, process_group=options.group, impl=options.impl,
            low_rank=self.low_rank, **options.policy(),
        )  # fmt: skip
        return loss, [_merged(values) for values in zip(*parts, strict=True)]

    @property
    def vocab(self) -> int:
        """Classes of the whole head."""
        weight, _, shard = self.own
        return weight.shape[0] if shard is None else shard.total

    def logit_sums(self) -> Tensor:
        """The sum of the logits over each sequence's tokens and the vocabulary `[B]`."""
        sums, shard = self._own_logit_sums(), self.own[2]
        if shard is not None:
            torch.distributed.all_reduce(sums, group=shard.process_group)
        return sums

    def _own_logit_sums(self) -> Tensor:
        o, (weight, bias, _) = self.options, self.own
        with torch.no_grad():
            if o.softcap is not None:
                pair = self.low_rank or (None, None)
                budget = resolve_budget(o.memory_budget, self.target.device)
                each = capped_logit_sums(
                    self.hidden, weight, bias, *pair, self.target, self.ignore_index, o.pre_scale, o.softcap,
                    budget,
                )  # fmt: skip
                return each.view(self.target.shape).sum(-1) * o.post_scale
            sums = torch.zeros_like(self.counts)
            for x, w in ((self.hidden, weight), self.low_rank or (None, None)):
                if x is None or w is None:
                    continue
                # One sequence at a time: masking everything at once would copy the hidden states.
                h = torch.stack([
                    torch.where(valid[:, None], h, 0).sum(0, dtype=self.dtype)
                    for valid, h in zip(self.valid, x.detach(), strict=True)
                ])  # fmt: skip
                # no matrix product: autocast would round it to 16 bits
                sums = sums + (h * w.sum(0, dtype=self.dtype)).sum(-1)
            if bias is not None:
                sums = sums + self.counts * bias.sum(dtype=self.dtype)
            return sums * (o.pre_scale * o.post_scale)


def _merged(values: tuple[Tensor, ...]) -> Tensor:
    """One metric of all chunks: vectors in the order of the groups, scalars summed."""
    return torch.stack(values).sum(0) if values[0].dim() == 0 else torch.cat(values)


def _parts(found: Any) -> tuple[Tensor, list[Tensor]]:
    """What a loss function returned, as the loss and its detached metrics."""
    loss, *metrics = found if isinstance(found, tuple | list) else (found,)
    return loss, [torch.as_tensor(m, device=loss.device).detach() for m in metrics]


@takes_module("hidden")
def paired_loss(
    op: str, loss_fn: LossFn, hidden: Tensor, weight: Any, target: Tensor, bias: Tensor | None,
    reference: Reference | None, *, ignore_index: int, alpha: float, compute_nll_loss: bool,
    nll_target: Tensor | None, average: bool, options: HeadOptions, loss_kwargs: dict[str, Any],
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """alpha * NLL of the chosen tokens + the preference loss of n pairs.

    loss_fn(chosen_logps, rejected_logps, target, **loss_kwargs) gets the pairs of one chunk, with a reference also
    ref_chosen_logps and ref_rejected_logps; it returns their share of the loss, divided by n already, and metrics.
    nll_target: `[2n, T]` or `[n, T]` labels for the NLL if not those of target: a pass of its own over the chosen half,
    whose dW lives beside the other until backward.
    -> loss, (chosen_logps, rejected_logps, chosen_logits_mean, rejected_logits_mean, nll_loss, *metrics of loss_fn)
    """
    batch = Batch(op, hidden, weight, target, bias, ignore_index, average, options, low_rank)
    n = target.shape[0] // 2
    require(
        n > 0 and target.shape[0] == 2 * n,
        f"{op}: a batch is the chosen sequences, then as many rejected ones; got {target.shape[0]} sequences.",
    )
    given = batch.reference_logps(reference)
    any_token, share = batch.valid.any(), options.share(n)
    nll_tokens = batch.counts[:n].sum()
    all_tokens = options.num_tokens_in_batch
    all_tokens = nll_tokens.clamp(min=1) if all_tokens is None else all_tokens
    inline_nll = compute_nll_loss and nll_target is None

    def objective(tokens: Tokens) -> tuple[Tensor, Any]:
        lo, hi = tokens.groups
        logps = batch.logps(tokens)
        chosen, rejected = logps[lo:hi], logps[n + lo : n + hi]
        extra = dict(loss_kwargs)
        if given is not None:
            extra["ref_chosen_logps"] = given[lo:hi]
            extra["ref_rejected_logps"] = given[n + lo : n + hi]
        loss, metrics = _parts(loss_fn(chosen, rejected, target, **extra))
        loss = torch.where(any_token, loss, 0.0) * share
        nll = -(chosen * batch.lengths[lo:hi]).sum() / all_tokens
        if inline_nll:
            loss = loss + alpha * nll
        return loss, (chosen.detach(), rejected.detach(), nll.detach(), *metrics)

    pair = torch.arange(2 * n, device=target.device) % n
    loss, (chosen, rejected, nll, *metrics) = batch.run(objective, pair, n)
    if compute_nll_loss and nll_target is not None:
        nll, nll_tokens = _nll(batch, n, nll_target)
        loss, nll = loss + alpha * nll, nll.detach()
    elif not compute_nll_loss:
        nll = torch.zeros_like(nll)
    sums = batch.logit_sums().view(2, n).sum(1)
    means = sums / (batch.counts.view(2, n).sum(1).clamp(min=1) * batch.vocab)
    counts = _counts(options, n, nll_tokens)
    return loss, (chosen, rejected, means[0], means[1], nll, *metrics, *counts)


def _counts(options: HeadOptions, n: int, tokens: Tensor) -> list[Tensor]:
    """What `return_count` adds to the metrics."""
    return [torch.stack((tokens.new_full((), n), tokens)).float()] if options.return_count else []


def _nll(batch: Batch, n: int, nll_target: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of -log p over the tokens of nll_target that count, chosen sequences only; how many these are."""
    require(
        nll_target.dim() == 2 and nll_target.shape[0] in (n, 2 * n) and nll_target.shape[1:] == batch.target.shape[1:],
        f"{batch.op}: nll_target must be [2n, T] = {list(batch.target.shape)} or its chosen half; got "
        f"{list(nll_target.shape)}.",
    )  # fmt: skip
    options, pair = batch.options, batch.low_rank
    total = options.num_tokens_in_batch
    loss = fused_linear_cross_entropy(
        batch.hidden[:n], batch.weight, nll_target[:n], batch.bias, ignore_index=batch.ignore_index,
        low_rank=None if pair is None else (pair[0][:n], pair[1]),
        accum_dtype=options.accum_dtype, memory_budget=options.memory_budget, logits_dtype=options.logits_dtype,
        impl=options.impl, group=options.group, reduction="mean" if total is None else "sum", **options.policy(),
    ).loss  # fmt: skip
    tokens = (nll_target[:n] != batch.ignore_index).sum().to(batch.dtype)
    return loss if total is None else loss / total, tokens


@takes_module("hidden")
def unpaired_loss(
    op: str, loss_fn: LossFn, hidden: Tensor, weight: Any, target: Tensor, labels: Tensor | None,
    bias: Tensor | None, reference: Reference | None, *, ignore_index: int, average: bool, options: HeadOptions,
    loss_kwargs: dict[str, Any], low_rank: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """A loss of single sequences, each labelled desirable (chosen) or not (rejected): labels `[B]` bool.

    loss_fn(logps, labels, target, **loss_kwargs) gets the sequences of one chunk, with a reference also
    ref_log_prob_chunk; it returns their share of the loss, divided by B already, and metrics.
    -> loss, (chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum, *metrics of loss_fn)
    """
    batch = Batch(op, hidden, weight, target, bias, ignore_index, average, options, low_rank)
    n = target.shape[0]
    if labels is None:
        raise ValueError(
            f"{op}: preference_labels are missing; pass a bool tensor [{n}], True for desirable sequences."
        )
    desirable = torch.as_tensor(labels, device=target.device).bool()
    require(
        n > 0 and desirable.shape == (n,),
        f"{op}: preference_labels must be [{n}], one a sequence and at least one; got {list(desirable.shape)}.",
    )
    given = batch.reference_logps(reference)
    any_token, share = batch.valid.any(), options.share(n)

    def objective(tokens: Tokens) -> tuple[Tensor, Any]:
        lo, hi = tokens.groups
        logps, chosen = batch.logps(tokens)[lo:hi], desirable[lo:hi]
        extra = {} if given is None else {"ref_log_prob_chunk": given[lo:hi]}
        loss, metrics = _parts(loss_fn(logps, chosen, target, **extra, **loss_kwargs))
        return torch.where(any_token, loss, 0.0) * share, (logps.detach(), *metrics)

    loss, (logps, *metrics) = batch.run(objective, torch.arange(n, device=target.device), n)
    sums = [
        torch.where(side, values, 0).sum()
        for values in (logps, batch.logit_sums())
        for side in (desirable, ~desirable)
    ]
    counts = _counts(options, n, batch.counts.new_zeros(()))
    return loss, (*sums, *metrics, *counts)
