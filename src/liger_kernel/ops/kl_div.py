"""Kullback-Leibler divergence of given distributions, as `torch.nn.functional.kl_div`.

    loss = y_true * (log max(y_true, eps) - y_pred)
    loss = exp(y_true) * (y_true - y_pred)                                          under log_target
    y_pred: [*, V] log-probabilities    y_true: [*, V] probabilities, log_target: log-probabilities

Reductions   "none" [*, V]; "sum"; "mean" divides by the number of elements; "batchmean" by the
             number of rows, all leading dimensions together (torch: the first alone). Without
             elements 0 (torch: NaN).
Zeros        0 log 0 = 0: where y_true is 0 so are loss and gradient, whatever y_pred is, -inf too.
             Where y_pred alone is -inf the divergence is infinite.
Gradient     -y_true / denominator, to y_pred; made in forward, see `_pair`. A y_true that requires
             grad gets its own too, but by plain PyTorch: detach a teacher that is not trained.
Memory       Reads both operands once, writes the gradient, which stays alive until backward.
Kernel       `_pair_kernels`, without Triton the reference.
"""

from typing import Any

from torch import Tensor

from liger_kernel.ops import _pair
from liger_kernel.ops._op import Cost, Op, require

# 1 reference


def divergence(x: Tensor, y: Tensor, log_target: bool, eps: float) -> Tensor:
    """Element by element. Dead entries are replaced before they meet an infinity, so their gradients are 0 too."""
    p = y.exp() if log_target else y
    alive = p != 0
    x, y = x.where(alive, 0.0), y.where(alive, 0.0)
    gap = y - x if log_target else y.clamp(min=eps).where(alive, 1.0).log() - x
    return (p * gap).where(alive, 0.0)


def reference(
    y_pred: Tensor,
    y_true: Tensor,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """The definition."""
    x, y = _pair.operands(y_pred, y_true)
    return _pair.reduced(divergence(x, y, log_target, eps), None, 0, reduction)


# 2 op (kernels: `_pair_kernels`)

_run = _pair.pair_function("kl_div")


def _function(
    y_pred: Tensor, y_true: Tensor, reduction: str, log_target: bool, eps: float
) -> Tensor:
    return _run(y_pred, y_true, None, reduction, 0, "kl_log" if log_target else "kl", eps)


def cost(y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", *_: Any) -> Cost:
    """One pass."""
    return _pair.cost(y_pred, y_true, reduction)


OP = Op("kl_div", reference, reference, _function, _pair.supports, cost)

# 3 public


def kl_div(
    y_pred: Tensor,
    y_true: Tensor,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
    *,
    impl: str | None = None,
) -> Tensor:
    """KL(y_true || y_pred) of given distributions (formulas: top of this file).

    Args:
        y_pred: `[*, V]` log-probabilities of the student; fp16, bf16, fp32 (fp64 on the torch path), any strides.
        y_true: `[*, V]` probabilities of the teacher, or their logarithms with `log_target`.
        reduction: "none", "sum", "mean" (per element) or "batchmean" (per row).
        eps: smallest probability whose logarithm is taken, >= 0; without meaning under `log_target`.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        fp32 (fp64 for fp64 operands), 0-dim, or `[*, V]` for "none".
    Memory:
        A gradient of y_pred's size, until backward; none for "none" and fp16.
    Raises:
        ValueError: another reduction, shapes that differ, operands that are not floats, a negative eps.
    """
    _pair.check("kl_div", ("y_pred", "y_true"), y_pred, y_true, None, reduction)
    require(eps >= 0.0, f"kl_div: eps must not be negative; got {eps}.")
    return OP(y_pred, y_true, reduction, log_target, eps, impl=impl)


class LigerKLDivLossFunction:
    """The op under the name and argument order of the contract."""

    @staticmethod
    def apply(
        y_pred: Tensor,
        y_true: Tensor,
        reduction: str = "batchmean",
        log_target: bool = False,
        eps: float = 1e-10,
    ) -> Tensor:
        """-> the loss."""
        return kl_div(y_pred, y_true, reduction, log_target, eps)
