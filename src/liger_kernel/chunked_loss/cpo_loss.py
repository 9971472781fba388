"""CPO: contrastive preference optimisation (arXiv 2401.08417), without a reference model."""

from typing import Any

from torch import Tensor, nn

from liger_kernel.chunked_loss import objectives
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.preference import HeadOptions, check_chunk_size


class LigerFusedLinearCPOFunction(LigerFusedLinearPreferenceBase):
    """alpha * NLL + mean over pairs of `objectives.cpo`."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor, rejected_logps: Tensor, full_target: Tensor, beta: float = 0.1,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """-> share of the loss, chosen rewards beta * l, rejected rewards."""
        losses = objectives.cpo(chosen_logps, rejected_logps, beta, label_smoothing)
        share = losses.sum() / (full_target.shape[0] // 2)
        return share, beta * chosen_logps, beta * rejected_logps

    @classmethod
    def apply(
        cls, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
        beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0, compute_nll_loss: bool = True,
        compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1, **options: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """As `LigerFusedLinearCPOLoss`, hidden states first; options: fields of `HeadOptions`."""
        objectives.check_smoothing(cls.__name__, label_smoothing)
        return cls.forward(
            cls, None, _input, weight, target, bias, chunk_size, ignore_index, alpha, beta, compute_nll_loss,
            average_log_prob=average_log_prob, head=HeadOptions(**options), label_smoothing=label_smoothing,
        )  # fmt: skip


class LigerFusedLinearCPOLoss(nn.Module):
    """CPO of pairs on a linear head, without the logits.

    Args:
        ignore_index: the target of tokens that do not count.
        beta: temperature of the preference.
        alpha: weight of the NLL over the chosen tokens.
        label_smoothing: probability that a pair is labelled the wrong way round, in [0, 1].
        compute_nll_loss: whether to add the NLL.
        compiled, chunk_size: accepted; see `chunked_loss.preference`.
        average_log_prob: a sequence counts with the mean of its tokens instead of their sum.
        options: fields of `HeadOptions` by keyword (softcap, pre_scale, post_scale, memory_budget, ...).
    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        check_chunk_size(type(self).__name__, chunk_size)
        objectives.check_smoothing(type(self).__name__, label_smoothing)
        HeadOptions(**options)  # raises now for what would be wrong later
        self.ignore_index = ignore_index
        self.beta = beta
        self.alpha = alpha
        self.label_smoothing = label_smoothing
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.average_log_prob = average_log_prob
        self.chunk_size = chunk_size
        self.options = options

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Head weight `[V, H]`, hidden states `[2n, T, H]` (chosen, then rejected), targets `[2n, T]`, bias `[V]`.

        -> loss, (chosen_logps `[n]`, rejected_logps `[n]`, chosen_logits_mean, rejected_logits_mean, nll_loss,
        chosen_rewards `[n]`, rejected_rewards `[n]`)
        """
        return LigerFusedLinearCPOFunction.apply(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.alpha, self.label_smoothing,
            self.compute_nll_loss, self.compiled, self.average_log_prob, self.chunk_size, **self.options,
        )  # fmt: skip
