"""Vocabulary-parallel cross entropy with Megatron's conventions."""

from typing import Any

from torch import Tensor

from liger_kernel.transformers.loss import LigerVocabParallelCrossEntropy


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """Per-token loss of logits `[S, B, V_local]`; smoothing as Megatron's: over each rank's own part of the vocabulary.

    Megatron masks the loss afterwards and leaves any number where there is no label, BERT's data for one -1. So every
    negative target counts as ignored: its loss and gradient are 0. One beyond the vocabulary still gives NaN.

    Args:
        ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode: as in
            `LigerVocabParallelCrossEntropy`.
    """

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none",
        label_smoothing_formula: str = "megatron", label_smoothing_mode: str = "partition",
    ) -> None:  # fmt: skip
        super().__init__(
            ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode
        )

    def forward(
        self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None
    ) -> Tensor:
        """This rank's columns of the logits `[S, B, V_local]` and global ids `[S, B]` -> `[S, B]` fp32."""
        target = target.where(target >= 0, self.ignore_index)
        return super().forward(vocab_parallel_logits, target, tp_group)
