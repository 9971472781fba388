"""Cross entropy of logits whose vocabulary is split over the ranks of a group.

    loss = (1 - s) * -log p_y - s * mean log p        logits: [*, V_local]   y: [*] global ids   loss: [*] fp32
    dz_v = dloss * (p_v - (1 - s) [v = y] - s / K)

s and K of label smoothing a in (0, 1): formula "pytorch" s = a, "megatron" s = a K / (K - 1); K and the mean are over
the whole vocabulary ("global") or this rank's part ("partition": the loss then differs between ranks, as in Megatron).
Each rank's largest logit, sum of exponentials and the target's logit meet in one packed all-gather (`ops.head.shard`).

Memory  Keeps the logits and 8 bytes a row; backward writes their gradient into memory of its own.
Paper   Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._logp_kernels import LogpStats
from liger_kernel.ops._op import choice, compute_dtype, first_order, require, rows
from liger_kernel.ops.head.rows import RowMath
from liger_kernel.ops.head.shard import shard_of_logits
from liger_kernel.ops.linear_logprob import OP as ROWS

_OP = "vocab_parallel_cross_entropy"


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, math: RowMath, share: Any, whole: bool
    ) -> Tensor:
        own = math.V
        stats = math.stats(logits, target, gaps=share is not None and whole)
        loss = -stats.logp if share is None else (share - 1.0) * stats.logp
        count = own if math.shard is None or not whole else math.shard.total
        if share is not None:
            gaps = stats.gaps if whole else _own_gaps(logits, stats, target, math)
            loss = loss - share * (gaps / count - stats.log_total).where(
                target != math.ignore_index, 0.0
            )
        y = target if stats.labels is None else stats.labels
        ctx.save_for_backward(logits, y, stats.top, stats.log_total)
        ctx.math, ctx.share, ctx.count = math, share, count
        return loss

    @staticmethod
    @first_order(_OP)
    def backward(ctx: Any, dloss: Tensor) -> Any:
        logits, y, top, log_total = ctx.saved_tensors
        none = y.new_empty(0)
        stats = LogpStats(top, top, log_total, none, none, none, y)
        out = torch.empty_like(logits)
        smooth = ctx.share is not None
        a = (ctx.share - 1.0) * dloss if smooth else -dloss
        d = -ctx.share * dloss / ctx.count if smooth else None
        ctx.math.gradient(out, logits, y, stats, a, -dloss, None, d)
        return out, None, None, None, None


def _own_gaps(logits: Tensor, stats: LogpStats, target: Tensor, math: RowMath) -> Tensor:
    """sum of x - top over this rank's columns alone, top being the whole vocabulary's."""
    alone = replace(math, shard=None).stats(logits, target.new_zeros(target.shape), gaps=True)
    return alone.gaps + math.V * (alone.top - stats.top)


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: Any = None, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    label_smoothing_formula: str = "pytorch", label_smoothing_mode: str = "global", impl: str | None = None,
) -> Tensor:  # fmt: skip
    """Per-token cross entropy of this rank's part of the logits, unreduced and differentiable.

    Args:
        logits: `[*, V_local]`, the columns of this rank, in the order of the group's ranks; fp16, bf16, fp32 (fp64 on
            the torch path). Not modified.
        target: `[*]` ids of the whole vocabulary, the same on every rank; `ignore_index` where there is none.
        group: the torch.distributed group; None or one rank: no communication.
        label_smoothing: in [0, 1); label_smoothing_formula "pytorch" or "megatron", label_smoothing_mode "global" or
            "partition": see the module.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*]` fp32: 0 where ignored, NaN where the target is in nobody's part.
    Memory:
        See the module.
    Raises:
        ValueError: shapes that do not fit, options out of range.
    """
    require(
        logits.dim() >= 1 and logits.shape[-1] > 0 and target.shape == logits.shape[:-1],
        f"{_OP}: target must have the logits' shape without its last dimension; got {list(logits.shape)} and "
        f"{list(target.shape)}.",
    )
    validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
    require(
        0.0 <= label_smoothing < 1.0,
        f"{_OP}: label_smoothing must lie in [0, 1); got {label_smoothing}.",
    )
    flat = rows(logits)
    shard = shard_of_logits(flat, group)
    kernels = ROWS.uses_kernels((flat, flat, target, None), impl)
    math = RowMath(flat.shape[1], ignore_index, kernels, shard=shard)
    whole = label_smoothing_mode == "global"
    share: Any = label_smoothing or None
    if share is not None and label_smoothing_formula == "megatron":
        classes: Any = flat.shape[1]
        if shard is not None and whole:
            classes = shard.total.to(compute_dtype(flat))  # at least two: no rank has none
        else:
            require(classes > 1, f"{_OP}: the megatron formula needs at least two classes.")
        share = share * classes / (classes - 1)
    loss = _VocabParallelCrossEntropy.apply(flat, target.reshape(-1), math, share, whole)
    return loss.view(target.shape)


def validate_formula_and_mode(formula: str, mode: str) -> None:
    """ValueError unless both are known: "pytorch" or "megatron", "global" or "partition"."""
    choice(_OP, "label_smoothing_formula", formula, ("pytorch", "megatron"))
    choice(_OP, "label_smoothing_mode", mode, ("global", "partition"))


class LigerVocabParallelCEFunction:
    """The op under the name and argument order of the contract."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any, ignore_index: int, label_smoothing: float,
        label_smoothing_formula: str, label_smoothing_mode: str,
    ) -> Tensor:  # fmt: skip
        """-> `[S, B]` fp32."""
        require(
            vocab_parallel_logits.dim() == 3,
            f"LigerVocabParallelCEFunction: logits must be [S, B, V_local]; got {list(vocab_parallel_logits.shape)}.",
        )
        return vocab_parallel_cross_entropy(
            vocab_parallel_logits, target, tp_group, ignore_index=ignore_index, label_smoothing=label_smoothing,
            label_smoothing_formula=label_smoothing_formula, label_smoothing_mode=label_smoothing_mode,
        )  # fmt: skip
