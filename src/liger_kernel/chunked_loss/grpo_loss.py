"""GRPO and its relatives on hidden states and a head: loss and gradients in one pass, without logits.

The formulas are those of `grpo_objectives`, the chunks those of the engine (`ops.head.objective`): where tokens are
independent any chunk of tokens will do, else whole sequences. Masked tokens are dropped before the first product.

Memory  dh, dW and db from forward to backward; meanwhile one chunk of logits within memory_budget.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.chunked_loss.fused_linear_ppo import (
    NO_REFERENCE,
    LigerFusedLinearPPOBase,
    by_sequence,
    check_shapes,
    masked_targets,
    reference_head,
    reference_logps,
    sequence_groups,
)
from liger_kernel.chunked_loss.grpo_objectives import (
    BY_ITEMS,
    GRPOOptions,
    Samples,
    clip_coef_fn,
    get_gamma_weights,
    k3_loss_fn,
    sapo_loss_fn,
    share,
    token_weights,
)
from liger_kernel.chunked_loss.preference import check_reference_slice
from liger_kernel.ops._op import compute_dtype, once, require
from liger_kernel.ops.head.objective import Tokens, fused_linear_objective

__all__ = [
    "LigerFusedLinearGRPOFunction",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearPPOBase",
    "clip_coef_fn",
    "get_gamma_weights",
    "k3_loss_fn",
    "sapo_loss_fn",
]


class LigerFusedLinearGRPOFunction(LigerFusedLinearPPOBase):
    """The GRPO family under the argument order of the contract."""

    @staticmethod
    def ppo_loss_fn(
        per_token_logps: Tensor, attention_mask: Tensor, advantages: Tensor, full_attention_mask: Tensor,
        ref_per_token_logps: Tensor | None = None, old_per_token_logps: Tensor | None = None, epsilon_low: float = 0.2,
        epsilon_high: float = 0.2, beta: float = 0.04, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """The loss on given log-probs `[b, T]`, of sequences that are part of full_attention_mask `[B, T]`.

        -> their share of the loss, and of the metrics (KL unless beta is 0, clip ratio). kwargs are ignored.
        """
        options = GRPOOptions(
            beta, epsilon_low, epsilon_high, loss_type, max_completion_length, importance_sampling_level,
            sapo_temperature_pos, sapo_temperature_neg, delta, use_bias_correction_kl, vespo_k_pos, vespo_lambda_pos,
            vespo_k_neg, vespo_lambda_neg,
        )  # fmt: skip
        options.check()
        dtype = per_token_logps.dtype
        weights = reduction_weights(
            attention_mask, full_attention_mask, num_items_in_batch, options, dtype
        )
        known = (advantages, old_per_token_logps, ref_per_token_logps, vllm_is_ratio)
        check_samples(attention_mask, *known, options)
        given = samples(attention_mask, weights, *known, dtype)
        loss, sums = share(per_token_logps, None, given, options)
        return loss, metrics(sums, full_attention_mask, options)

    @classmethod
    def apply(
        cls, _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor, advantages: Tensor,
        bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, beta: float = 0.04, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
        loss_type: str = "dapo", max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1, vllm_is_ratio: Tensor | None = None,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None, *, entropy_coef: float = 0.0, softcap: float | None = None,
        pre_scale: float = 1.0, post_scale: float = 1.0, ref_head: Mapping[str, Any] | None = None,
        memory_budget: int | float | str | None = None, logits_dtype: Any = None, group: Any = None,
        return_count: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """-> loss, metrics. All arguments as in `LigerFusedLinearGRPOLoss`, in another order."""
        options = GRPOOptions(
            beta, epsilon_low, epsilon_high, loss_type, max_completion_length, importance_sampling_level,
            sapo_temperature_pos, sapo_temperature_neg, delta, use_bias_correction_kl, vespo_k_pos, vespo_lambda_pos,
            vespo_k_neg, vespo_lambda_neg, entropy_coef,
        )  # fmt: skip
        options.check()
        options.check_denominator()
        check_shapes(_input, selected_token_ids, attention_mask, advantages)
        head = {
            "temperature": temperature, "softcap": softcap, "pre_scale": pre_scale, "post_scale": post_scale,
            "memory_budget": memory_budget, "logits_dtype": logits_dtype,
        }  # fmt: skip
        targets = masked_targets(selected_token_ids, attention_mask)
        reference = None
        if beta != 0:
            theirs = (ref_input, ref_weight, ref_bias) if use_ref_model else (None, None, None)
            if ref_per_token_logps is None and theirs[1] is not None:
                check_reference_slice("GRPO", group, weight, theirs[1])
            reference = reference_logps(
                ref_per_token_logps, *theirs, targets, group=group, **reference_head(head, ref_head)
            )
        dtype = compute_dtype(_input)
        known = (advantages, old_per_token_logps, reference, vllm_is_ratio)
        check_samples(attention_mask, *known, options)

        def given() -> Samples:
            weights = reduction_weights(
                attention_mask, attention_mask, num_items_in_batch, options, dtype
            )
            return samples(attention_mask, weights, *known, dtype)

        head["process_group"] = group
        loss, sums = _through_head(_input, weight, bias, targets, once(given), options, head)
        found = metrics(sums, attention_mask, options)
        return loss, (*found, _counts(attention_mask)) if return_count else found


def reduction_weights(
    mask: Tensor, full_mask: Tensor, num_items: Tensor | float | None, options: GRPOOptions, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """`token_weights`, with the normalizer of the losses that are divided by the tokens of the global batch."""
    normalizer = None
    if options.loss_type in BY_ITEMS:
        normalizer = LigerFusedLinearPPOBase._compute_dapo_normalizer(full_mask, num_items)
    return token_weights(mask != 0, full_mask != 0, options, normalizer, dtype)


def check_samples(
    mask: Tensor, advantages: Tensor, old: Tensor | None, ref: Tensor | None, is_ratio: Tensor | None,
    options: GRPOOptions,
) -> None:  # fmt: skip
    """ValueError for shapes that do not fit."""
    shape = mask.shape
    require(options.beta == 0 or ref is not None, NO_REFERENCE)
    require(
        advantages.shape == shape[:1],
        f"GRPO: advantages must be [{shape[0]}], one a sequence; got {list(advantages.shape)}.",
    )
    for name, x in (("old_per_token_logps", old), ("ref_per_token_logps", ref)):
        require(
            x is None or x.shape == shape,
            f"GRPO: {name} must be {list(shape)}; got {None if x is None else list(x.shape)}.",
        )
    if is_ratio is not None:
        require(
            is_ratio.shape in (shape, shape[:1], (shape[0], 1)),
            f"GRPO: vllm_is_ratio must be [{shape[0]}], [{shape[0]}, 1] or {list(shape)}; got {list(is_ratio.shape)}.",
        )


def samples(
    mask: Tensor, weight: Tensor, advantages: Tensor, old: Tensor | None, ref: Tensor | None, is_ratio: Tensor | None,
    dtype: torch.dtype, phi: Tensor | None = None,
) -> Samples:  # fmt: skip
    """Arguments as the contract has them, which `check_samples` has seen."""
    if is_ratio is not None:
        is_ratio = is_ratio.reshape(mask.shape[0], -1)
    known = (advantages[:, None], old, ref, is_ratio, phi)
    return Samples(mask != 0, weight, *(None if x is None else x.detach().to(dtype) for x in known))  # type: ignore[arg-type]


def metrics(sums: Tensor, full_mask: Tensor, options: GRPOOptions) -> tuple[Tensor, ...]:
    """Mean KL (unless beta is 0) and clip ratio over the tokens of the full mask."""
    means = sums / (full_mask != 0).sum().clamp(min=1)
    return (means[1],) if options.beta == 0 else (means[0], means[1])


def _counts(mask: Tensor) -> Tensor:
    """What `return_count` adds to the metrics."""
    tokens = (mask != 0).sum().float()
    return torch.stack([torch.full_like(tokens, mask.shape[0]), tokens])


def _through_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, given: Callable[[], Samples],
    options: GRPOOptions, head: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss, and the sums of `share`, through the engine; given is asked for when its first product is under way."""
    every = once(lambda: given().flat())

    def objective(tokens: Tokens) -> tuple[Tensor, Tensor]:
        logp, entropy = tokens.logp, tokens.entropy
        if not options.by_sequence:
            return share(logp, entropy, every().tokens(tokens.index), options)
        width = targets.shape[1]
        logp = by_sequence(logp, tokens, width)
        entropy = None if entropy is None else by_sequence(entropy, tokens, width)
        return share(logp, entropy, given().sequences(*tokens.groups), options)

    groups = sequence_groups(targets) if options.by_sequence else {}
    loss, parts = fused_linear_objective(
        hidden, weight, targets, objective, bias=bias, entropy=options.entropy_coef != 0, dense=True, **groups, **head
    )  # fmt: skip
    return loss, torch.stack([*parts, given().weight.new_zeros(2)]).sum(0)


# Read when the loss is called: trainers write them after construction.
_OPTIONS = (
    "beta", "compiled", "use_ref_model", "chunk_size", "epsilon_low", "epsilon_high", "loss_type",
    "max_completion_length", "importance_sampling_level", "sapo_temperature_pos", "sapo_temperature_neg",
    "temperature", "delta", "use_bias_correction_kl", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg", "entropy_coef", "softcap", "pre_scale", "post_scale", "ref_head",
    "memory_budget", "logits_dtype", "group", "return_count",
)  # fmt: skip


class LigerFusedLinearGRPOLoss(nn.Module):
    """GRPO, BNPO, Dr. GRPO, DAPO, LUSPO, CISPO, SAPO or VESPO on hidden states and a head.

    Args:
        beta: weight of the KL to a reference model; 0 needs none.
        epsilon_low, epsilon_high: the ratio is clipped to [1 - low, 1 + high]; cispo caps it at epsilon_high itself.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo" (formulas and denominators:
            `grpo_objectives`).
        max_completion_length: the denominator of dr_grpo, which needs it.
        importance_sampling_level: "token", or "sequence" (GSPO) for one ratio a sequence: grpo to luspo only.
        sapo_temperature_pos, sapo_temperature_neg: of sapo's gate, for A > 0 and for the rest.
        temperature: divides the logits, the reference's too.
        delta: upper bound of the ratio on the side that is not clipped: grpo to luspo only.
        use_bias_correction_kl: multiply the KL of a token by its ratio.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: of vespo's weight, for A >= 0 and for the rest.
        use_ref_model: may ref_input and ref_weight serve as the reference.
        compiled, chunk_size: accepted; the memory plan of the engine decides.
        entropy_coef: subtract this times each token's entropy from its loss.
        softcap, pre_scale, post_scale: transforms between product and logits.
        ref_head: those of the reference's, a dict of the same three names; None for the policy's own.
        memory_budget, logits_dtype: as in `fused_linear_cross_entropy`.
        group: the torch.distributed group over which the vocabulary is split, see `linear_logprob`; the reference's
            head is this rank's slice as well. Not needed for DTensors.
        return_count: the metrics end with this call's `[2]` fp32 counts, sequences and tokens. Losses of micro-batches
            that do not take num_items_in_batch, times their share of the step's sequences (bnpo: of its tokens), add
            up to the whole's.
    Raises:
        ValueError: an unknown loss_type or level, options the loss would ignore, values out of range.
    """

    def __init__(
        self, beta: float = 0.04, compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1,
        epsilon_low: float = 0.2, epsilon_high: float = 0.2, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0, *,
        entropy_coef: float = 0.0, softcap: float | None = None, pre_scale: float = 1.0, post_scale: float = 1.0,
        ref_head: Mapping[str, Any] | None = None, memory_budget: int | float | str | None = None,
        logits_dtype: Any = None, group: Any = None, return_count: bool = False,
    ):  # fmt: skip
        super().__init__()
        GRPOOptions(
            loss_type=loss_type, importance_sampling_level=importance_sampling_level, delta=delta,
            sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg,
        ).check()  # fmt: skip
        self.beta, self.use_ref_model, self.temperature = beta, use_ref_model, temperature
        self.compiled, self.chunk_size = compiled, chunk_size
        self.memory_budget, self.logits_dtype = memory_budget, logits_dtype
        self.group, self.return_count = group, return_count
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.loss_type, self.importance_sampling_level = loss_type, importance_sampling_level
        self.max_completion_length = max_completion_length
        self.use_bias_correction_kl, self.entropy_coef = use_bias_correction_kl, entropy_coef
        self.sapo_temperature_pos = sapo_temperature_pos
        self.sapo_temperature_neg = sapo_temperature_neg
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg
        self.softcap, self.pre_scale, self.post_scale = softcap, pre_scale, post_scale
        self.ref_head = ref_head

    def forward(
        self, _input: Tensor, lin_weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """The loss of sampled tokens.

        Args:
            _input: hidden states `[B, T, H]`. lin_weight `[V, H]`, bias `[V]`: the head.
            selected_token_ids: `[B, T]` the sampled ids. attention_mask: `[B, T]`, 0 where a token does not count.
            advantages: `[B]`.
            ref_per_token_logps: `[B, T]`, or ref_input `[B, T, H]`, ref_weight, ref_bias to make them from.
            old_per_token_logps: `[B, T]` under the policy that sampled; None for the present one (ratio 1).
            vllm_is_ratio: `[B]`, `[B, 1]` or `[B, T]` correction for a sampler that is not quite the policy.
            num_items_in_batch: tokens of the global batch, the denominator of dapo, cispo and vespo.
        Returns:
            loss fp32, differentiable in _input, lin_weight and bias; and (mean KL, clip ratio), or (clip ratio,) if
            beta is 0. No token at all: 0 with zero gradients.
        Raises:
            ValueError: shapes that do not fit, no reference although beta != 0, dr_grpo without max_completion_length.
        """
        options = {name: getattr(self, name) for name in _OPTIONS}
        return LigerFusedLinearGRPOFunction.apply(
            _input, lin_weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, vllm_is_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch, **options,
        )  # fmt: skip
