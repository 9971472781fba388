"""Softmax cross entropy of logits, with label smoothing, class weights, a soft cap and z-loss.

    x = softcap * tanh(z / softcap)  (x = z without one)             lse = log sum_v exp(x_v)
    loss = (1 - ls) * w_y * (lse - x_y) + ls/V * sum_v w_v (lse - x_v) + lse_square_scale * lse^2
    z: [N, V] logits   y: [N] target   w: [V] class weights, 1 where absent   ls = label_smoothing

Reductions   "mean" divides the cross entropy by the number of tokens that are not ignored (by the
             sum of their w_y when there are weights) and the z-loss by that number; "sum" adds up;
             "none" keeps one value a token, 0 where ignored. Without a valid token the loss is 0
             and so are the gradients (torch: NaN).
Gradient     For "mean" and "sum" it is made in the forward pass, which reads the logits once, and
             handed over in backward. For "none", and for fp16, whose range needs the upstream loss
             scale before rounding, forward makes the loss alone and backward reads the logits
             again. Nothing waits for the device.
Memory       Between forward and backward: the logits and a gradient of their size and dtype
             ("none", fp16: the logits alone); with inplace=True one of the two. 12 bytes a token.
Kernel       `_ce_kernels.ce_rows`; without Triton `_ce_torch.ce_rows_torch`; a batch: `_ce_batch`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._ce_batch import Outputs, factors, reduced, run
from liger_kernel.ops._labels import check_labels
from liger_kernel.ops._op import (
    Cost,
    Op,
    choice,
    compute_dtype,
    direct,
    first_order,
    is_dtensor,
    require,
)
from liger_kernel.ops._scale import scale_

REDUCTIONS = ("mean", "sum", "none")


@dataclass
class CrossEntropyOutput:
    """What a cross entropy returns; None where not asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


# 1 reference


def reference(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    use_token_scaling: bool = False,
) -> CrossEntropyOutput:
    """The definition, and the head's token scaling: a token's loss times its p_y, held constant."""
    x = input.to(compute_dtype(input))
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    n_classes, valid = x.shape[-1], target != ignore_index
    known = (target >= 0) & (target < n_classes)
    y = target.where(valid & known, 0).long()
    w = x.new_ones(n_classes) if weight is None else weight.to(x.dtype)
    log_p = x.log_softmax(-1)
    ce = -(1.0 - label_smoothing) * w[y] * log_p.gather(-1, y[..., None])[..., 0]
    if label_smoothing:
        ce = ce - label_smoothing / n_classes * (log_p * w).sum(-1)
    z = lse_square_scale * x.logsumexp(-1).square()
    off = torch.where(valid, float("nan"), 0.0).to(x.dtype)
    ce, z = ce.where(valid & known, off), z.where(valid & known, off)
    predicted = x.argmax(-1).where(valid & known, -1)
    accuracy = (predicted == y).to(torch.float32).where(valid & known, off.float())
    if reduction == "mean":
        count = valid.sum().clamp(min=1)
        share = count if weight is None else w[y].where(valid, 0).sum().where(valid.any(), 1)
        ce, z = ce / share, z / count
    if use_token_scaling:
        p_y = log_p.gather(-1, y[..., None])[..., 0].exp().detach()
        ce, z = ce * p_y, z * p_y
    loss = ce + z
    if reduction != "none":
        loss, z = loss.sum(), z.sum()
        accuracy = accuracy.sum() / valid.sum().clamp(min=1)
    return CrossEntropyOutput(
        loss.to(input.dtype),
        z.to(input.dtype).detach() if return_z_loss else None,
        accuracy if return_token_accuracy else None,
        predicted if return_predicted_tokens else None,
    )


# 2 op

_INPUTS = 12  # of the autograd functions below


def _forward(
    ctx: Any, fused: bool, logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str,
    want_z: bool, want_argmax: bool, inplace: bool, *options: Any,
) -> Outputs:  # fmt: skip
    early = reduction != "none" and logits.dtype != torch.float16
    dtype = compute_dtype(logits)
    scales = factors(fused, target, weight, options[0], reduction, logits.shape[1], dtype)
    stats, gradient = run(
        fused, logits, target, weight, scales, None, want_argmax, early, inplace, *options
    )
    ctx.call = (fused, reduction, inplace, options)
    ctx.gradient, ctx.traced = None, early and torch.compiler.is_compiling()
    if ctx.traced:
        ctx.save_for_backward(gradient)
    else:
        # A plain attribute, so that the one who takes it in backward is its only owner.
        ctx.gradient = gradient
        kept = None if early and inplace else logits
        ctx.save_for_backward(kept, target, weight, scales)
    found = reduced(fused, stats, logits, target, reduction, want_z, want_argmax, options[0])
    ctx.mark_non_differentiable(*(t for t in found[1:] if t is not None))
    ctx.set_materialize_grads(False)
    return found


def _gradient(ctx: Any, dloss: Tensor) -> Tensor:
    if ctx.traced:
        return ctx.saved_tensors[0] * dloss
    gradient, ctx.gradient = ctx.gradient, None
    if gradient is not None:
        return scale_(gradient, dloss)
    fused, _, inplace, options = ctx.call
    logits, target, weight, scales = _saved(ctx)
    upstream = dloss.reshape(-1).expand(target.shape)
    _, gradient = run(
        fused, logits, target, weight, scales, upstream, False, True, inplace, *options
    )
    assert gradient is not None
    return gradient


def _saved(ctx: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    logits, target, weight, scales = ctx.saved_tensors
    require(
        logits is not None,
        "cross_entropy(inplace=True): the gradient has taken the place of the logits, so there is no "
        "second backward. Use inplace=False with retain_graph or create_graph.",
        RuntimeError,
    )
    return logits, target, weight, scales


def _only_logits(gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, gradient, *(None,) * (_INPUTS - 2))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Outputs:
        return _forward(ctx, *args)

    @staticmethod
    @first_order("cross_entropy")
    def backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> Any:
        return _only_logits(None if dloss is None else _gradient(ctx, dloss))


_apply = direct(_CrossEntropy.apply)


class _CrossEntropyTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Outputs:
        return _forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *unused: Tensor | None) -> Any:
        if dloss is None or not torch.is_grad_enabled():
            return _only_logits(None if dloss is None else _gradient(ctx, dloss))
        # create_graph=True: the definition can be differentiated again.
        logits, target, weight, _ = _saved(ctx)
        _, reduction, _, options = ctx.call
        loss = _by_definition(logits, target, weight, reduction, False, False, False, *options)[0]
        (gradient,) = torch.autograd.grad(loss, logits, dloss, create_graph=True)
        return _only_logits(gradient)


def _call(fused: bool, logits: Tensor, target: Tensor, weight: Tensor | None, *args: Any) -> Any:
    if torch.is_grad_enabled() and logits.requires_grad:
        function = _apply if fused else _CrossEntropyTorch.apply
        return function(fused, logits, target, weight, *args)
    reduction, want_z, want_argmax, _, *options = args
    dtype = compute_dtype(logits)
    scales = factors(fused, target, weight, options[0], reduction, logits.shape[1], dtype)
    stats, _ = run(fused, logits, target, weight, scales, None, want_argmax, False, False, *options)
    return reduced(fused, stats, logits, target, reduction, want_z, want_argmax, options[0])


def _by_definition(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, want_z: bool,
    want_argmax: bool, inplace: bool, ignore_index: int, label_smoothing: float,
    lse_square_scale: float, softcap: float | None,
) -> Outputs:  # fmt: skip
    found = reference(
        logits, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale, reduction=reduction, softcap=softcap,
        return_z_loss=want_z, return_token_accuracy=want_argmax,
        return_predicted_tokens=want_argmax,
    )  # fmt: skip
    return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens


def _function(*args: Any) -> Outputs:
    return _call(True, *args)


def _fallback(logits: Tensor, *args: Any) -> Outputs:
    """The same in plain PyTorch; a DTensor gets the definition, whose parts it knows to shard."""
    if is_dtensor(logits):
        return _by_definition(logits, *args)
    return _call(False, logits, *args)


def supports(logits: Tensor, *_: Any) -> str | None:
    """Every layout and every width that 32 bits can count."""
    return "more than 2^30 classes" if logits.shape[1] > 1 << 30 else None


def cost(logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, *_: Any) -> Cost:
    """Logits in and gradient out, in forward; for "none" the gradient's part falls to backward."""
    n = logits.numel() * logits.element_size()
    if reduction == "none" or logits.dtype == torch.float16:
        return Cost(forward_bytes=n, backward_bytes=2 * n, saved=0)
    return Cost(forward_bytes=2 * n, backward_bytes=0, saved=n)


OP = Op("cross_entropy", reference, _fallback, _function, supports, cost)

# 3 public


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    inplace: bool = False,
    impl: str | None = None,
) -> CrossEntropyOutput:
    """Softmax cross entropy over the last dimension (formulas: top of this file).

    Args:
        input: `[*, V]` logits of any strides; fp16, bf16, fp32 (fp64 on the torch path).
        target: `[*]` class indices, int64 or int32.
        weight: `[V]` class weights of any float dtype; gets no gradient.
        ignore_index: the target of tokens that do not count; any integer, a class too.
        label_smoothing: share of the target spread over all classes, in [0, 1].
        lse_square_scale: factor of the z-loss lse^2, which is part of the loss.
        reduction: "mean", "sum" or "none".
        softcap: bound of the logits, > 0, or None.
        inplace: the gradient may take the place of `input`, which must not be read afterwards;
            autograd refuses to. Ignored without gradient and while something traces.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        loss in input's dtype, a scalar, or `[*]` for "none". z_loss, its z-loss part, likewise;
        token_accuracy fp32, the share of valid tokens whose largest logit is the target's, or `[*]`
        of 0 and 1 for "none"; predicted_tokens `[*]` int64, the lowest index of the largest logit
        and -1 where ignored. None where not asked for. Only the loss is differentiable.
    Memory:
        The logits and, unless inplace, a gradient of their size. Reads 1x, writes 1x.
    Raises:
        ValueError: an option out of its range, shapes that do not fit, an integer weight; a leaf
            that requires grad with inplace=True.
        IndexError: a label out of range, on CPU tensors, or everywhere under
            LIGER_KERNEL_VALIDATE=1. Otherwise its row's loss and gradient are NaN.
    """
    _check_tensors(input, target, inplace)
    n_classes = input.shape[-1]
    check_options("cross_entropy", n_classes, weight, label_smoothing, reduction, softcap)
    check_labels("cross_entropy", target, n_classes, ignore_index)
    want_argmax = return_token_accuracy or return_predicted_tokens
    # A view of what already has the right shape would be one more node in the graph.
    logits = input if input.dim() == 2 else input.reshape(target.numel(), n_classes)
    labels = target if target.dim() == 1 else target.reshape(-1)
    loss, z, accuracy, predicted = OP(
        logits, labels, weight, reduction,
        return_z_loss, want_argmax, inplace, ignore_index, label_smoothing, lse_square_scale,
        softcap, impl=impl,
    )  # fmt: skip
    if predicted is not None:
        predicted = predicted.view(target.shape)
    if reduction == "none":
        loss = loss.view(target.shape)
        z, accuracy = (t if t is None else t.view(target.shape) for t in (z, accuracy))
    return CrossEntropyOutput(
        loss,
        z,
        accuracy if return_token_accuracy else None,
        predicted if return_predicted_tokens else None,
    )


def check_options(
    op: str, n_classes: int, weight: Tensor | None, label_smoothing: float, reduction: str,
    softcap: float | None,
) -> None:  # fmt: skip
    """ValueError for what no cross entropy over `n_classes` can take."""
    choice(op, "reduction", reduction, REDUCTIONS)
    if n_classes <= 0:
        raise ValueError(f"{op}: there must be at least one class; got none.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must lie in [0, 1]; got {label_smoothing}.")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"{op}: softcap must be positive, or None for none; got {softcap}.")
    if weight is not None and (weight.shape != (n_classes,) or not weight.is_floating_point()):
        raise ValueError(
            f"{op}: class weights must hold one float for each of the {n_classes} classes; got "
            f"{list(weight.shape)} of {weight.dtype}."
        )


def _check_tensors(input: Tensor, target: Tensor, inplace: bool) -> None:
    if not input.is_floating_point() or input.dim() == 0:
        raise ValueError(
            f"cross_entropy: input must hold float logits [*, V]; got {list(input.shape)} of {input.dtype}."
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            "cross_entropy: target must have input's shape without its last dimension, "
            f"{list(input.shape[:-1])}; got {list(target.shape)}."
        )
    require(
        not (inplace and input.is_leaf and input.requires_grad and torch.is_grad_enabled()),
        "cross_entropy: a leaf that requires grad cannot be overwritten. Use inplace=False.",
    )


class LigerCrossEntropyFunction:
    """The op under the name and argument order of the contract."""

    @staticmethod
    def apply(
        _input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> Outputs:  # fmt: skip
        """-> loss, z_loss, token_accuracy, predicted_tokens; None where not asked for."""
        found = cross_entropy(
            _input, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale, reduction=reduction, softcap=softcap,
            return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )  # fmt: skip
        return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens


def cross_entropy_forward(
    _input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, lse_square_scale: float,
    label_smoothing: float, reduction: str, softcap: float | None, return_z_loss: bool,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """`LigerCrossEntropyFunction`'s results without autograd, and the gradient of a loss of ones
    if `_input` requires one (else `_input`), for `cross_entropy_backward`.
    """
    logits = _input.detach().requires_grad_(_input.requires_grad)
    with torch.enable_grad():
        loss, *others = LigerCrossEntropyFunction.apply(
            logits, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
            return_z_loss, return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
    if not logits.requires_grad:
        return loss, *others, _input
    (gradient,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    return loss.detach(), *others, gradient


def cross_entropy_backward(_input: Tensor, grad_output: Tensor) -> Tensor:
    """The gradient made by `cross_entropy_forward` times the loss's own: a scalar or one a row."""
    return _input * (grad_output if grad_output.dim() == 0 else grad_output[..., None])
