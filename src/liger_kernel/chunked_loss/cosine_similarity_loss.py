"""Distillation by the angle between student and teacher logits."""

from typing import Any

from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_distillation import (
    DistillationLoss,
    DistillationOptions,
    LigerFusedLinearDistillationBase,
    results,
)
from liger_kernel.chunked_loss.preference import check_chunk_size
from liger_kernel.ops.linear_distillation import cosine, linear_distillation


class LigerFusedLinearCosineSimilarityFunction(LigerFusedLinearDistillationBase):
    """`linear_distillation` of kind "cosine" under the name and argument order of the contract."""

    @staticmethod
    def distillation_loss_fn(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor | None = None, ignore_index: int | None = None,
        beta: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """The formula in plain torch: beta (1 - cos), a sum over the tokens that count."""
        each = cosine(student_logits.float(), teacher_logits.float(), beta)
        return (each if target is None else each.where(target != ignore_index, 0.0)).sum()

    @classmethod
    def apply(
        cls, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None, teacher_bias: Tensor | None,
        weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100,
        temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024, return_soft_hard_loss: bool = False,
        **options: Any,
    ) -> Any:  # fmt: skip
        """As `LigerFusedLinearCosineSimilarityLoss`; options: fields of `DistillationOptions`."""
        check_chunk_size(cls.__name__, chunk_size)
        head = DistillationOptions(**options)
        out = linear_distillation(
            student_input, student_weight, true_labels, teacher_hidden=teacher_input, teacher_weight=teacher_weight,
            teacher_bias=teacher_bias, kind="cosine", beta=beta, weight_soft=weight_soft_loss,
            weight_hard=weight_hard_loss, temperature=temperature, bias=student_bias, ignore_index=ignore_index,
            return_hard=return_soft_hard_loss, **head.of_op(),
        )  # fmt: skip
        return results(
            out.loss, out.soft, out.hard, out.count, return_soft_hard_loss, head.return_count
        )


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """beta (1 - cosine of the logits) from a teacher plus cross entropy on a linear head, without the logits; see
    `DistillationLoss`. The temperature leaves the cosine as it is.
    """

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Hidden states `[*, H]` and head `[V, H]` of the student, those of the teacher `[*, H']`, `[W, H']`,
        W >= V, labels `[*]`, biases.

        -> loss, or (loss, soft, hard); the number of tokens last if asked for
        """
        return LigerFusedLinearCosineSimilarityFunction.apply(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
            *self.arguments(), **self.options,
        )  # fmt: skip
