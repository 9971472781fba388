"""Squared ReLU.   y = max(x, 0)^2

    x, y: [*]

Backward   dx = 2 max(x, 0) dy

Casts   fp32 inside, rounded once, which is what eager PyTorch's two steps give too. NaN stays NaN.
Memory  reads x, writes y, keeps x only; backward reads dy and x once and writes dx.
Paper   So et al., "Primer: Searching for Efficient Transformers for Language Modeling", arXiv:2109.08668
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._elementwise import at, tile, tiled
from liger_kernel.ops._op import Cost, Op, first_order, like, named, place
from liger_kernel.ops._reuse import saved
from liger_kernel.ops._triton import tl, triton

# 1 reference


def reference(x: Tensor) -> Tensor:
    """The definition."""
    return torch.relu(x).square()


# 2 kernels


@triton.jit
def _forward_kernel(Y, X, sY_row, sX_row, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, start, cols, mask = tile(n_rows, n_cols, ROWS, BLOCK)  # type: ignore[misc]
    x = tl.load(at(X, row, sX_row, start, cols), mask=mask, other=0.0).to(tl.float32)
    r = tl.where(x <= 0.0, 0.0, x)
    tl.store(at(Y, row, sY_row, start, cols), (r * r).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    DX, DY, X, sDX_row, sDY_row, sX_row, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row, start, cols, mask = tile(n_rows, n_cols, ROWS, BLOCK)  # type: ignore[misc]
    dy = tl.load(at(DY, row, sDY_row, start, cols), mask=mask, other=0.0).to(tl.float32)
    x = tl.load(at(X, row, sX_row, start, cols), mask=mask, other=0.0).to(tl.float32)
    dx = tl.where(x <= 0.0, 0.0, 2.0 * x * dy)
    tl.store(at(DX, row, sDX_row, start, cols), dx.to(DX.dtype.element_ty), mask=mask)


# 3 launch

_forward, _backward = tiled(_forward_kernel), tiled(_backward_kernel)


def _fake_forward(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@named("(Tensor x) -> Tensor", _fake_forward)
def relu_squared_forward_kernel(x: Tensor) -> Tensor:
    """-> y like x, contiguous."""
    y = like(x)
    _forward((y, x))
    return y


def _fake_backward(dy: Tensor, x: Tensor, dx: Tensor | None = None) -> Tensor:
    return place(dx, x)


@named("(Tensor dy, Tensor x, Tensor? dx=None) -> Tensor", _fake_backward)
def relu_squared_backward_kernel(dy: Tensor, x: Tensor, dx: Tensor | None = None) -> Tensor:
    """-> dx like x, contiguous; in dx if that is given, x's own memory as a rule (`_reuse`)."""
    dx = place(dx, x)
    _backward((dx, dy, x))
    return dx


# 4 op


class _ReLUSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return relu_squared_forward_kernel(x)

    @staticmethod
    @first_order("relu_squared")
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,), rooms = saved(ctx)
        return relu_squared_backward_kernel(dy, x, *rooms)


def supports(x: Tensor) -> str | None:
    """Every shape and layout."""
    return None if x.is_floating_point() else f"{x.dtype} is not a floating-point dtype"


def cost(x: Tensor) -> Cost:
    """x in, y out; then dy and x in, dx out."""
    n = x.numel() * x.element_size()
    return Cost(forward_bytes=2 * n, backward_bytes=3 * n, saved=0)


OP = Op(
    "relu_squared",
    reference,
    reference,
    _ReLUSquared.apply,
    supports,
    cost,
    rows=1,
    elementwise=True,
)

# 5 public


def relu_squared(x: Tensor, impl: str | None = None) -> Tensor:
    """max(x, 0)^2, element by element.

    Args:
        x: any shape and strides; fp16, bf16, fp32 (fp64 and integers on the torch path).
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        A contiguous tensor of x's shape and dtype.
    Memory:
        Keeps x for backward, which writes its gradient over it if nobody else holds it.
    """
    return OP(x, impl=impl)


# The names other libraries call


class LigerReLUSquaredFunction:
    """`apply(X)` is `relu_squared`."""

    @staticmethod
    def apply(X: Tensor) -> Tensor:
        return relu_squared(X)


def relu_squared_forward(X: Tensor) -> Tensor:
    """-> Y, by the kernel and outside autograd."""
    return relu_squared_forward_kernel(X)


def relu_squared_backward(X: Tensor, dY: Tensor) -> Tensor:
    """-> dX in a new tensor, by the kernel and outside autograd."""
    return relu_squared_backward_kernel(dY, X)
