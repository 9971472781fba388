"""Layers for the losses between two given distributions, with the constructors their users know."""

from typing import Any

from torch import Tensor, nn

from liger_kernel.ops._op import choice, require
from liger_kernel.ops._pair import REDUCTIONS
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
