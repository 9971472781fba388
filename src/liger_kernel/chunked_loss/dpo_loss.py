"""DPO (arXiv 2305.18290) and the losses that share its inputs, by `loss_type`."""

from typing import Any

from torch import Tensor, nn

from liger_kernel.chunked_loss import objectives
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.preference import HeadOptions, check_chunk_size


class LigerFusedLinearDPOFunction(LigerFusedLinearPreferenceBase):
    """alpha * NLL + mean over pairs of `objectives.dpo`."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor, rejected_logps: Tensor, full_target: Tensor, ref_chosen_logps: Tensor | None = None,
        ref_rejected_logps: Tensor | None = None, beta: float = 0.1, loss_type: str = "sigmoid",
        label_smoothing: float = 0.0, discopop_tau: float = 0.05,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """-> share of the loss, chosen rewards beta * (l - l_ref), rejected rewards; l_ref = 0 without a reference."""
        chosen = chosen_logps if ref_chosen_logps is None else chosen_logps - ref_chosen_logps
        rejected = (
            rejected_logps if ref_rejected_logps is None else rejected_logps - ref_rejected_logps
        )
        losses = objectives.dpo(chosen, rejected, beta, loss_type, label_smoothing, discopop_tau)
        return losses.sum() / (full_target.shape[0] // 2), beta * chosen, beta * rejected

    @classmethod
    def apply(
        cls, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
        ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = False, compiled: bool = True,
        use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1, loss_type: str = "sigmoid",
        label_smoothing: float = 0.0, discopop_tau: float = 0.05, alpha: float = 1.0, **options: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """As `LigerFusedLinearDPOLoss`, hidden states first; options: fields of `HeadOptions`."""
        objectives.check_dpo(cls.__name__, loss_type, beta, label_smoothing, discopop_tau)
        return cls.forward(
            cls, None, _input, weight, target, bias, chunk_size, ignore_index, alpha, beta, compute_nll_loss,
            use_ref_model=use_ref_model, ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias,
            average_log_prob=average_log_prob or loss_type == "ipo", head=HeadOptions(**options), loss_type=loss_type,
            label_smoothing=label_smoothing, discopop_tau=discopop_tau,
        )  # fmt: skip


class LigerFusedLinearDPOLoss(nn.Module):
    """The DPO family of pairs on a linear head, without the logits.

    Args:
        ignore_index: the target of tokens that do not count.
        beta: temperature of the preference, > 0.
        alpha: weight of the NLL over the chosen tokens.
        compute_nll_loss: whether to add the NLL.
        compiled, chunk_size: accepted; see `chunked_loss.preference`.
        use_ref_model: compare with a reference model; without, its log-probabilities count as zero.
        average_log_prob: a sequence counts with the mean of its tokens instead of their sum. "ipo" always does.
        loss_type: "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero",
            "apo_down" or "discopop": `objectives.DPO_LOSSES`, where their papers stand.
        label_smoothing: probability that a pair is labelled the wrong way round: in [0, 1] for "sigmoid" (conservative
            DPO), [0, 0.5) for "robust", (0, 1) for "exo_pair"; the others know none and take only 0.
        discopop_tau: temperature of the blend in "discopop", > 0.
        options: fields of `HeadOptions` by keyword (softcap, pre_scale, post_scale, ref_head, memory_budget, ...).
    Raises:
        ValueError: an unknown loss_type, an option out of its range or without meaning for the loss_type.
    """

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, compute_nll_loss: bool = False,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
        loss_type: str = "sigmoid", label_smoothing: float = 0.0, discopop_tau: float = 0.05, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        check_chunk_size(name, chunk_size)
        objectives.check_dpo(name, loss_type, beta, label_smoothing, discopop_tau)
        HeadOptions(**options)  # raises now for what would be wrong later
        self.ignore_index = ignore_index
        self.beta = beta
        self.alpha = alpha
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.average_log_prob = average_log_prob
        self.chunk_size = chunk_size
        self.loss_type = loss_type
        self.label_smoothing = label_smoothing
        self.discopop_tau = discopop_tau
        self.options = options

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Head weight `[V, H]`, hidden states `[2n, T, H]` (chosen, then rejected), targets `[2n, T]`, bias `[V]`, and
        the reference's hidden states and head, of any width; not read with use_ref_model=False.

        -> loss, the seven metrics of `LigerFusedLinearCPOLoss`; rewards are beta * (l - l_ref)
        """
        return LigerFusedLinearDPOFunction.apply(
            _input, lin_weight, target, bias, ref_input, ref_weight, ref_bias, self.ignore_index, self.beta,
            self.compute_nll_loss, self.compiled, self.use_ref_model, self.average_log_prob, self.chunk_size,
            self.loss_type, self.label_smoothing, self.discopop_tau, self.alpha, **self.options,
        )  # fmt: skip
