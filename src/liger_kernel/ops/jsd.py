"""Generalised Jensen-Shannon divergence of given distributions.   M = beta P + (1 - beta) Q

    loss = beta P (log P - log M) + (1 - beta) Q (log Q - log M),   summed, divided by counted rows
    beta = 0: P (log P - log Q)     beta = 1: Q (log Q - log P)
    log_q: [*, V] log-probabilities of the student    log_p: [*, V] of the teacher

Rows         whose label is ignore_index do not count: loss and gradient 0, whatever stands in them.
             Without a counted row the loss is 0. Nothing waits for the device.
Zeros        0 log 0 = 0: entries of -inf on either or both sides leave the rest of the formula.
             For beta 0 and 1 the divergence is infinite where the distribution it is measured
             against has probability 0, as by definition.
Gradient     (1 - beta) Q (log Q - log M) / rows, to log_q; made in forward, see `_pair`. A log_p
             that requires grad gets its own too, but by plain PyTorch: detach a teacher that is not
             trained.
Memory       Reads both operands once, writes the gradient, which stays alive until backward.
Kernel       `_pair_kernels`, without Triton the reference.
Paper        Agarwal et al., arXiv 2306.13649.
"""

import math
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import _pair
from liger_kernel.ops._op import Cost, Op, require
from liger_kernel.ops.kl_div import divergence

# 1 reference


def _elements(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """Entries of probability 0 are replaced before they meet an infinity, so their gradients are 0 too."""
    if beta == 0.0:
        return divergence(x, y, True, 0.0)
    if beta == 1.0:
        return divergence(y, x, True, 0.0)
    q, p = x.exp() != 0, y.exp() != 0
    some = q | p
    log_m = torch.logaddexp(
        y.where(some, 0.0) + math.log(beta), x.where(some, 0.0) + math.log1p(-beta)
    )
    x, y = x.where(q, 0.0), y.where(p, 0.0)
    teacher = (y.exp() * (y - log_m)).where(p, 0.0)
    student = (x.exp() * (x - log_m)).where(q, 0.0)
    return beta * teacher + (1.0 - beta) * student


def reference(
    log_q: Tensor,
    log_p: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:
    """The definition."""
    x, y = _pair.operands(log_q, log_p, shift_labels, ignore_index)
    loss = _pair.reduced(_elements(x, y, beta), shift_labels, ignore_index, "batchmean")
    return loss.to(log_q.dtype)


# 2 op (kernels: `_pair_kernels`)

_run = _pair.pair_function("jsd")


def _function(
    log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None, beta: float, ignore_index: int
) -> Tensor:
    form = {0.0: "kl_log", 1.0: "reverse_kl"}.get(beta, "jsd")
    loss = _run(log_q, log_p, shift_labels, "batchmean", ignore_index, form, beta)
    return loss.to(log_q.dtype)


def cost(log_q: Tensor, log_p: Tensor, *_: Any) -> Cost:
    """One pass."""
    return _pair.cost(log_q, log_p, "batchmean")


OP = Op("jsd", reference, reference, _function, _pair.supports, cost)

# 3 public


def jsd(
    log_q: Tensor,
    log_p: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    *,
    impl: str | None = None,
) -> Tensor:
    """Generalised JSD of given distributions, a mean over rows (formulas: top of this file).

    Args:
        log_q: `[*, V]` log-probabilities of the student; fp16, bf16, fp32 (fp64 on the torch path), any strides.
        log_p: `[*, V]` log-probabilities of the teacher.
        shift_labels: one int64 or int32 label a row, already shifted, or None: every row counts.
        beta: weight of the teacher, in [0, 1].
        ignore_index: the label of rows that do not count.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        0-dim, computed in fp32 and rounded to log_q's dtype.
    Memory:
        A gradient of log_q's size, until backward; none for fp16, whose backward reads the operands again.
    Raises:
        ValueError: beta outside [0, 1], shapes that differ, operands that are not floats, labels that do not fit.
    """
    _pair.check("jsd", ("log_q", "log_p"), log_q, log_p, shift_labels, "batchmean")
    require(0.0 <= beta <= 1.0, f"jsd: beta must lie in [0, 1]; got {beta}.")
    return OP(log_q, log_p, shift_labels, float(beta), ignore_index, impl=impl)


class LigerJSDFunction:
    """The op under the name and argument order of the contract."""

    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        beta: float = 0.5,
        ignore_index: int = -100,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
    ) -> Tensor:
        """-> the loss. jsd_mode has no meaning here."""
        return jsd(_input, target, shift_labels, beta, ignore_index, impl=jsd_impl)


def jsd_forward(
    _input: Tensor, target: Tensor, shift_labels: Tensor | None, beta: float, ignore_index: int,
    has_label: bool, jsd_impl: str | None = None, jsd_mode: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> loss and its gradient in `_input`, without autograd; labels are read if `has_label`."""
    leaf = _input.detach().requires_grad_()
    labels = shift_labels if has_label else None
    with torch.enable_grad():
        loss = jsd(leaf, target.detach(), labels, beta, ignore_index, impl=jsd_impl)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def jsd_backward(dX: Tensor, grad_output: Tensor) -> Tensor:
    """The gradient made by `jsd_forward` times the loss's own, 0-dim."""
    return dX * grad_output
