"""Seam: cross entropy of real logits, through the official `loss_function` setter of Hugging Face models.

The process-wide `torch.nn.functional.cross_entropy` is left alone. A promise passes through here
too: it answers for itself.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.transformers import functional


def causal_lm_loss(
    logits: Any,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Mean next-token cross entropy, or sum / num_items_in_batch; the arguments of `ForCausalLMLoss`.

    Args:
        logits: `[B, T, V]`; upcast to fp32, so that the sum is fp32.
        labels: `[B, T]`, shifted by one here; not read when `shift_labels`, already shifted, are given.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("causal_lm_loss needs labels or shift_labels; both are None.")
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.liger_cross_entropy(
        logits.float().view(-1, vocab_size), target, ignore_index=ignore_index, reduction=reduction
    )
    if num_items_in_batch is None:
        return loss  # type: ignore[return-value]
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)  # type: ignore[union-attr]
    return loss / num_items_in_batch  # type: ignore[operator]


causal_lm_loss.__liger_seam__ = "cross_entropy"  # type: ignore[attr-defined]
