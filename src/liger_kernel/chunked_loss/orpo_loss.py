"""ORPO: NLL plus the odds ratio of length-normalised probabilities (arXiv 2403.07691)."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from liger_kernel.chunked_loss import objectives
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.preference import HeadOptions, check_chunk_size


class LigerFusedLinearORPOFunction(LigerFusedLinearPreferenceBase):
    """NLL + mean over pairs of `objectives.orpo`."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor, rejected_logps: Tensor, full_target: Tensor, beta: float = 0.1
    ) -> tuple[Tensor, ...]:
        """-> share of the loss, rewards beta * l of both, shares of the means of log sigmoid(o) and of o, where o
        is the difference of the log-odds.
        """
        n = full_target.shape[0] // 2
        odds = objectives.log_odds(chosen_logps) - objectives.log_odds(rejected_logps)
        share = objectives.orpo(odds, beta).sum() / n
        means = logsigmoid(odds).sum() / n, odds.sum() / n
        return share, beta * chosen_logps, beta * rejected_logps, *means

    @classmethod
    def apply(
        cls, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
        beta: float = 0.1, compute_nll_loss: bool = True, nll_target: Tensor | None = None, compiled: bool = True,
        chunk_size: int = 1, **options: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """As `LigerFusedLinearORPOLoss`, hidden states first; options: fields of `HeadOptions`."""
        return cls.forward(
            cls, None, _input, weight, target, bias, chunk_size, ignore_index, beta=beta,
            compute_nll_loss=compute_nll_loss, nll_target=nll_target, average_log_prob=True,
            head=HeadOptions(**options),
        )  # fmt: skip


class LigerFusedLinearORPOLoss(nn.Module):
    """ORPO of pairs on a linear head, without the logits.

    Args:
        ignore_index: the target of tokens that do not count.
        beta: weight of the odds ratio.
        compute_nll_loss: whether to add the NLL over the chosen tokens.
        compiled, chunk_size: accepted; see `chunked_loss.preference`.
        options: fields of `HeadOptions` by keyword (softcap, pre_scale, post_scale, memory_budget, ...).
    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = True, compiled: bool = True,
        chunk_size: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        check_chunk_size(type(self).__name__, chunk_size)
        HeadOptions(**options)  # raises now for what would be wrong later
        self.ignore_index = ignore_index
        self.beta = beta
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.chunk_size = chunk_size
        self.options = options

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Head weight `[V, H]`, hidden states `[2n, T, H]` (chosen, then rejected), targets `[2n, T]`, bias `[V]`.

        nll_target: `[2n, T]` (its chosen half is read) or `[n, T]`, other labels for the NLL, such as prompts too;
        that costs a pass of its own over the chosen half.
        -> loss, the seven metrics of `LigerFusedLinearCPOLoss` and log_odds_ratio (mean of log sigmoid(o)),
        log_odds_chosen (mean of o), o the difference of the log-odds
        """
        return LigerFusedLinearORPOFunction.apply(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.compute_nll_loss, nll_target,
            self.compiled, self.chunk_size, **self.options,
        )  # fmt: skip
