"""What the losses between two given distributions share: reductions, ignored rows, autograd, checks.

The gradient of a loss that is reduced to a number is made in the forward pass, which reads both
operands once, and handed over in backward. For "none", and for fp16, whose range needs the upstream
loss scale before rounding, forward makes the loss alone and backward reads the operands again; so
does a second backward through the same graph. Nothing waits for the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._op import Cost, choice, compute_dtype, dense, first_order, require, rows
from liger_kernel.ops._pair_kernels import pair_backward, pair_forward
from liger_kernel.ops._scale import scale_

REDUCTIONS = ("none", "sum", "mean", "batchmean")


# 1 in plain torch, for the references


def operands(
    x: Tensor, y: Tensor, labels: Tensor | None = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Both in the dtype they are computed in, ignored rows as 0 so that nothing in them can reach a gradient."""
    dtype = torch.promote_types(compute_dtype(x), compute_dtype(y))
    x, y = x.to(dtype), y.to(dtype)
    if labels is not None:
        counted = (labels != ignore_index).reshape(x.shape[:-1])[..., None]
        x, y = x.where(counted, 0.0), y.where(counted, 0.0)
    return x, y


def reduced(loss: Tensor, labels: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """A loss per element `[*, V]`, ignored rows dropped, reduced as the ops say."""
    if labels is not None:
        counted = (labels != ignore_index).reshape(loss.shape[:-1])[..., None]
        loss = loss.where(counted, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() * _scale(loss, labels, ignore_index, reduction)


def _scale(x: Tensor, labels: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """0-dim, what the sum is multiplied by: 1, 1 / counted rows, or 1 / their elements."""
    width, dtype = max(x.shape[-1], 1), compute_dtype(x)
    share = {"sum": 0, "batchmean": 1, "mean": width}[reduction]
    if labels is None or not share:
        n_rows = x.numel() // width
        return torch.full((), 1.0 / max(n_rows * share, 1), dtype=dtype, device=x.device)
    count = (labels != ignore_index).sum().clamp(min=1).to(dtype)
    return (count * share).reciprocal()


# 2 autograd


def _forward(
    ctx: Any, x: Tensor, y: Tensor, labels: Tensor | None, reduction: str, *options: Any
) -> Tensor:
    scale = None if reduction == "none" else _scale(x, labels, options[0], reduction)
    early = scale is not None and x.dtype != torch.float16
    loss, gradient = pair_forward(x, y, labels, scale, *options, early)
    ctx.options, ctx.gradient = options, None
    ctx.traced = early and torch.compiler.is_compiling()
    if ctx.traced:
        ctx.save_for_backward(gradient)
    else:
        # A plain attribute, so that the one who takes it in backward is its only owner.
        ctx.gradient = gradient if early else None
        ctx.save_for_backward(x, y, labels, scale)
    return loss


def _gradient(ctx: Any, dloss: Tensor) -> Tensor:
    if ctx.traced:
        return ctx.saved_tensors[0] * dloss
    gradient, ctx.gradient = ctx.gradient, None
    if gradient is not None:
        return scale_(gradient, dloss)
    x, y, labels, scale = ctx.saved_tensors
    if scale is None:
        return pair_backward(x, y, labels, None, dloss, *ctx.options)
    return pair_backward(x, y, labels, scale * dloss, None, *ctx.options)


def pair_function(name: str) -> Callable[..., Tensor]:
    """The Triton path of the op `name`:

    (x `[*, V]`, y, labels | None, reduction, ignore_index, form, parameter) -> loss, fp32.
    """

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            return _forward(ctx, *args)

        @staticmethod
        @first_order(name)
        def backward(ctx: Any, dloss: Tensor) -> Any:
            return _gradient(ctx, dloss), *(None,) * 6

    def call(
        x: Tensor, y: Tensor, labels: Tensor | None, reduction: str, ignore_index: int,
        form: str, parameter: float,
    ) -> Tensor:  # fmt: skip
        flat, target = rows(x), rows(y)
        labels = None if labels is None else dense(labels.reshape(-1))
        options = (ignore_index, form, parameter)
        if torch.is_grad_enabled() and x.requires_grad:
            loss = Pair.apply(flat, target, labels, reduction, *options)
        else:
            scale = None if reduction == "none" else _scale(flat, labels, ignore_index, reduction)
            loss, _ = pair_forward(flat, target, labels, scale, *options, False)
        return loss.view(x.shape) if reduction == "none" else loss

    return call


# 3 what the ops say about their arguments


def supports(x: Tensor, y: Tensor, *rest: Any) -> str | None:
    """Every layout and every width that 32 bits can count; a teacher that is trained too takes the
    torch path.
    """
    for other in (y, *rest):
        if isinstance(other, Tensor) and other.device != x.device:
            return f"operands are on {x.device} and {other.device}"
    if y.requires_grad and torch.is_grad_enabled():
        return "the target requires grad, and the kernels make the gradient of the prediction alone"
    return "more than 2^30 columns" if x.shape[-1] > 1 << 30 else None


def cost(x: Tensor, y: Tensor, reduction: str) -> Cost:
    """Both in and the gradient out, in forward; "none" writes the loss instead and reads again in backward."""
    n, both = x.numel(), x.element_size() + y.element_size()
    if reduction == "none" or x.dtype == torch.float16:
        loss = 4 * n if reduction == "none" else 0
        again = loss + n * (both + x.element_size())
        return Cost(forward_bytes=n * both + loss, backward_bytes=again, saved=0)
    made = n * x.element_size()
    return Cost(forward_bytes=n * both + made, backward_bytes=0, saved=made)


def check(
    op: str, names: tuple[str, str], x: Tensor, y: Tensor, labels: Tensor | None, reduction: str
) -> None:
    """ValueError for operands, labels or a reduction that no such loss can take."""
    choice(op, "reduction", reduction, REDUCTIONS)
    require(
        x.shape == y.shape and x.dim() >= 1,
        f"{op}: {names[0]} and {names[1]} must have the same shape [*, V]; got {list(x.shape)} and "
        f"{list(y.shape)}.",
    )
    require(
        x.is_floating_point() and y.is_floating_point(),
        f"{op}: {names[0]} and {names[1]} must be floating-point; got {x.dtype} and {y.dtype}.",
    )
    if labels is not None:
        n_rows = x.shape[:-1].numel()
        require(
            labels.numel() == n_rows and labels.dtype in (torch.int64, torch.int32),
            f"{op}: shift_labels must hold one int64 or int32 label for each of the {n_rows} rows; got "
            f"{list(labels.shape)} of {labels.dtype}.",
        )
