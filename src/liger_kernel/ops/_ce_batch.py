"""A whole batch through `ce_rows`: denominators, rows, reduction, a launch each. No autograd here."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._ce_kernels import RowStats, ce_rows
from liger_kernel.ops._ce_torch import ce_rows_torch
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import compute_dtype, dense, like, named, observed, rows
from liger_kernel.ops._triton import Launch, planned, tl, triton

SMALL = {"BLOCK": 8192, "num_warps": 16}  # of the two small kernels, one program each

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
    out = like(z) if want_gradient else None
    numbers, predicted = _launch(
        fused, z, target, weight, scales, upstream, out, want_argmax, *options
    )
    return (
        numbers,
        z.new_empty(0, dtype=torch.int64) if predicted is None else predicted,
        z.new_empty(0) if out is None else out,
    )


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


@triton.jit
def store_factors(OUT, T, W, n_rows, n_classes, ignore_index, BLOCK: tl.constexpr):
    """`denominators` under "mean"."""
    count = tl.zeros((BLOCK,), tl.int32)
    share = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        label = tl.load(T + row, mask=row < n_rows, other=0).to(tl.int64)
        valid = (row < n_rows) & (label != ignore_index)
        count += valid.to(tl.int32)
        if W is not None:
            known = tl.minimum(tl.maximum(label, 0), n_classes - 1)
            share += tl.load(W + known, mask=valid, other=0.0).to(tl.float32)
    n, one = tl.sum(count, axis=0), tl.full((), 1.0, tl.float32)
    factor = tl.div_rn(one, tl.maximum(n, 1).to(tl.float32))
    tl.store(OUT + 1, factor)
    if W is not None:
        factor = tl.div_rn(one, tl.where(n > 0, tl.sum(share, axis=0), 1.0))
    tl.store(OUT, factor)


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def _factors_kernel(OUT, T, W, n_rows, n_classes, ignore_index, BLOCK: tl.constexpr):
    store_factors(OUT, T, W, n_rows, n_classes, ignore_index, BLOCK)


@triton.jit(do_not_specialize=["n_rows"])
def _totals_kernel(LOSS, Z, NUMBERS, n_rows, BLOCK: tl.constexpr):
    """The sums of the first row and, where Z is not None, of the second."""
    which = tl.program_id(0)
    NUMBERS += row_base(which, n_rows)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(NUMBERS + row, mask=row < n_rows, other=0.0)
    result = tl.sum(total, axis=0)
    tl.store(LOSS, result.to(LOSS.dtype.element_ty), mask=which == 0)
    if Z is not None:
        tl.store(Z, result.to(Z.dtype.element_ty), mask=which == 1)


@planned
def _factors(device: torch.device, n_rows: int, n_classes: int, ignore_index: int) -> Launch:
    return Launch(_factors_kernel, (1,), device, n_rows, n_classes, ignore_index, **SMALL)


@planned
def _totals(device: torch.device, n_rows: int, outputs: int) -> Launch:
    return Launch(_totals_kernel, (outputs,), device, n_rows, **SMALL)


def factors(
    fused: bool, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, n_classes: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`denominators`, in one launch where kernels run: PyTorch takes seven."""
    if reduction != "mean" or not fused or observed():
        return denominators(target, weight, ignore_index, reduction, n_classes, dtype)
    found = target.new_empty(2, dtype=dtype)
    run = _factors(target.device, target.shape[0], n_classes, ignore_index)
    run(found, dense(target), weight if weight is None else dense(weight))
    return found


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
    fused: bool, stats: RowStats, logits: Tensor, target: Tensor, reduction: str, want_z: bool,
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
    if accuracy is not None:
        accuracy = accuracy.sum() / (target != ignore_index).sum().clamp(min=1)
    if fused and not observed():
        loss, z = logits.new_empty(()), logits.new_empty(()) if want_z else None
        _totals(logits.device, stats.numbers.shape[1], 1 + want_z)(loss, z, stats.numbers)
        return loss, z, accuracy, predicted
    if want_z:
        z = _cast(stats.z.sum(), dtype)
    return _cast(stats.loss.sum(), dtype), z, accuracy, predicted


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` that leaves no trace where it would do nothing: torch.compile of 2.11 takes the
    `to` for a second output of the autograd.Function and loses the gradient of the first.
    """
    return x if x.dtype == dtype else x.to(dtype)
