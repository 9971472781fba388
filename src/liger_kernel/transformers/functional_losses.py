"""The losses of `liger_kernel.transformers.functional`, which offers them under these names."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import cross_entropy as _cross_entropy
from liger_kernel.ops import fused_linear_cross_entropy as _fused_linear_cross_entropy
from liger_kernel.ops import fused_linear_jsd as _fused_linear_jsd
from liger_kernel.ops import fused_linear_kl_div as _fused_linear_kl_div
from liger_kernel.ops import fused_linear_scaled_cross_entropy as _scaled
from liger_kernel.ops import jsd as _jsd
from liger_kernel.ops import kl_div as _kl_div
from liger_kernel.ops import tvd as _tvd
from liger_kernel.ops.cross_entropy import CrossEntropyOutput


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


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Generalised JSD of two linear heads without the logits; see `liger_kernel.ops.fused_linear_jsd`, also for
    the options."""
    return _fused_linear_jsd.fused_linear_jsd(
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels,
        jsd_beta,
        ignore_index,
        temperature,
        accum_dtype=accum_dtype,
        **options,
    )


def liger_fused_linear_kl_div(
    student_input: Tensor,
    student_weight: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """KL(target || softmax of a linear head) without the logits; see `liger_kernel.ops.fused_linear_kl_div`,
    also for the options."""
    return _fused_linear_kl_div.fused_linear_kl_div(
        student_input,
        student_weight,
        target,
        shift_labels,
        reduction,
        ignore_index,
        temperature,
        eps,
        accum_dtype=accum_dtype,
        **options,
    )


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


def liger_fused_linear_scaled_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    m_tiles_per_cluster: int = 1,
    return_entropy: bool = False,
    selected_token_ids: Tensor | None = None,
) -> Any:
    """Per-token negative log-probabilities of a head; see `liger_kernel.ops.fused_linear_scaled_cross_entropy`."""
    return _scaled.LigerFusedLinearScaledCrossEntropyFunction.apply(
        input, weight, target, temperature, ignore_index, m_tiles_per_cluster, return_entropy, selected_token_ids
    )  # fmt: skip


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: Any,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> Any:
    """The same for a head whose rows are split over `tp_group`."""
    return _scaled.LigerFusedLinearScaledCrossEntropyTPFunction.apply(
        input, weight, target, tp_group, temperature, ignore_index, tiles_per_reduce, return_entropy
    )
