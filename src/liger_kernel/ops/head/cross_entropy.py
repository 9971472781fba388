"""Cross entropy from log-probabilities: as an objective of the engine, of a head whose rows lie with several ranks,
which is quantised or has a low-rank term, or of better kept logits; and chunk by chunk where no logits are kept. Or
from a chunk of logits.

    loss = -(1 - s) logp - s mean_logp + k lse^2        s: label smoothing   k: lse_square_scale

Without class weights, which need more of a row than the engine's statistics.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._ce_batch import denominators
from liger_kernel.ops._ce_kernels import RowStats, ce_rows
from liger_kernel.ops._ce_torch import ce_rows_torch
from liger_kernel.ops._device import exp
from liger_kernel.ops._op import compute_dtype, dense, require
from liger_kernel.ops._triton import cdiv, launch, tl, triton
from liger_kernel.ops.cross_entropy import CrossEntropyOutput
from liger_kernel.ops.head.engine import RowKernel, part
from liger_kernel.ops.head.exponentials import PerToken, Targets
from liger_kernel.ops.head.objective import Tokens, fused_linear_objective
from liger_kernel.ops.linear_logprob import linear_logprob

_OP = "fused_linear_cross_entropy"
_BLOCK = 512  # tokens of a program


def objective_cross_entropy(
    hidden: Tensor, weight: Any, target: Tensor, bias: Tensor | None, group: Any, *, ignore_index: int,
    label_smoothing: float, lse_square_scale: float, reduction: str, use_token_scaling: bool, return_z_loss: bool,
    return_token_accuracy: bool, return_predicted_tokens: bool, impl: str | None, **head: Any,
) -> CrossEntropyOutput:  # fmt: skip
    """`fused_linear_cross_entropy`; `head`: transforms, low_rank, accum_dtype, memory_budget and logits_dtype.

    Raises:
        ValueError: reduction "none" with anything beside the loss itself.
    """
    plain = not (label_smoothing or lse_square_scale or use_token_scaling)
    if reduction == "none":
        require(
            plain and not return_z_loss,
            f'{_OP}: reduction="none" on a sharded, quantised or LoRA head, logits_dtype or accumulate_into takes no '
            'label smoothing, z-loss or token scaling; use "sum" or "mean".',
        )
        found = linear_logprob(
            hidden, weight, target, bias=bias, ignore_index=ignore_index, group=group, impl=impl,
            return_argmax=return_token_accuracy or return_predicted_tokens, **head,
        )  # fmt: skip
        hits = None if found.argmax is None else (found.argmax == target).float()
        return CrossEntropyOutput(
            -found.logp, None, hits if return_token_accuracy else None,
            found.argmax if return_predicted_tokens else None,
        )  # fmt: skip
    wide = compute_dtype(hidden)
    flat = target.reshape(-1)
    scale = denominators(flat, None, ignore_index, reduction, 1, wide)[0]

    def objective(tokens: Tokens) -> tuple[Tensor, Any]:
        loss = (label_smoothing - 1.0) * tokens.logp
        if label_smoothing:
            loss = loss - label_smoothing * tokens.mean_logp  # type: ignore[operator]
        z = lse_square_scale * tokens.lse.square() if tokens.lse is not None else 0.0 * tokens.logp
        loss = loss + z
        weight = scale * tokens.logp.detach().exp() if use_token_scaling else scale
        return (loss * weight).sum(), ((z.detach() * weight).sum(), tokens.index, tokens.argmax)

    wants_argmax = return_token_accuracy or return_predicted_tokens
    loss, extras = fused_linear_objective(
        hidden, weight, target, objective, bias=bias, ignore_index=ignore_index, process_group=group, impl=impl,
        lse=bool(lse_square_scale), mean_logp=bool(label_smoothing), argmax=wants_argmax, dense=True, **head,
    )  # fmt: skip
    z = torch.stack([part for part, _, _ in extras]).sum() if extras else scale.new_zeros(())
    accuracy = predicted = None
    if wants_argmax:
        predicted = torch.full_like(flat, -1, dtype=torch.int64)
        for _, index, argmax in extras:
            predicted[index] = argmax
        count = (flat != ignore_index).sum().clamp(min=1)
        accuracy = ((predicted == flat) & (flat != ignore_index)).sum() / count
        predicted = predicted.view(target.shape)
    return CrossEntropyOutput(
        loss, z if return_z_loss else None, accuracy if return_token_accuracy else None,
        predicted if return_predicted_tokens else None,
    )  # fmt: skip


@triton.jit(do_not_specialize=["start", "n_tokens", "n_classes", "ignore_index"])
def _loss_kernel(
    NUMBERS, A, LOGP, CORRECT, T, SCALE, W, U, INDEX, sU, start, n_tokens, n_classes, ignore_index,
    TOKEN_SCALING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's loss and what `RowStats` has besides, and the loss's derivative by logp."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n_tokens
    at = (start + i).to(tl.int64)
    if INDEX is not None:
        at = tl.load(INDEX + i, mask=mask, other=0)
    y = tl.load(T + at, mask=mask, other=0).to(tl.int64)
    logp = tl.load(LOGP + i, mask=mask, other=0.0)
    factor = tl.zeros((BLOCK,), tl.float32) + tl.load(SCALE)
    if W is not None:
        known = tl.minimum(tl.maximum(y, 0), n_classes - 1)
        factor *= tl.load(W + known, mask=mask, other=0.0).to(tl.float32)
    if TOKEN_SCALING:
        factor *= exp(logp)
    loss = tl.where(y == ignore_index, 0.0, -logp * factor)
    a = -factor
    if U is not None:
        a *= tl.load(U + at * sU, mask=mask, other=0.0).to(tl.float32)
    # a label out of range has the loss NaN, and shall have such a gradient
    tl.store(A + i, a + 0.0 * loss, mask=mask)
    zero = tl.zeros((BLOCK,), tl.float32)
    correct = zero
    if CORRECT is not None:
        correct = tl.load(CORRECT + i, mask=mask, other=0.0)
    NUMBERS += i
    tl.store(NUMBERS, loss, mask=mask)
    tl.store(NUMBERS + n_tokens, zero, mask=mask)
    tl.store(NUMBERS + 2 * n_tokens, zero, mask=mask)
    tl.store(NUMBERS + 3 * n_tokens, correct, mask=mask)


def loss_of_logp(
    labels: Tensor, ce_weight: Tensor | None, scales: Callable[[], Tensor], upstream: Tensor | None,
    token_scaling: bool, ignore_index: int,
) -> PerToken:  # fmt: skip
    """For `exponentials.run`: the loss of a chunk's tokens and its derivative, from their log-probabilities. scales:
    `denominators`, asked for once the chunk's first product is under way. labels: contiguous.
    """
    weight = None if ce_weight is None else dense(ce_weight)
    step = 0 if upstream is None else upstream.stride(0)

    def per_token(
        known: Targets, start: int, stop: int, index: Tensor | None
    ) -> tuple[RowStats, Tensor]:
        n, logp = stop - start, known.logp
        numbers, a = logp.new_empty((4, n)), torch.empty_like(logp)
        tensors = (numbers, a, logp, known.correct, labels, scales(), weight, upstream, index)
        sizes = (step, start, n, 0 if weight is None else weight.shape[0], ignore_index)
        launch(
            _loss_kernel, (cdiv(n, _BLOCK),), logp.device, *tensors, *sizes, TOKEN_SCALING=token_scaling, BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip
        return RowStats(numbers, None), a

    return per_token


def loss_of_logits(
    labels: Tensor, ce_weight: Tensor | None, scales: Callable[[], Tensor], upstream: Tensor | None, kernels: bool,
    options: dict[str, Any],
) -> RowKernel:  # fmt: skip
    """For `engine.run`: the loss of a chunk's tokens and the gradient of their logits; options: those of `ce_rows`."""
    rows = ce_rows if kernels else ce_rows_torch

    def per_row(
        logits: Tensor, start: int, stop: int, index: Tensor | None, out: Tensor | None
    ) -> Any:
        place = start, stop, index
        u = None if upstream is None else part(upstream, *place)
        return rows(logits, part(labels, *place), ce_weight, scales(), u, out, **options)

    return per_row
