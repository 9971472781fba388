"""A policy-gradient loss of your own on the vocabulary head engine, by subclassing.

    class Reinforce(LigerFusedLinearPPOBase):
        @staticmethod
        def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, **options):
            per_token = -advantages[:, None] * per_token_logps * attention_mask
            return per_token.sum() / full_attention_mask.sum(), ()

    loss, metrics = Reinforce.apply(hidden, weight, token_ids, mask, advantages)

The function sees whole sequences, as many at a time as the memory plan allows, and divides by what the full mask says;
the engine makes log-probabilities and gradients in three matrix products. Masked tokens are dropped before the first.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from liger_kernel.ops._op import require
from liger_kernel.ops.head.objective import Tokens, fused_linear_objective
from liger_kernel.ops.linear_logprob import linear_logprob

NO_REFERENCE = (
    "GRPO: beta != 0 needs a reference. Pass ref_per_token_logps, or ref_input and ref_weight with use_ref_model=True, "
    "or set beta=0."
)


class _Context:
    """Where an overriding `forward` may leave what it likes."""


class LigerFusedLinearPPOBase:
    """Base of losses over sampled sequences. A subclass defines `ppo_loss_fn`, and `apply` is the loss.

    `apply` takes the arguments of `forward` after ctx and is differentiable in the input, weight and bias. Where the
    contract has an autograd Function this is a plain composition of differentiable ops: there is no `backward` to
    write, and a subclass that overrides `forward` finds in ctx an empty namespace.
    """

    @staticmethod
    def ppo_loss_fn(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Some sequences' share of the loss, and metrics: scalars are summed over calls, others concatenated.

        Called with keywords: per_token_logps `[b, T]` fp32 (0 where masked), attention_mask `[b, T]`, advantages `[b]`,
        full_attention_mask `[B, T]`, ref_per_token_logps, old_per_token_logps, vllm_is_ratio (`[b, ...]` or None), and
        the options of `forward` by name.
        """
        raise NotImplementedError(
            "ppo_loss_fn: a subclass of LigerFusedLinearPPOBase must define it as a static method."
        )

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """-> loss, metrics. Arguments: those of `forward` after ctx."""
        forward: Any = cls.forward
        whose = (cls,) if forward is LigerFusedLinearPPOBase.forward else ()
        return forward(*whose, _Context(), *args, **kwargs)

    @staticmethod  # with cls as an argument, so that overriding class methods may call super().forward(cls=cls, ...)
    def forward(
        cls: type["LigerFusedLinearPPOBase"],  # pyright: ignore[reportSelfClsParameterName]
        ctx: Any, _input: Tensor, weight: Tensor, selected_token_ids: Tensor,
        attention_mask: Tensor, advantages: Tensor, bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None, old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
        epsilon_low: float = 0.2, epsilon_high: float = 0.2, beta: float = 0.04, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token", temperature: float = 1.0,
        compiled: bool = True, use_ref_model: bool = False, chunk_size: int = 1, sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
        use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0, vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0, num_items_in_batch: Tensor | float | None = None, *,
        softcap: float | None = None, pre_scale: float = 1.0, post_scale: float = 1.0,
        ref_head: Mapping[str, Any] | None = None, memory_budget: int | float | str | None = None,
        logits_dtype: Any = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """The loss over `_input` `[B, T, H]`, token ids and mask `[B, T]`, advantages `[B]`.

        With use_ref_model and beta != 0 reference log-probs are those given, or those of ref_input and ref_weight,
        under the transforms ref_head, a dict of softcap, pre_scale, post_scale, if they are not the policy's.
        compiled and chunk_size have no meaning here: the memory plan decides.
        """
        check_shapes(_input, selected_token_ids, attention_mask, advantages)
        head = {
            "temperature": temperature, "softcap": softcap, "pre_scale": pre_scale, "post_scale": post_scale,
            "memory_budget": memory_budget, "logits_dtype": logits_dtype,
        }  # fmt: skip
        targets = masked_targets(selected_token_ids, attention_mask)
        reference = ref_per_token_logps
        if use_ref_model and beta != 0:
            theirs = (ref_input, ref_weight, ref_bias)
            reference = reference_logps(
                ref_per_token_logps, *theirs, targets, **reference_head(head, ref_head)
            )
            require(reference is not None, NO_REFERENCE)
        rows = {
            "attention_mask": attention_mask, "advantages": advantages, "ref_per_token_logps": reference,
            "old_per_token_logps": old_per_token_logps, "vllm_is_ratio": vllm_is_ratio,
        }  # fmt: skip
        options = {
            "full_attention_mask": attention_mask, "epsilon_low": epsilon_low, "epsilon_high": epsilon_high,
            "beta": beta, "loss_type": loss_type, "max_completion_length": max_completion_length,
            "importance_sampling_level": importance_sampling_level, "sapo_temperature_pos": sapo_temperature_pos,
            "sapo_temperature_neg": sapo_temperature_neg, "delta": delta,
            "use_bias_correction_kl": use_bias_correction_kl, "vespo_k_pos": vespo_k_pos,
            "vespo_lambda_pos": vespo_lambda_pos, "vespo_k_neg": vespo_k_neg, "vespo_lambda_neg": vespo_lambda_neg,
            "num_items_in_batch": num_items_in_batch,
        }  # fmt: skip

        def objective(tokens: Tokens) -> tuple[Tensor, Any]:
            logps = by_sequence(tokens.logp, tokens, targets.shape[1])
            return cls._compute_loss_from_logps(logps, tokens.groups, rows, options)

        loss, parts = fused_linear_objective(
            _input,
            weight,
            targets,
            objective,
            bias=bias,
            dense=True,
            **sequence_groups(targets),
            **head,
        )
        return loss, tuple(_joined(list(each)) for each in zip(*parts, strict=True))

    @classmethod
    def _compute_loss_from_logps(
        cls, per_token_logps: Tensor, span: tuple[int, int], rows: dict[str, Any], options: dict[str, Any]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """`ppo_loss_fn` of the sequences in the half-open `span`, metrics detached."""
        some = {name: None if x is None else x[slice(*span)] for name, x in rows.items()}
        loss, metrics = cls.ppo_loss_fn(per_token_logps=per_token_logps, **some, **options)
        return loss, tuple(torch.as_tensor(m).detach() for m in metrics)

    @staticmethod
    def chunk_forward(
        input_chunk: Tensor, weight: Tensor, selected_token_ids: Tensor, bias: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """Log-probs `[b, T]` fp32 of the selected tokens, differentiable, from hidden states `[b, T, H]`."""
        return linear_logprob(
            input_chunk, weight, selected_token_ids, bias=bias, temperature=temperature
        ).logp

    @staticmethod
    def _compute_dapo_normalizer(
        attention_mask: Tensor, num_items_in_batch: Tensor | float | None = None
    ) -> Tensor:
        """Tokens of the global batch, at least 1, over the number of ranks: a 0-dim fp32 tensor.

        Ranks average their gradients, so the division makes unequal ranks add up to one big batch. num_items_in_batch
        is the number over all ranks and accumulation steps; without it the masks of all ranks are counted (every rank
        must then call this).
        """
        several = distributed.is_available() and distributed.is_initialized()
        if num_items_in_batch is None:
            items = (attention_mask != 0).sum().float()
            if several:
                distributed.all_reduce(items)
        else:
            items = torch.as_tensor(num_items_in_batch, dtype=torch.float32)
            items = items.to(attention_mask.device, non_blocking=True)
        return items.clamp(min=1) / (distributed.get_world_size() if several else 1)


def check_shapes(hidden: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor) -> None:
    """ValueError unless hidden is `[B, T, H]`, ids and mask `[B, T]`, advantages `[B]`."""
    require(
        hidden.dim() == 3 and ids.shape == hidden.shape[:2],
        f"GRPO: _input must be [B, T, H] and selected_token_ids [B, T]; got {list(hidden.shape)} and "
        f"{list(ids.shape)}.",
    )
    require(
        mask.shape == ids.shape,
        f"GRPO: attention_mask must be {list(ids.shape)} like selected_token_ids; got {list(mask.shape)}.",
    )
    require(
        advantages.shape == ids.shape[:1],
        f"GRPO: advantages must be [{ids.shape[0]}], one a sequence; got {list(advantages.shape)}.",
    )


def masked_targets(ids: Tensor, mask: Tensor) -> Tensor:
    """ids `[B, T]` with the engine's ignore_index where the mask is 0."""
    return torch.where(mask != 0, ids, -100)


def reference_logps(
    given: Tensor | None, ref_input: Tensor | None, ref_weight: Tensor | None, ref_bias: Tensor | None,
    targets: Tensor, **head: Any,
) -> Tensor | None:  # fmt: skip
    """Log-probs `[B, T]` of the reference model: as given, else from its hidden states and head (without gradient)."""
    if given is not None or ref_input is None or ref_weight is None:
        return given
    with torch.no_grad():
        return linear_logprob(ref_input, ref_weight, targets, bias=ref_bias, **head).logp


def reference_head(head: dict[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The policy's options of a head with the reference's own transforms, if there are any; ValueError for others."""
    if given is None:
        return head
    plain = {"softcap": None, "pre_scale": 1.0, "post_scale": 1.0}
    unknown = given.keys() - plain.keys()
    require(
        not unknown, f"GRPO: ref_head takes {', '.join(plain)}; got {', '.join(sorted(unknown))}."
    )
    return {**head, **plain, **given}


def sequence_groups(targets: Tensor) -> dict[str, Any]:
    """The engine's arguments that keep every row of targets `[B, T]` whole; none for an empty batch."""
    if targets.shape[0] == 0:
        return {}
    row = torch.arange(targets.shape[0], device=targets.device)
    return {"group": row[:, None].expand(targets.shape), "n_groups": targets.shape[0]}


def by_sequence(values: Tensor, tokens: Tokens, width: int) -> Tensor:
    """A chunk's values `[C]` laid out as its sequences `[b, T]`, 0 where a token was dropped."""
    start, stop = tokens.groups
    flat = values.new_zeros((stop - start) * width)
    return flat.index_copy(0, tokens.index - start * width, values).view(stop - start, width)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0) if parts[0].dim() == 0 else torch.cat(parts)
