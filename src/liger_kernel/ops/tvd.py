"""Total variation distance of given distributions.   loss = |p - q| / 2

    p: [*, V] probabilities of the student    q: [*, V] probabilities of the teacher

Reductions   over the rows that count: "none" [*, V]; "sum"; "mean" divides by the number of their
             elements; "batchmean" by their number. Without a counted row 0.
Rows         whose label is ignore_index do not count: loss and gradient 0, whatever stands in them.
Gradient     sign(p - q) / 2 / denominator, 0 where they are equal, to p; made in forward, see
             `_pair`. A q that requires grad gets its own too, but by plain PyTorch: detach a
             teacher that is not trained.
Memory       Reads both operands once, writes the gradient, which stays alive until backward.
Kernel       `_pair_kernels`, without Triton the reference.
"""

from typing import Any

from torch import Tensor

from liger_kernel.ops import _pair
from liger_kernel.ops._op import Cost, Op

# 1 reference


def reference(
    p: Tensor,
    q: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
) -> Tensor:
    """The definition."""
    x, y = _pair.operands(p, q, shift_labels, ignore_index)
    return _pair.reduced(0.5 * (x - y).abs(), shift_labels, ignore_index, reduction)


# 2 op (kernels: `_pair_kernels`)

_run = _pair.pair_function("tvd")


def _function(
    p: Tensor, q: Tensor, shift_labels: Tensor | None, reduction: str, ignore_index: int
) -> Tensor:
    return _run(p, q, shift_labels, reduction, ignore_index, "tvd", 0.0)


def cost(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None, reduction: str = "batchmean", *_: Any
) -> Cost:
    """One pass."""
    return _pair.cost(p, q, reduction)


OP = Op("tvd", reference, reference, _function, _pair.supports, cost)

# 3 public


def tvd(
    p: Tensor,
    q: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    *,
    impl: str | None = None,
) -> Tensor:
    """Total variation distance of given distributions (formulas: top of this file).

    Args:
        p: `[*, V]` probabilities of the student; fp16, bf16, fp32 (fp64 on the torch path), any strides.
        q: `[*, V]` probabilities of the teacher.
        shift_labels: one int64 or int32 label a row, already shifted, or None: every row counts.
        reduction: "none", "sum", "mean" (per element) or "batchmean" (per row).
        ignore_index: the label of rows that do not count.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        fp32 (fp64 for fp64 operands), 0-dim, or `[*, V]` for "none".
    Memory:
        A gradient of p's size, until backward; none for "none" and fp16.
    Raises:
        ValueError: another reduction, shapes that differ, operands that are not floats, labels that do not fit.
    """
    _pair.check("tvd", ("p", "q"), p, q, shift_labels, reduction)
    return OP(p, q, shift_labels, reduction, ignore_index, impl=impl)


class LigerTVDLossFunction:
    """The op under the name and argument order of the contract."""

    @staticmethod
    def apply(
        p: Tensor,
        q: Tensor,
        shift_labels: Tensor | None = None,
        reduction: str = "batchmean",
        ignore_index: int = -100,
    ) -> Tensor:
        """-> the loss."""
        return tvd(p, q, shift_labels, reduction, ignore_index)
