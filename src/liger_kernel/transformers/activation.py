"""Layers around one elementwise or row-wise function, with the constructors their users know."""

import torch
from torch import Tensor, nn

from liger_kernel.ops.dyt import dyt
from liger_kernel.ops.poly_norm import poly_norm
from liger_kernel.ops.relu_squared import relu_squared
from liger_kernel.ops.softmax import softmax
from liger_kernel.ops.sparsemax import sparsemax


class LigerReLUSquared(nn.Module):
    """max(x, 0)^2, Hugging Face's `ReLUSquaredActivation`."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape and dtype."""
        return relu_squared(x)


class LigerSoftmax(nn.Module):
    """Softmax over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """`[*, D]` -> the same shape and dtype."""
        return softmax(x)


class LigerSparsemax(nn.Module):
    """The projection onto the probability simplex: a softmax with true zeros.

    Args:
        dim: the dimension that sums to 1.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape and dtype."""
        return sparsemax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LigerDyT(nn.Module):
    """gamma * tanh(alpha * x) + beta, in the place of a normalisation.

    Args:
        hidden_size: size of the last dimension.
        beta: whether there is a shift.
        init_alpha: what alpha starts as; gamma starts as ones, beta as zeros.
    """

    beta: nn.Parameter | None

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.init_alpha = init_alpha
        self.alpha = nn.Parameter(torch.full((1,), float(init_alpha)))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("beta", nn.Parameter(torch.zeros(hidden_size)) if beta else None)

    def forward(self, x: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same shape and dtype."""
        return dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, beta={self.beta is not None}, init_alpha={self.init_alpha}"


class LigerPolyNorm(nn.Module):
    """w0 * n(x^3) + w1 * n(x^2) + w2 * n(x) + b with n(u) = u / rms(u), over the last dimension.

    Args:
        eps: added to the mean square of each power.
        in_place: accepted; no tensor of the caller is ever written.
    """

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1.0 / 3.0))
        self.bias = nn.Parameter(torch.ones(1))
        self.variance_epsilon = eps
        self.in_place = in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[*, D]` -> the same shape and dtype."""
        return poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}"
