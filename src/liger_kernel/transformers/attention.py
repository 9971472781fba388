"""Attention-like layers: multi-token attention on scores, and attention over a window of neighbours."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops._op import require
from liger_kernel.ops.fused_neighborhood_attention import (
    LigerFusedNeighborhoodAttentionFunction,
    check_window,
    fused_neighborhood_attention,
)
from liger_kernel.ops.multi_token_attention import (
    LigerMultiTokenAttentionFunction,
    multi_token_attention,
)
from liger_kernel.transformers.norm import LigerLayerNorm

__all__ = [
    "LigerFusedNeighborhoodAttention",
    "LigerFusedNeighborhoodAttentionConfig",
    "LigerFusedNeighborhoodAttentionFunction",
    "LigerFusedNeighborhoodAttentionLayer",
    "LigerMultiTokenAttention",
    "LigerMultiTokenAttentionFunction",
]


class LigerMultiTokenAttention(nn.Module):
    """Causal attention weights mixed over neighbouring queries, keys and heads by a convolution.

    Args:
        in_channels, out_channels: heads before and after.
        kernel_size: of the square convolution over (query, key).
        stride, padding, dilation, groups: as in `nn.Conv2d`.
        bias: whether the convolution has one.
        sparse: sparsemax instead of softmax.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        require(
            in_channels % groups == 0 and out_channels % groups == 0,
            f"LigerMultiTokenAttention: groups must divide in_channels and out_channels; got {groups} for "
            f"{in_channels} and {out_channels}.",
        )
        self.in_channels, self.out_channels, self.kernel_size = (
            in_channels,
            out_channels,
            kernel_size,
        )
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.sparse = sparse
        shape = (out_channels, in_channels // groups, kernel_size, kernel_size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `nn.Conv2d`."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = self.weight[0].numel() ** -0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, scores: Tensor) -> Tensor:
        """Scores `[B, in_channels, L, L]` before any mask -> `[B, out_channels, H, W]`."""
        return multi_token_attention(
            scores,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.sparse,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"bias={self.bias is not None}, sparse={self.sparse}"
        )


class LigerFusedNeighborhoodAttention(nn.Module):
    """Multi-head attention of each position over a window around it.

    Args:
        hidden_size: width of the input, split evenly over the heads.
        num_heads: number of heads.
        kernel_size: positions in a window, odd.
        dilation: distance of neighbouring positions of a window.
        bias: whether the four projections have one.
        dropout: applied to the result.
        scale: factor of the scores; None for head size ** -0.5.
    Raises:
        ValueError: heads that do not divide the width, or a window that is none.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        require(
            hidden_size % num_heads == 0,
            f"{name}: num_heads must divide hidden_size; got {num_heads} for {hidden_size}.",
        )
        check_window(name, kernel_size, dilation)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_dim = hidden_size // num_heads
        self.kernel_size, self.dilation = kernel_size, dilation
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`[B, S, hidden_size]` -> the same shape; `attention_mask` `[B, S]`, bool or integer, is 0 at
        padding, which no position sees."""
        split = (*hidden_states.shape[:2], self.num_heads, self.head_dim)
        q, k, v = (
            proj(hidden_states).view(split).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = fused_neighborhood_attention(
            q, k, v, self.kernel_size, self.dilation, self.scale, attention_mask
        )
        return self.dropout(self.out_proj(mixed.transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, kernel_size={self.kernel_size}, "
            f"dilation={self.dilation}, scale={self.scale}"
        )


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """x + attention(layer_norm(x)); arguments as `LigerFusedNeighborhoodAttention`."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm = LigerLayerNorm(hidden_size, eps=layer_norm_eps)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`[B, S, hidden_size]` -> the same shape; `attention_mask` as in the attention."""
        return hidden_states + self.attention(self.layer_norm(hidden_states), attention_mask)


class LigerFusedNeighborhoodAttentionConfig:
    """The arguments of `LigerFusedNeighborhoodAttentionLayer` under one name, with the defaults of a
    small transformer."""

    def __init__(
        self,
        hidden_size: int = 768,
        num_heads: int = 12,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.kernel_size = kernel_size
        self.dilation = dilation
        self.bias = bias
        self.dropout = dropout
        self.layer_norm_eps = layer_norm_eps
        self.scale = scale

    def to_dict(self) -> dict[str, Any]:
        """`LigerFusedNeighborhoodAttentionLayer(**config.to_dict())` is the layer."""
        return dict(vars(self))
