"""Linear layers and generalised Jensen-Shannon divergence without the logits.

    Q = softmax(student_input student_weight^T / temperature)      P = softmax(teacher_input teacher_weight^T / ...)
    loss = beta KL(P || M) + (1 - beta) KL(Q || M),  M = beta P + (1 - beta) Q;  beta = 0: KL(P || Q), 1: KL(Q || P)
    student_input: [*, H]   student_weight: [V, H]   teacher_input: [*, H']   teacher_weight: [V, H']

A mean over the rows whose label is not ignore_index. Gradients for the student's tensors alone.

Memory, products, zeros: as `linear_distillation`, of which this is one kind under the contract's name.
Paper  Agarwal et al., arXiv 2306.13649.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import linear_distillation as general
from liger_kernel.ops._head_pair import PairLoss
from liger_kernel.ops._op import choice, require
from liger_kernel.ops._scale import scale_
from liger_kernel.ops.head.module import takes_module
from liger_kernel.ops.head.pair import (
    PairOptions,
    check_teacher,
    pair_form,
    pair_loss,
    pair_op,
    teacher_here,
)
from liger_kernel.ops.head.params import HeadParams, check_head
from liger_kernel.ops.head.plan import resolve_budget
from liger_kernel.ops.head.shard import local_head

# 1 reference


def reference(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0, *,
    student_bias: Tensor | None = None, reduction: str = "batchmean", **options: Any,
) -> Tensor:  # fmt: skip
    """The definition."""
    return general.reference(
        student_input, student_weight, shift_labels, teacher_hidden=teacher_input, teacher_weight=teacher_weight,
        kind="jsd", beta=jsd_beta, ignore_index=ignore_index, temperature=temperature, bias=student_bias,
        reduction="sum" if reduction == "sum" else "mean", **options,
    ).loss  # fmt: skip


# 2 op (launch: `ops.head.pair`)

OP = pair_op("fused_linear_jsd", reference)

# 3 public


@takes_module("student_input", "student_weight", "student_bias", "student_low_rank")
@takes_module("teacher_input", "teacher_weight", "teacher_bias", "teacher_low_rank", constant=True)
def fused_linear_jsd(
    student_input: Tensor, student_weight: Any, teacher_input: Tensor, teacher_weight: Any,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0, *,
    student_bias: Tensor | None = None, teacher_bias: Tensor | None = None, softcap: float | None = None,
    pre_scale: float = 1.0, post_scale: float = 1.0, teacher_softcap: float | None = None,
    teacher_pre_scale: float = 1.0, teacher_post_scale: float = 1.0, reduction: str = "batchmean",
    return_count: bool = False, accum_dtype: torch.dtype | None = None,
    memory_budget: int | float | str | None = None, num_valid: int | None = None, group: Any = None,
    logits_dtype: Any = None, impl: str | None = None, student_low_rank: tuple[Tensor, Tensor] | None = None,
    teacher_low_rank: tuple[Tensor, Tensor] | None = None,
) -> Any:  # fmt: skip
    """Generalised JSD of two linear heads (formulas: top of this file).

    Args:
        student_input: `[*, H]` of any strides; fp16, bf16, fp32 (fp64 on the torch path). student_weight: `[V, H]`.
        teacher_input: `[*, H']`, the same tokens. teacher_weight: `[V, H']`.
        shift_labels: `[*]` int64 or int32, compared with ignore_index alone; None: every row counts.
        jsd_beta: weight of the teacher, in [0, 1].
        temperature: divides the logits of both.
        student_weight, teacher_weight: or modules, or slices of a vocabulary with `group`, as in `linear_distillation`.
        student_bias, teacher_bias: `[V]` or None. softcap, pre_scale, post_scale: transforms of the student's logits,
            as in `linear_distillation`; teacher_softcap, teacher_pre_scale, teacher_post_scale: of the teacher's.
        reduction: "batchmean" (over rows that count) or "sum".
        return_count: return also how many rows count.
        accum_dtype, memory_budget, num_valid, impl: as in `fused_linear_cross_entropy`.
        group, student_low_rank, teacher_low_rank: as in `linear_distillation`.
        logits_dtype: how 16-bit chunks of logits are kept, of both heads: None or torch.float32, see
            `ops.head.logits`.
    Returns:
        The loss, 0-dim fp32; (loss, count) under return_count. No row that counts: 0, with zero gradients.
    Memory:
        The gradients of student_input and student_weight from forward to backward. See `linear_distillation`.
    Raises:
        ValueError: shapes that do not fit, heads of different vocabularies, an empty or flat (sharded) weight, options
            out of range.
    """
    name = OP.name
    choice(name, "reduction", reduction, ("batchmean", "sum"))
    require(0.0 <= jsd_beta <= 1.0, f"{name}: jsd_beta must lie in [0, 1]; got {jsd_beta}.")
    tokens = student_input.shape[:-1].numel()
    student_weight, student_bias, shard = local_head(
        name, student_weight, student_bias, group, tokens
    )
    head = HeadParams(
        student_weight, student_bias, pre_scale, softcap, post_scale, temperature, shard, low_rank=student_low_rank
    )  # fmt: skip
    hidden = check_head(name, student_input, shift_labels, head, ignore_index, classes=False)
    teacher_weight, teacher_bias = teacher_here(
        name, teacher_weight, teacher_bias, shard, student_weight.shape[0]
    )
    teacher = HeadParams(
        teacher_weight, teacher_bias, teacher_pre_scale, teacher_softcap, teacher_post_scale, low_rank=teacher_low_rank
    )  # fmt: skip
    t_hidden = check_teacher(name, teacher_input, hidden, teacher)
    require(
        teacher_weight.shape[0] == student_weight.shape[0],
        f"{name}: student and teacher must have the same classes; got heads {list(student_weight.shape)} and "
        f"{list(teacher_weight.shape)}. linear_distillation takes a teacher with more.",
    )
    kind = {0.0: "kl", 1.0: "reverse_kl"}.get(float(jsd_beta), "jsd")
    losses = PairLoss(
        kind, "logits", float(jsd_beta), temperature, 1.0, 0.0, False, ignore_index, (pre_scale, softcap, post_scale),
        (teacher_pre_scale, teacher_softcap, teacher_post_scale),
    )  # fmt: skip
    options = PairOptions(
        losses, int(reduction != "sum"), accum_dtype, resolve_budget(memory_budget, hidden.device), num_valid,
        pair_form(name, logits_dtype, hidden.dtype), shard,
    )  # fmt: skip
    loss, _, count = pair_loss(
        OP, hidden, head, shift_labels, t_hidden, teacher, (None, None), options, impl
    )
    return (loss, count) if return_count else loss


class LigerFusedLinearJSDFunction:
    """The op under the name and argument order of the contract."""

    @staticmethod
    def apply(
        student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None, jsd_impl: str | None = None, jsd_mode: str | None = None,
    ) -> Tensor:  # fmt: skip
        """-> the loss. jsd_mode has no meaning here."""
        return fused_linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index,
            temperature, accum_dtype=accum_dtype, impl=jsd_impl,
        )  # fmt: skip


def fused_linear_jsd_forward(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None, jsd_beta: float, ignore_index: int, has_label: bool, temperature: float,
    jsd_impl: str | None = None, jsd_mode: str | None = None, accum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> loss, grad_input, grad_weight, without autograd; labels are read if `has_label`."""
    leaves = student_input.detach().requires_grad_(), student_weight.detach().requires_grad_()
    with torch.enable_grad():
        loss = fused_linear_jsd(
            *leaves, teacher_input, teacher_weight, shift_labels if has_label else None, jsd_beta, ignore_index,
            temperature, accum_dtype=accum_dtype, impl=jsd_impl,
        )  # fmt: skip
    dx, dw = torch.autograd.grad(loss, leaves)
    return loss.detach(), dx, dw


def fused_linear_jsd_backward(
    grad_output: Tensor, grad_input: Tensor | None, grad_weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients made by `fused_linear_jsd_forward` times the loss's own, in their buffers."""
    grads = (grad_input, grad_weight)
    return tuple(None if g is None else scale_(g, grad_output.to(g.dtype)) for g in grads)
