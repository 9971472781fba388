"""A whole batch through `ce_rows`: denominators, one launch, the reduction. No autograd here."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._ce_kernels import RowStats, ce_rows
from liger_kernel.ops._ce_torch import ce_rows_torch
from liger_kernel.ops._op import compute_dtype, named, observed, rows

Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _launch(
    fused: bool, logits: Tensor, target: Tensor, weight: Tensor | None,
    scales: Tensor, upstream: Tensor | None, out: Tensor | None, want_argmax: bool,
    ignore_index: int, label_smoothing: float, lse_square_scale: float, softcap: float | None,
) -> RowStats:  # fmt: skip
    per_row = ce_rows if fused else ce_rows_torch
    smooth = weight is not None and label_smoothing != 0.0
    return per_row(
        logits, target, weight, scales, upstream, out, V=logits.shape[1],
        ignore_index=ignore_index, label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale, softcap=softcap, want_argmax=want_argmax,
        weight_sum=weight.sum(dtype=scales.dtype) if smooth else None,  # type: ignore[union-attr]
    )  # fmt: skip


def _fake(
    fused: bool, logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, upstream: Tensor | None,
    want_argmax: bool, want_gradient: bool, *options: Any,
) -> Any:  # fmt: skip
    n_rows = logits.shape[0]
    return (
        logits.new_empty(3 + want_argmax, n_rows, dtype=compute_dtype(logits)),
        logits.new_empty(n_rows if want_argmax else 0, dtype=torch.int64),
        logits.new_empty(logits.shape if want_gradient else 0),
    )


@named(
    "(bool fused, Tensor logits, Tensor target, Tensor? weight, Tensor scales, Tensor? upstream,"
    " bool want_argmax, bool want_gradient, int ignore_index, float label_smoothing,"
    " float lse_square_scale, float? softcap) -> (Tensor, Tensor, Tensor)",
    _fake,
)
def cross_entropy_rows(
    fused: bool, logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, upstream: Tensor | None,
    want_argmax: bool, want_gradient: bool, *options: Any,
) -> Any:  # fmt: skip
    """-> `RowStats`' numbers and predicted, and the gradient of logits (empty if not wanted)."""
    z = rows(logits)
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device) if want_gradient else None
    stats = _launch(fused, z, target, weight, scales, upstream, out, want_argmax, *options)
    return *stats, z.new_empty(0) if out is None else out


def run(
    fused: bool, logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor,
    upstream: Tensor | None, want_argmax: bool, want_gradient: bool, inplace: bool, *options: Any,
) -> tuple[RowStats, Tensor | None]:  # fmt: skip
    """Numbers of every row, and the gradient of logits if wanted: in a buffer of its own, or in
    logits' memory under `inplace`, which autograd is told.
    """
    if not (inplace and want_gradient) or observed():
        *stats, gradient = cross_entropy_rows(
            fused, logits, target, weight, scales, upstream, want_argmax, want_gradient, *options
        )
        return RowStats(*stats), gradient if want_gradient else None
    z = rows(logits)
    stats = _launch(fused, z, target, weight, scales, upstream, z, want_argmax, *options)
    torch.autograd.graph.increment_version(logits)
    return stats, z


def denominators(
    target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, n_classes: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """[2], what cross entropy and z-loss are multiplied by: under "mean" 1 / sum of the valid
    tokens' weights and 1 / their number (1 without valid tokens), else 1.
    """
    if reduction != "mean":
        return torch.ones(2, dtype=dtype, device=target.device)
    valid = target != ignore_index
    count = valid.sum().clamp(min=1).to(dtype)
    if weight is None:
        return count.reciprocal().repeat(2)
    w_y = weight.to(dtype)[target.clamp(0, n_classes - 1).long()]
    share = torch.where(valid, w_y, 0.0).sum().where(valid.any(), 1.0)
    return torch.stack((share, count)).reciprocal()


def reduced(
    stats: RowStats, logits: Tensor, target: Tensor, reduction: str, want_z: bool,
    want_argmax: bool, ignore_index: int,
) -> Outputs:  # fmt: skip
    """loss, z-loss, accuracy, prediction."""
    dtype, z, accuracy, predicted = logits.dtype, None, None, None
    if want_argmax:
        accuracy, predicted = stats.correct.clone(), stats.predicted
    if reduction == "none":
        if want_z:
            z = stats.z.to(dtype, copy=True)
        return stats.loss.to(dtype, copy=True), z, accuracy, predicted
    if want_z:
        z = _cast(stats.z.sum(), dtype)
    if accuracy is not None:
        accuracy = accuracy.sum() / (target != ignore_index).sum().clamp(min=1)
    return _cast(stats.loss.sum(), dtype), z, accuracy, predicted


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` that leaves no trace where it would do nothing: torch.compile of 2.11 takes the
    `to` for a second output of the autograd.Function and loses the gradient of the first.
    """
    return x if x.dtype == dtype else x.to(dtype)
