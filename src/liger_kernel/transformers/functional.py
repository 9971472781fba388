"""The functional layer API: `liger_rms_norm(X, W, eps)` and its kin.

Frameworks replace functions of this module, so the rest of the package looks them up here at call
time. Defaults differ from `liger_kernel.functional` where users of either expect it. `in_place` is
accepted everywhere and means buffers the op allocated itself, never a tensor of the caller.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import cross_entropy as _cross_entropy
from liger_kernel.ops import fused_linear_cross_entropy as _fused_linear_cross_entropy
from liger_kernel.ops import geglu as _geglu
from liger_kernel.ops import jsd as _jsd
from liger_kernel.ops import kl_div as _kl_div
from liger_kernel.ops import rms_norm as _rms_norm
from liger_kernel.ops import rope as _rope
from liger_kernel.ops import swiglu as _swiglu
from liger_kernel.ops import tvd as _tvd
from liger_kernel.ops.cross_entropy import CrossEntropyOutput

__all__ = [
    "CrossEntropyOutput",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
    "liger_geglu",
    "liger_jsd",
    "liger_kl_div",
    "liger_rms_norm",
    "liger_rope",
    "liger_swiglu",
    "liger_tvd",
]


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of logits, callable wherever `torch.nn.functional.cross_entropy` is.

    Args:
        input: logits `[N, V]`, or the promise of a patched model, which answers for itself (a
            framework may put this function in the place of torch's, and promises meet it then).
        target: class indices `[N]`.
        size_average, reduce: torch's deprecated arguments, ignored.
        others: as in `liger_kernel.ops.cross_entropy.cross_entropy`.
    Returns:
        The loss, or a `CrossEntropyOutput` when a `return_*` flag is set.
    """
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "lse_square_scale": lse_square_scale,
        "reduction": reduction,
        "softcap": softcap,
        "return_z_loss": return_z_loss,
        "return_token_accuracy": return_token_accuracy,
        "return_predicted_tokens": return_predicted_tokens,
    }
    promise = getattr(input, "__liger_cross_entropy__", None)
    if promise is not None:
        result = promise(target, weight, **options)
    else:
        result = _cross_entropy.cross_entropy(input, target, weight, **options)
    return _loss_or_all(result, return_z_loss or return_token_accuracy or return_predicted_tokens)


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
    *,
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    temperature: float = 1.0,
    memory_budget: int | None = None,
    num_valid: int | None = None,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of `input @ weight.T + bias` without keeping the logits.

    Args:
        input: `[N, H]`; weight: `[V, H]`; target: `[N]`; bias: `[V]`.
        ce_weight: class weights `[V]`.
        chunk_mem_const: checked (a positive int) and otherwise ignored: `memory_budget`, or else
            `LIGER_KERNEL_MEMORY_BUDGET`, decides how many tokens are worked on at a time.
        others: as in `liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy`.
    Returns:
        The loss, or a `CrossEntropyOutput` when a `return_*` flag is set.
    Raises:
        ValueError: `chunk_mem_const` is not a positive int.
    """
    if isinstance(chunk_mem_const, bool) or not isinstance(chunk_mem_const, int):
        raise ValueError(f"chunk_mem_const must be a positive int; got {chunk_mem_const!r}.")
    if chunk_mem_const < 1:
        raise ValueError(f"chunk_mem_const must be at least 1; got {chunk_mem_const}.")
    result = _fused_linear_cross_entropy.fused_linear_cross_entropy(
        input,
        weight,
        target,
        bias,
        ce_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        reduction=reduction,
        softcap=softcap,
        pre_scale=pre_scale,
        post_scale=post_scale,
        temperature=temperature,
        return_z_loss=return_z_loss,
        accum_dtype=accum_dtype,
        use_token_scaling=use_token_scaling,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        memory_budget=memory_budget,
        num_valid=num_valid,
    )
    return _loss_or_all(result, return_z_loss or return_token_accuracy or return_predicted_tokens)


def _loss_or_all(result: CrossEntropyOutput, everything: bool) -> Tensor | CrossEntropyOutput:
    return result if everything else result.loss


def liger_rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
) -> Tensor:
    """X / rms(X) * (offset + W) over the last dimension; see `liger_kernel.ops.rms_norm`."""
    return _rms_norm.rms_norm(X, W, eps, offset, casting_mode)


def liger_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate-half position embedding; see `liger_kernel.ops.rope`. New tensors: q and k stay as
    they are. `position_ids` is accepted, not read: cos and sin already belong to the positions."""
    return _rope.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=rotary_dim)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b; see `liger_kernel.ops.swiglu`."""
    return _swiglu.swiglu(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """gelu(a) * b with the tanh form of GELU; see `liger_kernel.ops.geglu`."""
    return _geglu.geglu(a, b)


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """KL(target || input), a mean over elements by default; see `liger_kernel.ops.kl_div`.
    `size_average` and `reduce` are torch's deprecated arguments, ignored."""
    return _kl_div.kl_div(input, target, reduction, log_target, eps)


def liger_jsd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of log-probabilities; see `liger_kernel.ops.jsd`."""
    return _jsd.jsd(input, target, shift_labels, beta, ignore_index)


def liger_tvd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """Total variation distance of probabilities, a mean over elements by default; see
    `liger_kernel.ops.tvd`."""
    return _tvd.tvd(input, target, shift_labels, reduction, ignore_index)
