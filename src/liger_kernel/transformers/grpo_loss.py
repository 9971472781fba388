"""GRPO and its relatives on given logits `[B, L + 1, V]`, for models whose logits exist anyway.

The formulas are those of `chunked_loss.grpo_objectives`, on log-probabilities of `ops.selective_log_softmax`: one read
of the logits forward, one read and write backward. Without logits in memory: `LigerFusedLinearGRPOLoss`.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.grpo_loss import (
    check_samples,
    metrics,
    reduction_weights,
    samples,
)
from liger_kernel.chunked_loss.grpo_objectives import (
    GRPOOptions,
    get_gamma_weights,
    token_terms,
)
from liger_kernel.ops.selective_log_softmax import completion_logps, fused_selective_log_softmax

__all__ = [
    "GrpoLossFunction",
    "LigerFusedLinearPPOBase",
    "fused_selective_log_softmax",
    "get_gamma_weights",
    "triton_grpo_loss",
]


def triton_grpo_loss(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None = None, temperature: float = 0.9, beta: float = 0.04, eps_low: float = 0.2,
    eps_high: float = 0.4, inplace: bool = False, loss_type: str = "dapo", max_completion_length: int | None = None,
    importance_sampling_level: str = "token", reduce: bool = False, sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
    use_bias_correction_kl: bool = False, num_items_in_batch: Tensor | float | None = None, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
) -> Any:  # fmt: skip
    """The loss of sampled completions from their logits.

    Args:
        logits: `[B, L + 1, V]`; those at place t predict completion_ids[:, t], the last place is not used.
        old_logp, ref_logp: `[B, L]` log-probs of the policy that sampled (None: the present one, ratio 1) and of the
            reference (needed unless beta is 0).
        completion_ids: `[B, L]`. advantages: `[B]`. completion_mask: `[B, L]`, 0 where a token does not count.
        inplace: backward may write the gradient over the logits, which must not be read afterwards. False by default,
            so that nothing of the caller's changes unasked.
        reduce: give the loss, not its terms.
        eps_low, eps_high and the rest: as in `LigerFusedLinearGRPOLoss`.
    Returns:
        reduce=False: per-token loss, KL (None if beta is 0) and 1 where the ratio was clipped, all `[B, L]` fp32 and 0
        where masked. reduce=True: the loss, and the list of mean KL (unless beta is 0) and clip ratio. Only the loss
        is differentiable, in logits.
    Raises:
        ValueError: an unknown loss_type or level, options the loss would ignore, shapes that do not fit, no reference
            although beta != 0, dr_grpo reduced without max_completion_length.
    """
    options = GRPOOptions(
        beta, eps_low, eps_high, loss_type, max_completion_length, importance_sampling_level, sapo_temperature_pos,
        sapo_temperature_neg, delta, use_bias_correction_kl, vespo_k_pos, vespo_lambda_pos, vespo_k_neg,
        vespo_lambda_neg,
    )  # fmt: skip
    return _loss(
        logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, inplace, reduce,
        vllm_is_ratio, num_items_in_batch, options,
    )  # fmt: skip


class GrpoLossFunction:
    """The loss under the argument order of the contract; defaults differ from `triton_grpo_loss`."""

    @staticmethod
    def apply(
        logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
        completion_mask: Tensor | None, temperature: float, beta: float, eps_low: float, eps_high: float,
        inplace: bool, loss_type: str = "grpo", max_completion_length: int | None = None, reduce: bool = True,
        importance_sampling_level: str = "token", sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
        use_bias_correction_kl: bool = False, num_items_in_batch: Tensor | float | None = None,
        phi_seq: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """-> what `triton_grpo_loss` returns. phi_seq `[B, 1]`: vespo's weight, None to compute it."""
        options = GRPOOptions(
            beta, eps_low, eps_high, loss_type, max_completion_length, importance_sampling_level,
            sapo_temperature_pos, sapo_temperature_neg, delta, use_bias_correction_kl,
        )  # fmt: skip
        return _loss(
            logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, inplace, reduce,
            vllm_is_ratio, num_items_in_batch, options, phi_seq,
        )  # fmt: skip


def _loss(
    logits: Tensor, old: Tensor | None, ref: Tensor | None, ids: Tensor, advantages: Tensor, mask: Tensor | None,
    temperature: float, inplace: bool, reduce: bool, is_ratio: Tensor | None, num_items: Tensor | float | None,
    options: GRPOOptions, phi: Tensor | None = None,
) -> Any:  # fmt: skip
    options.check()
    logp = completion_logps(logits, ids, mask, temperature, inplace)
    mask = torch.ones_like(ids) if mask is None else mask
    kept = (mask != 0).to(logp.dtype)
    weight = reduction_weights(mask, mask, num_items, options, logp.dtype) if reduce else kept
    check_samples(mask, advantages, old, ref, is_ratio, options)
    given = samples(mask, weight, advantages, old, ref, is_ratio, logp.dtype, phi)
    loss, kl, clipped = token_terms(logp, None, given, options)
    loss, clipped = loss * weight, clipped.to(logp.dtype)
    kl = None if kl is None else kl.detach() * kept
    if not reduce:
        return loss, kl, clipped
    drift = clipped.new_zeros(()) if kl is None else kl.sum()
    return loss.sum(), list(metrics(torch.stack([drift, clipped.sum()]), mask, options))


def _reduce_grpo_loss(
    per_token_loss: Tensor, completion_mask: Tensor, loss_type: str, max_completion_length: int | None,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    """Per-token terms `[B, L]` to the loss, as `loss_type` divides them."""
    options = GRPOOptions(loss_type=loss_type, max_completion_length=max_completion_length)
    options.check()
    mask, dtype = completion_mask, per_token_loss.dtype
    weight = reduction_weights(mask, mask, num_items_in_batch, options, dtype)
    return (per_token_loss * weight).sum()


def _masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the places whose mask is not 0 (None: all); 0 if there are none."""
    if mask is None:
        return values.mean()
    return torch.where(mask != 0, values, 0.0).sum() / (mask != 0).sum().clamp(min=1)
