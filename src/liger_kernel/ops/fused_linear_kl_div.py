"""Linear layer and Kullback-Leibler divergence from given probabilities, without the logits.

    log Q = log_softmax(z / temperature)     z = post_scale * softcap(pre_scale * (h W^T + b))
    loss = sum_v P_v (log max(P_v, eps) - log Q_v)
    student_input h: [*, H]   student_weight W: [V, H]   target P: [*, V] probabilities

Reductions   over the rows whose label is not ignore_index: "batchmean" divides by their number, "mean" by that of
             their elements, "sum" by nothing. Without such a row 0.
Zeros        P = 0 adds 0, whatever Q is; where Q alone is 0 the loss is infinite, as by definition.
Memory       As `linear_distillation`: three products; the gradients dh and dW from forward to backward. The kernel
             reads target twice, where it lies, in its own dtype.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._head_pair import PairLoss
from liger_kernel.ops._op import choice, require
from liger_kernel.ops._scale import scale_
from liger_kernel.ops.head.module import takes_module
from liger_kernel.ops.head.pair import PairOptions, pair_form, pair_loss, pair_op
from liger_kernel.ops.head.params import HeadParams, check_head
from liger_kernel.ops.head.plan import resolve_budget
from liger_kernel.ops.head.shard import local_head
from liger_kernel.ops.kl_div import divergence
from liger_kernel.ops.linear_distillation import logits_of

REDUCTIONS = ("batchmean", "mean", "sum")

# 1 reference


def reference(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
    reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10, *,
    bias: Tensor | None = None, pre_scale: float = 1.0, softcap: float | None = None, post_scale: float = 1.0,
    **_: Any,
) -> Tensor:  # fmt: skip
    """The definition."""
    x = logits_of(student_input, student_weight, bias, pre_scale, softcap, post_scale) / temperature
    each = divergence(x.log_softmax(-1), target.to(x.dtype), False, eps).sum(-1)
    counted = torch.ones_like(each, dtype=torch.bool)
    if shift_labels is not None:
        counted = shift_labels.reshape(each.shape) != ignore_index
    total = each.where(counted, 0.0).sum()
    if reduction == "sum":
        return total
    return total / (counted.sum().clamp(min=1) * (x.shape[-1] if reduction == "mean" else 1))


# 2 op (launch: `ops.head.pair`)

OP = pair_op("fused_linear_kl_div", reference)

# 3 public


@takes_module("student_input", "student_weight")
def fused_linear_kl_div(
    student_input: Tensor, student_weight: Any, target: Tensor, shift_labels: Tensor | None = None,
    reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10, *,
    bias: Tensor | None = None, softcap: float | None = None, pre_scale: float = 1.0, post_scale: float = 1.0,
    return_count: bool = False, accum_dtype: torch.dtype | None = None,
    memory_budget: int | float | str | None = None, num_valid: int | None = None, group: Any = None,
    logits_dtype: Any = None, impl: str | None = None, low_rank: tuple[Tensor, Tensor] | None = None,
) -> Any:  # fmt: skip
    """KL divergence of a linear head from given probabilities (formulas: top of this file).

    Args:
        student_input: `[*, H]` of any strides; fp16, bf16, fp32 (fp64 on the torch path). student_weight: `[V, H]`, a
            module, or with `group` a slice, as in `linear_distillation`.
        target: `[*, V]` probabilities of all classes, any float dtype, constant.
        shift_labels: `[*]` int64 or int32, compared with ignore_index alone; None: every row counts.
        reduction: "batchmean", "mean" or "sum".
        temperature: divides the student's logits.
        eps: smallest probability whose logarithm is taken, >= 0.
        bias, softcap, pre_scale, post_scale: of the student's head, see the top of this file.
        return_count: return also how many rows count.
        accum_dtype, memory_budget, num_valid, impl: as in `fused_linear_cross_entropy`.
        group, low_rank: as in `linear_distillation`.
        logits_dtype: how 16-bit chunks of logits are kept, of both heads: None or torch.float32, see
            `ops.head.logits`.
    Returns:
        The loss, 0-dim fp32; (loss, count) under return_count. No row that counts: 0, with zero gradients.
        Differentiable in student_input, student_weight and bias.
    Memory:
        dh, dW and db from forward to backward, meanwhile one chunk of logits.
    Raises:
        ValueError: another reduction, shapes that do not fit, a negative eps, an empty or flat (sharded) weight.
    """
    name = OP.name
    choice(name, "reduction", reduction, REDUCTIONS)
    require(eps >= 0.0, f"{name}: eps must not be negative; got {eps}.")
    n = student_input.shape[:-1].numel()
    student_weight, bias, shard = local_head(name, student_weight, bias, group, n)
    head = HeadParams(
        student_weight, bias, pre_scale, softcap, post_scale, temperature, shard, low_rank=low_rank
    )
    hidden = check_head(name, student_input, shift_labels, head, ignore_index, classes=False)
    vocab = head.vocab
    require(
        target.is_floating_point() and target.dim() >= 1 and target.shape[-1] == vocab
        and target.shape[:-1].numel() == n,
        f"{name}: target must hold {n} rows of {vocab} probabilities; got {list(target.shape)} of {target.dtype}.",
    )  # fmt: skip
    width = {"batchmean": 1, "mean": vocab, "sum": 0}[reduction]
    losses = PairLoss(
        "kl", "probs", float(eps), temperature, 1.0, 0.0, False, ignore_index, (pre_scale, softcap, post_scale),
        (1.0, None, 1.0),
    )  # fmt: skip
    options = PairOptions(
        losses, width, accum_dtype, resolve_budget(memory_budget, hidden.device), num_valid,
        pair_form(name, logits_dtype, hidden.dtype), shard,
    )  # fmt: skip
    stored = (head.here(target), None)
    loss, _, count = pair_loss(OP, hidden, head, shift_labels, None, None, stored, options, impl)
    return (loss, count) if return_count else loss


class LigerFusedLinearKLDivFunction:
    """The op under the name and argument order of the contract."""

    @staticmethod
    def apply(
        student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
        reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """-> the loss."""
        return fused_linear_kl_div(
            student_input, student_weight, target, shift_labels, reduction, ignore_index, temperature, eps,
            accum_dtype=accum_dtype,
        )  # fmt: skip


def fused_linear_kl_div_forward(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None, reduction: str,
    ignore_index: int, has_label: bool, temperature: float, eps: float, accum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> loss, grad_input, grad_weight, without autograd; labels are read if `has_label`."""
    leaves = student_input.detach().requires_grad_(), student_weight.detach().requires_grad_()
    with torch.enable_grad():
        loss = fused_linear_kl_div(
            *leaves, target, shift_labels if has_label else None, reduction, ignore_index, temperature, eps,
            accum_dtype=accum_dtype,
        )  # fmt: skip
    dx, dw = torch.autograd.grad(loss, leaves)
    return loss.detach(), dx, dw


def fused_linear_kl_div_backward(
    grad_output: Tensor, grad_input: Tensor | None, grad_weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients made by `fused_linear_kl_div_forward` times the loss's own, in their buffers."""
    grads = (grad_input, grad_weight)
    return tuple(None if g is None else scale_(g, grad_output.to(g.dtype)) for g in grads)
