"""Layers for the losses between two distributions, with the constructors their users know."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops._op import choice, require
from liger_kernel.ops._pair import REDUCTIONS
from liger_kernel.ops.fused_ce_tvd import fused_ce_tvd
from liger_kernel.ops.fused_linear_kl_div import REDUCTIONS as LINEAR_REDUCTIONS
from liger_kernel.transformers import functional


class LigerKLDIVLoss(nn.KLDivLoss):
    """`liger_kernel.ops.kl_div.kl_div` as a layer, a `torch.nn.KLDivLoss` in every other way.

    Args:
        eps: smallest probability whose logarithm is taken, >= 0.
        args, kwargs: of `torch.nn.KLDivLoss`: reduction ("mean", not "batchmean", by default) and log_target.
    Raises:
        ValueError: a negative eps or an unknown reduction.
    """

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choice(type(self).__name__, "reduction", self.reduction, REDUCTIONS)
        require(eps >= 0.0, f"{type(self).__name__}: eps must not be negative; got {eps}.")
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """Log-probabilities and probabilities (log_target: log-probabilities) `[*, V]` -> the loss."""
        return functional.liger_kl_div(
            y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps
        )


class LigerJSD(nn.Module):
    """`liger_kernel.ops.jsd.jsd` as a layer.

    Args:
        beta: weight of the teacher, in [0, 1].
        ignore_index: the label of rows that do not count.
    Raises:
        ValueError: beta outside [0, 1].
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        require(0.0 <= beta <= 1.0, f"LigerJSD: beta must lie in [0, 1]; got {beta}.")
        self.beta = beta
        self.ignore_index = ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Log-probabilities `[*, V]` of student and teacher, one label a row or None -> the loss."""
        return functional.liger_jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)

    def extra_repr(self) -> str:
        return f"beta={self.beta}, ignore_index={self.ignore_index}"


class LigerTVDLoss(nn.Module):
    """`liger_kernel.ops.tvd.tvd` as a layer.

    Args:
        reduction: "none", "sum", "mean" (per element) or "batchmean" (per row).
        ignore_index: the label of rows that do not count.
    Raises:
        ValueError: an unknown reduction.
    """

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        choice("LigerTVDLoss", "reduction", reduction, REDUCTIONS)
        self.reduction = reduction
        self.ignore_index = ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Probabilities `[*, V]` of student and teacher, one label a row or None -> the loss."""
        return functional.liger_tvd(p, q, shift_labels, self.reduction, self.ignore_index)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}"


class LigerFusedLinearJSD(nn.Module):
    """`liger_kernel.ops.fused_linear_jsd.fused_linear_jsd` as a layer.

    Args:
        jsd_beta: weight of the teacher, in [0, 1].
        ignore_index: the label of rows that do not count.
        temperature: divides the logits of both, > 0.
        accum_dtype: where the head's gradient is summed over chunks; None for the head's dtype.
        options: further keywords of the function (softcap, teacher_softcap, reduction, memory_budget, ...).
    Raises:
        ValueError: beta outside [0, 1], a temperature that is not positive.
    """

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        require(0.0 <= jsd_beta <= 1.0, f"{name}: jsd_beta must lie in [0, 1]; got {jsd_beta}.")
        require(temperature > 0, f"{name}: temperature must be positive; got {temperature}.")
        self.jsd_beta = jsd_beta
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.accum_dtype = accum_dtype
        self.options = options

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Any:
        """Hidden states `[*, H]` and head `[V, H]` of student and teacher, one label a row or None -> the loss."""
        return functional.liger_fused_linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            self.jsd_beta,
            self.ignore_index,
            self.temperature,
            self.accum_dtype,
            **self.options,
        )

    def extra_repr(self) -> str:
        return f"jsd_beta={self.jsd_beta}, ignore_index={self.ignore_index}, temperature={self.temperature}"


class LigerFusedLinearKLDivLoss(nn.Module):
    """`liger_kernel.ops.fused_linear_kl_div.fused_linear_kl_div` as a layer.

    Args:
        reduction: "batchmean" (per row), "mean" (per element) or "sum".
        ignore_index: the label of rows that do not count.
        temperature: divides the student's logits, > 0.
        eps: smallest probability whose logarithm is taken, >= 0.
        accum_dtype: where the head's gradient is summed over chunks; None for the head's dtype.
        options: further keywords of the function (bias, softcap, return_count, memory_budget, ...).
    Raises:
        ValueError: another reduction, a negative eps, a temperature that is not positive.
    """

    def __init__(
        self,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        choice(name, "reduction", reduction, LINEAR_REDUCTIONS)
        require(eps >= 0.0, f"{name}: eps must not be negative; got {eps}.")
        require(temperature > 0, f"{name}: temperature must be positive; got {temperature}.")
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.eps = eps
        self.accum_dtype = accum_dtype
        self.options = options

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Any:
        """Hidden states `[*, H]`, head `[V, H]`, probabilities `[*, V]`, one label a row or None -> the loss."""
        return functional.liger_fused_linear_kl_div(
            student_input,
            student_weight,
            target,
            shift_labels,
            self.reduction,
            self.ignore_index,
            self.temperature,
            self.eps,
            self.accum_dtype,
            **self.options,
        )

    def extra_repr(self) -> str:
        return (
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, "
            f"temperature={self.temperature}, eps={self.eps}"
        )


class LigerFusedCETVDLoss(nn.Module):
    """`liger_kernel.ops.fused_ce_tvd.fused_ce_tvd` as a layer.

    Args:
        ignore_index: the target of rows that do not count.
        options: further keywords of the function (softcap, teacher_softcap, ...).
    """

    def __init__(self, ignore_index: int = -100, **options: Any) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.options = options

    def forward(
        self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits `[*, V]` of student and teacher, classes `[*]` -> ce, tvd: `[*]` fp32."""
        return fused_ce_tvd(
            student_logits, teacher_logits, target, self.ignore_index, **self.options
        )

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}"
