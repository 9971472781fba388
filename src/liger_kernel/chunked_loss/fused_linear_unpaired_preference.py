"""The base class of unpaired preference losses: bring a formula, get the engine."""

from typing import Any

from torch import Tensor

from liger_kernel.chunked_loss.preference import (
    HeadOptions,
    check_chunk_size,
    reference_of,
    unpaired_loss,
)


class LigerFusedLinearUnpairedPreferenceBase:
    """A loss of sequences labelled desirable or not. Subclass it, define `preference_loss_fn`, call
    `apply`; see `LigerFusedLinearPreferenceBase`.
    """

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """(log_prob_chunk, preference_labels_chunk, full_target, **loss_kwargs) -> loss or (loss, *metrics).

        Gets the sequences of one chunk: `[k]` log-probabilities and bools; full_target is the whole batch's `[B, T]`.
        With a reference also ref_log_prob_chunk `[k]`. The loss is the chunk's share of the mean over B sequences:
        shares are added, and so are metrics that are scalars; vectors are joined.
        """
        raise NotImplementedError("An unpaired preference loss must define preference_loss_fn.")

    @staticmethod
    def forward(
        cls: Any,  # pyright: ignore[reportSelfClsParameterName]
        ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor | None,
        bias: Tensor | None = None, chunk_size: int = 1, ignore_index: int = -100, compiled: bool = True,
        use_ref_model: bool = False, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, average_log_prob: bool = False, head: HeadOptions | None = None,
        **loss_kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """The loss of `[B, T, H]` hidden states; arguments as in `LigerFusedLinearPreferenceBase.forward`.

        Args:
            preference_labels: bool `[B]`, True for desirable sequences ("chosen").
        Returns:
            loss, (chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum, *metrics of the
            formula): scalars. The logits are summed over valid tokens and the vocabulary.
        Raises:
            ValueError: missing labels, shapes that do not fit, a missing reference, options out of range.
        """
        op = cls.__name__
        check_chunk_size(op, chunk_size)
        return unpaired_loss(
            op, cls.preference_loss_fn, _input, weight, target, preference_labels, bias,
            reference_of(op, use_ref_model, ref_input, ref_weight, ref_bias), ignore_index=ignore_index,
            average=average_log_prob, options=head or HeadOptions(), loss_kwargs=loss_kwargs,
        )  # fmt: skip

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """`forward` without cls and ctx, by position or keyword."""
        if cls.forward is LigerFusedLinearUnpairedPreferenceBase.forward:
            return cls.forward(cls, None, *args, **kwargs)
        return cls.forward(None, *args, **kwargs)
