"""KTO: preference from single sequences labelled desirable or not (arXiv 2402.01306)."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.chunked_loss import objectives
from liger_kernel.chunked_loss.fused_linear_unpaired_preference import (
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_kernel.chunked_loss.preference import HeadOptions, check_chunk_size
from liger_kernel.ops._op import require


class LigerFusedLinearKTOFunction(LigerFusedLinearUnpairedPreferenceBase):
    """Mean over sequences of `objectives.kto`."""

    @staticmethod
    def preference_loss_fn(
        log_prob_chunk: Tensor, preference_labels_chunk: Tensor, full_target: Tensor,
        ref_log_prob_chunk: Tensor | None = None, beta: float = 0.1, kl: Tensor | float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """-> share of the loss, sums of the rewards beta * (l - l_ref) of desirable and undesirable sequences."""
        labels = preference_labels_chunk
        ratios = (
            log_prob_chunk if ref_log_prob_chunk is None else log_prob_chunk - ref_log_prob_chunk
        )
        share = objectives.kto(ratios, labels, beta, kl).sum() / full_target.shape[0]
        rewards = beta * ratios
        return share, torch.where(labels, rewards, 0).sum(), torch.where(labels, 0, rewards).sum()

    @classmethod
    def apply(
        cls, _input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor | None,
        bias: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, kl: Tensor | float | None = None, ignore_index: int = -100, beta: float = 0.1,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
        **options: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """As `LigerFusedLinearKTOLoss`, with the labels before the bias and a reference by default; options: fields of
        `HeadOptions`.
        """
        if isinstance(kl, Tensor):
            require(
                kl.numel() == 1, f"{cls.__name__}: kl must be one number; got {list(kl.shape)}."
            )
            kl = kl.detach().to(_input.device).reshape(())
        return cls.forward(
            cls, None, _input, weight, target, preference_labels, bias, chunk_size, ignore_index,
            use_ref_model=use_ref_model, ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias,
            average_log_prob=average_log_prob, head=HeadOptions(**options), beta=beta, kl=kl,
        )  # fmt: skip


class LigerFusedLinearKTOLoss(nn.Module):
    """KTO of single sequences on a linear head, without the logits.

    Args:
        ignore_index: the target of tokens that do not count.
        beta: temperature of the preference.
        compiled, chunk_size: accepted; see `chunked_loss.preference`.
        use_ref_model: compare with a reference model; without, its log-probabilities count as zero.
        average_log_prob: a sequence counts with the mean of its tokens instead of their sum.
        options: fields of `HeadOptions` by keyword (softcap, pre_scale, post_scale, ref_head, memory_budget, ...).
    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True, use_ref_model: bool = False,
        average_log_prob: bool = False, chunk_size: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        check_chunk_size(type(self).__name__, chunk_size)
        HeadOptions(**options)  # raises now for what would be wrong later
        self.ignore_index = ignore_index
        self.beta = beta
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.average_log_prob = average_log_prob
        self.chunk_size = chunk_size
        self.options = options

    def forward(
        self, _input: Tensor, lin_weight: Tensor, target: Tensor, bias: Tensor | None = None,
        preference_labels: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, kl: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Hidden states `[B, T, H]`, head weight `[V, H]`, targets `[B, T]`, bias `[V]`, labels bool `[B]` (True:
        desirable), the reference's hidden states and head (not read with use_ref_model=False), and kl, the estimate of
        the policy's divergence from the reference, taken as it is and held constant; None for zero.

        -> loss, (chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum, chosen_rewards_sum,
        rejected_rewards_sum): scalars
        """
        return LigerFusedLinearKTOFunction.apply(
            _input, lin_weight, target, preference_labels, bias, ref_input, ref_weight, ref_bias, kl,
            self.ignore_index, self.beta, self.compiled, self.use_ref_model, self.average_log_prob, self.chunk_size,
            **self.options,
        )  # fmt: skip
