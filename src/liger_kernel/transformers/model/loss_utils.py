"""Losses from hidden states and a head's weight, under the names that frameworks call and replace.

Models patched by this package do not come through here: their own `loss_function` meets a promise
(`patch/promise.py`), so a framework that replaces `LigerForCausalLMLoss` to work around an argument
it would choke on needs no workaround there.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops.cross_entropy import CrossEntropyOutput
from liger_kernel.transformers import functional

_OPTIONS = (
    "ce_weight", "label_smoothing", "lse_square_scale", "return_z_loss", "use_token_scaling", "bias", "chunk_mem_const",
    "pre_scale", "post_scale", "temperature", "memory_budget", "num_valid",
)  # fmt: skip


def unpack_cross_entropy_result(result: Tensor | CrossEntropyOutput) -> tuple[Any, Any, Any, Any]:
    """(loss, z_loss, token_accuracy, predicted_tokens) of a loss function's result."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    return result, None, None, None  # pyright: ignore[reportReturnType]


def fixed_fused_linear_cross_entropy(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """Mean cross entropy of `hidden_states @ lm_head_weight.T`, or sum / num_items_in_batch.

    Args:
        hidden_states: `[N, H]`; lm_head_weight: `[V, H]`; target: `[N]`.
        num_items_in_batch: what the sum is divided by; None: the number of valid targets.
        kwargs: further options of `liger_fused_linear_cross_entropy`; what it does not know (other
            keyword arguments of a trainer) is not passed on.
    Returns:
        The loss, or a `CrossEntropyOutput` when a `return_*` flag is set.
    """
    options: dict[str, Any] = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
    for name, value in (
        ("return_token_accuracy", return_token_accuracy),
        ("return_predicted_tokens", return_predicted_tokens),
    ):
        if value:
            options[name] = value
    if accum_dtype is not None:
        options["accum_dtype"] = accum_dtype
    result = functional.liger_fused_linear_cross_entropy(
        hidden_states,
        lm_head_weight,
        target,
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
        **options,
    )
    if num_items_in_batch is None:
        return result
    if isinstance(result, Tensor):
        return result / _count(num_items_in_batch, result)
    result.loss = result.loss / _count(num_items_in_batch, result.loss)
    if result.z_loss is not None:
        result.z_loss = result.z_loss / _count(num_items_in_batch, result.z_loss)
    return result


def LigerForCausalLMLoss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """Next-token loss from hidden states.

    Args:
        hidden_states: `[B, T, H]`, any strides; lm_head_weight: `[V, H]`.
        labels: `[B, T]`, shifted by one here.
        shift_labels: labels that are shifted already, of any shape with B T elements.
        others: as in `fixed_fused_linear_cross_entropy`; unknown keyword arguments are ignored.
    Raises:
        ValueError: neither labels nor shift_labels.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("LigerForCausalLMLoss needs labels or shift_labels; both are None.")
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )


def _count(num_items_in_batch: Tensor | int, loss: Tensor) -> Tensor | int:
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(loss.device)
    return num_items_in_batch
