"""The functional layer API: `liger_rms_norm(X, W, eps)` and its kin.

Frameworks replace functions of this module, so the rest of the package looks them up here at call
time. Defaults differ from `liger_kernel.functional` where users of either expect it. `in_place` is
accepted everywhere and means buffers the op allocated itself, never a tensor of the caller.
"""

from collections.abc import Sequence

from torch import Tensor

from liger_kernel.ops import attn_res as _attn_res
from liger_kernel.ops import dyt as _dyt
from liger_kernel.ops import fused_add_rms_norm as _fused_add_rms_norm
from liger_kernel.ops import fused_neighborhood_attention as _fused_neighborhood_attention
from liger_kernel.ops import geglu as _geglu
from liger_kernel.ops import group_norm as _group_norm
from liger_kernel.ops import layer_norm as _layer_norm
from liger_kernel.ops import modulated_rms_norm as _modulated_rms_norm
from liger_kernel.ops import multi_token_attention as _multi_token_attention
from liger_kernel.ops import poly_norm as _poly_norm
from liger_kernel.ops import qwen2vl_mrope as _qwen2vl_mrope
from liger_kernel.ops import relu_squared as _relu_squared
from liger_kernel.ops import rms_norm as _rms_norm
from liger_kernel.ops import rope as _rope
from liger_kernel.ops import softmax as _softmax
from liger_kernel.ops import sparsemax as _sparsemax
from liger_kernel.ops import swiglu as _swiglu
from liger_kernel.ops.cross_entropy import CrossEntropyOutput
from liger_kernel.ops.mhc import mhc_apply as liger_mhc_apply
from liger_kernel.ops.mhc import mhc_coeffs as liger_mhc_coeffs
from liger_kernel.ops.mhc import mhc_forward as liger_mhc_forward
from liger_kernel.ops.mhc import mhc_post_res as liger_mhc_post_res
from liger_kernel.ops.mhc import mhc_pre as liger_mhc_pre
from liger_kernel.transformers.functional_losses import (
    liger_cross_entropy,
    liger_fused_linear_cross_entropy,
    liger_fused_linear_jsd,
    liger_fused_linear_kl_div,
    liger_fused_linear_scaled_cross_entropy,
    liger_fused_linear_scaled_cross_entropy_tp,
    liger_jsd,
    liger_kl_div,
    liger_tvd,
)

__all__ = [
    "CrossEntropyOutput",
    "liger_attn_res",
    "liger_cross_entropy",
    "liger_dyt",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kl_div",
    "liger_fused_linear_scaled_cross_entropy",
    "liger_fused_linear_scaled_cross_entropy_tp",
    "liger_fused_neighborhood_attention",
    "liger_geglu",
    "liger_group_norm",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_mhc_apply",
    "liger_mhc_coeffs",
    "liger_mhc_forward",
    "liger_mhc_post_res",
    "liger_mhc_pre",
    "liger_modulated_rms_norm",
    "liger_multi_token_attention",
    "liger_poly_norm",
    "liger_qwen2vl_mrope",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rope",
    "liger_softmax",
    "liger_sparsemax",
    "liger_swiglu",
    "liger_tvd",
]


def liger_rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
) -> Tensor:
    """X / rms(X) * (offset + W) over the last dimension; see `liger_kernel.ops.rms_norm`."""
    return _rms_norm.rms_norm(X, W, eps, offset, casting_mode)


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """(Y, S): S = X + R, Y = RMSNorm of S; see `liger_kernel.ops.fused_add_rms_norm`."""
    return _fused_add_rms_norm.fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


def liger_modulated_rms_norm(
    X: Tensor,
    W: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
) -> Tensor:
    """(1 + scale) * RMSNorm(X) + shift; see `liger_kernel.ops.modulated_rms_norm`."""
    return _modulated_rms_norm.modulated_rms_norm(X, W, scale, shift, eps, offset, casting_mode)


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension; see `liger_kernel.ops.layer_norm`."""
    return _layer_norm.layer_norm(X, W, B, eps)


def liger_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate-half position embedding; see `liger_kernel.ops.rope`. New tensors: q and k stay as
    they are. `position_ids` is accepted, not read: cos and sin already belong to the positions."""
    return _rope.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=rotary_dim)


def liger_qwen2vl_mrope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    mrope_section: Sequence[int],
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Position embedding with temporal, height and width positions; see `liger_kernel.ops.qwen2vl_mrope`."""
    return _qwen2vl_mrope.qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b; see `liger_kernel.ops.swiglu`."""
    return _swiglu.swiglu(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """gelu(a) * b with the tanh form of GELU; see `liger_kernel.ops.geglu`."""
    return _geglu.geglu(a, b)


def liger_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension; see `liger_kernel.ops.softmax`."""
    return _softmax.softmax(x)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Projection onto the probability simplex along `dim`; see `liger_kernel.ops.sparsemax`."""
    return _sparsemax.sparsemax(input, dim)


def liger_relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2; see `liger_kernel.ops.relu_squared`."""
    return _relu_squared.relu_squared(x)


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """gamma * tanh(alpha * x) + beta; see `liger_kernel.ops.dyt`."""
    return _dyt.dyt(x, alpha, gamma, beta)


def liger_poly_norm(
    X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True
) -> Tensor:
    """A cubic in X with normalised powers; see `liger_kernel.ops.poly_norm`."""
    return _poly_norm.poly_norm(X, W, B, eps)


def liger_group_norm(
    X: Tensor,
    affine_scaling_weight: Tensor,
    affine_shifting_bias: Tensor,
    num_channels: int,
    num_groups: int,
    eps: float,
) -> Tensor:
    """Normalisation over groups of channels; see `liger_kernel.ops.group_norm`."""
    return _group_norm.LigerGroupNormFunction.apply(
        X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps
    )


def liger_multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0,
    dilation: int = 1, groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Causal attention weights mixed by a convolution; see `liger_kernel.ops.multi_token_attention`."""
    return _multi_token_attention.multi_token_attention(
        scores, weight, bias, stride, padding, dilation, groups, sparse
    )


def liger_fused_neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:  # fmt: skip
    """Attention over a window; see `liger_kernel.ops.fused_neighborhood_attention`."""
    return _fused_neighborhood_attention.fused_neighborhood_attention(
        query, key, value, kernel_size, dilation, scale
    )


def liger_attn_res(
    V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6
) -> Tensor:
    """Mixture of earlier blocks, `[N, *, D]` or a list of N; see `liger_kernel.ops.attn_res`."""
    return _attn_res.attn_res(V, w_query, w_norm, eps)
