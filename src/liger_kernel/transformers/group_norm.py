"""GroupNorm as a layer."""

import torch
from torch import Tensor, nn

from liger_kernel.ops._op import choice, require
from liger_kernel.ops.group_norm import LigerGroupNormFunction, group_norm

__all__ = ["LigerGroupNorm", "LigerGroupNormFunction"]

_INIT = {"ones": torch.ones, "zeros": torch.zeros}


class LigerGroupNorm(nn.Module):
    """`torch.nn.GroupNorm` with a weight and a bias, whose names it shares: state dicts fit.

    Args:
        num_channels: size of dimension 1.
        num_groups: divides num_channels.
        eps: added to the variance.
        bias: accepted; there always is a bias, which starts as zeros, so that the state of any
            `torch.nn.GroupNorm` with parameters loads.
        init_fn: "ones" or "zeros", what the weight starts as.
    Raises:
        ValueError: num_groups does not divide num_channels, or an unknown init_fn.
    """

    def __init__(
        self,
        num_channels: int,
        num_groups: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
    ) -> None:
        super().__init__()
        choice("LigerGroupNorm", "init_fn", init_fn, tuple(_INIT))
        require(
            num_groups > 0 and num_channels % num_groups == 0,
            f"LigerGroupNorm: num_groups must divide num_channels; got {num_groups} and {num_channels}.",
        )
        self.num_channels = num_channels
        self.num_groups = num_groups
        self.variance_epsilon = eps
        self.weight = nn.Parameter(_INIT[init_fn](num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[B, num_channels, *]` -> the same shape and dtype."""
        return group_norm(
            hidden_states, self.num_groups, self.weight, self.bias, self.variance_epsilon
        )

    def extra_repr(self) -> str:
        return f"{self.num_channels}, {self.num_groups}, eps={self.variance_epsilon}"
