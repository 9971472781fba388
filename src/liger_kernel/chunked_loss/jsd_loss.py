"""Generalised Jensen-Shannon distillation (arXiv 2306.13649)."""

from typing import Any

from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_distillation import (
    DistillationLoss,
    DistillationOptions,
    LigerFusedLinearDistillationBase,
    results,
)
from liger_kernel.chunked_loss.preference import check_chunk_size
from liger_kernel.ops._op import require
from liger_kernel.ops.linear_distillation import divergence, linear_distillation


class LigerFusedLinearJSDFunction(LigerFusedLinearDistillationBase):
    """`linear_distillation` of kind "jsd" under the name and argument order of the contract."""

    @staticmethod
    def distillation_loss_fn(
        student_logits: Tensor, teacher_logits: Tensor, beta: float = 0.5, target: Tensor | None = None,
        ignore_index: int = -100,
    ) -> Tensor:  # fmt: skip
        """The formula in plain torch: a sum over the tokens that count."""
        kind = {0.0: "kl", 1.0: "reverse_kl"}.get(float(beta), "jsd")
        log_q, log_p = (z.float().log_softmax(-1) for z in (student_logits, teacher_logits))
        each = divergence(log_q, log_p, kind, beta)
        return (each if target is None else each.where(target != ignore_index, 0.0)).sum()

    @classmethod
    def apply(
        cls, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor | None,
        teacher_weight: Tensor | None, true_labels: Tensor, student_bias: Tensor | None,
        teacher_bias: Tensor | None, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5,
        ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024,
        return_soft_hard_loss: bool = False, *, teacher_log_probs: Tensor | None = None,
        teacher_ids: Tensor | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """As `LigerFusedLinearJSDLoss`; options: fields of `DistillationOptions`."""
        check_chunk_size(cls.__name__, chunk_size)
        head = DistillationOptions(**options)
        out = linear_distillation(
            student_input, student_weight, true_labels, teacher_hidden=teacher_input, teacher_weight=teacher_weight,
            teacher_bias=teacher_bias, teacher_log_probs=teacher_log_probs, teacher_ids=teacher_ids, kind="jsd",
            beta=beta, weight_soft=weight_soft_loss, weight_hard=weight_hard_loss, temperature=temperature,
            bias=student_bias, ignore_index=ignore_index, return_hard=return_soft_hard_loss, **head.of_op(),
        )  # fmt: skip
        return results(
            out.loss, out.soft, out.hard, out.count, return_soft_hard_loss, head.return_count
        )


class LigerFusedLinearJSDLoss(DistillationLoss):
    """JSD from a teacher plus cross entropy on a linear head, without the logits; see `DistillationLoss`.

    beta is the weight of the teacher in the mixture, in [0, 1]; 0: KL(teacher || student), 1: KL(student || teacher).
    """

    def check(self, beta: float) -> None:
        """ValueError unless beta lies in [0, 1]."""
        require(0.0 <= beta <= 1.0, f"{type(self).__name__}: beta must lie in [0, 1]; got {beta}.")

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor | None,
        teacher_weight: Tensor | None, true_labels: Tensor, student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None, *, teacher_log_probs: Tensor | None = None,
        teacher_ids: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Hidden states `[*, H]` and head `[V, H]` of the student, those of the teacher `[*, H']`, `[W, H']`,
        W >= V (None with a stored one: teacher_log_probs `[*, V]`, or `[*, K]` with teacher_ids), labels `[*]`, biases.

        -> loss, or (loss, soft, hard); the number of tokens last if asked for
        """
        return LigerFusedLinearJSDFunction.apply(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
            *self.arguments(), teacher_log_probs=teacher_log_probs,
            teacher_ids=teacher_ids, **self.options,
        )  # fmt: skip
