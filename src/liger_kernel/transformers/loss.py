"""Loss layers, with the constructors their users know."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.cross_entropy import CrossEntropyOutput, check_options
from liger_kernel.ops.vocab_parallel_cross_entropy import (
    LigerVocabParallelCEFunction,
    validate_formula_and_mode,
)
from liger_kernel.transformers import functional


class LigerCrossEntropyLoss(nn.Module):
    """`liger_kernel.ops.cross_entropy.cross_entropy` as a layer.

    Args:
        weight: `[V]` class weights or None; a buffer, as in `torch.nn.CrossEntropyLoss`.
        ignore_index: the target of tokens that do not count.
        lse_square_scale: factor of the z-loss.
        label_smoothing: share of the target spread over all classes, in [0, 1].
        reduction: "mean", "sum" or "none".
        softcap: bound of the logits, > 0, or None.
        return_z_loss, return_token_accuracy, return_predicted_tokens: return a
            `CrossEntropyOutput` with these fields set.
    Raises:
        ValueError: an option out of its range.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        n_classes = 1 if weight is None else weight.shape[0]
        check_options(type(self).__name__, n_classes, weight, label_smoothing, reduction, softcap)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """Logits `[N, V]` and class indices `[N]` -> the loss, or everything if more was asked
        for.
        """
        return functional.liger_cross_entropy(
            _input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            lse_square_scale=self.lse_square_scale,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            softcap=self.softcap,
            return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
        )

    def extra_repr(self) -> str:
        return (
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, "
            f"label_smoothing={self.label_smoothing}, lse_square_scale={self.lse_square_scale}, "
            f"softcap={self.softcap}"
        )


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """`liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy` as a layer.

    Args:
        ce_weight: `[V]` class weights or None; a buffer.
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap: as in `LigerCrossEntropyLoss`.
        accum_dtype: where the head's gradient is summed over chunks; None for the head's dtype.
        use_token_scaling: multiply each token's loss by the probability of its target, held constant.
        return_z_loss, return_token_accuracy, return_predicted_tokens: return a `CrossEntropyOutput`.
    Raises:
        ValueError: an option out of its range.
    """

    ce_weight: Tensor | None

    def __init__(
        self, ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        n_classes = 1 if ce_weight is None else ce_weight.shape[0]
        check_options(
            type(self).__name__, n_classes, ce_weight, label_smoothing, reduction, softcap
        )
        self.register_buffer("ce_weight", ce_weight)
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """Head weight `[V, H]`, hidden states `[N, H]`, class indices `[N]`.

        Published guides also pass hidden states first. The operand with one row a label is the hidden states; where
        both fit, the order is the one above.
        """
        rows = target.numel()
        if lin_weight.shape[:-1].numel() == rows != _input.shape[:-1].numel():
            lin_weight, _input = _input, lin_weight
        return functional.liger_fused_linear_cross_entropy(
            _input, lin_weight, target, bias, self.ce_weight, ignore_index=self.ignore_index,
            lse_square_scale=self.lse_square_scale, label_smoothing=self.label_smoothing, reduction=self.reduction,
            softcap=self.softcap, return_z_loss=self.return_z_loss, accum_dtype=self.accum_dtype,
            use_token_scaling=self.use_token_scaling, return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
        )  # fmt: skip

    extra_repr = LigerCrossEntropyLoss.extra_repr


class LigerVocabParallelCrossEntropy(nn.Module):
    """`liger_kernel.ops.vocab_parallel_cross_entropy.vocab_parallel_cross_entropy` as a layer.

    Args:
        ignore_index: the target of tokens that do not count.
        label_smoothing: in [0, 1); label_smoothing_formula "pytorch" or "megatron"; label_smoothing_mode "global"
            (over the whole vocabulary) or "partition" (over each rank's own part, as Megatron does).
        reduction: "none" only.
    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none",
        label_smoothing_formula: str = "pytorch", label_smoothing_mode: str = "global",
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        if reduction != "none":
            raise ValueError(
                f'{name}: reduction must be "none"; got {reduction!r}. Reduce the result.'
            )
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"{name}: label_smoothing must lie in [0, 1); got {label_smoothing}.")
        validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.label_smoothing_formula = label_smoothing_formula
        self.label_smoothing_mode = label_smoothing_mode

    def forward(
        self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None
    ) -> Tensor:
        """This rank's columns of the logits `[S, B, V_local]` and global ids `[S, B]` -> `[S, B]` fp32."""
        return LigerVocabParallelCEFunction.apply(
            vocab_parallel_logits, target, tp_group, self.ignore_index, self.label_smoothing,
            self.label_smoothing_formula, self.label_smoothing_mode,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"formula={self.label_smoothing_formula!r}, mode={self.label_smoothing_mode!r}"
        )
