"""Norm layers. Every RMSNorm of a model family is `LigerRMSNorm` with other defaults; the arithmetic
is that of `liger_kernel.ops`."""

import torch
from torch import Tensor, nn

from liger_kernel import functional
from liger_kernel.ops._op import choice
from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm
from liger_kernel.ops.gated_rms_norm import gated_rms_norm
from liger_kernel.ops.modulated_rms_norm import modulated_rms_norm
from liger_kernel.ops.rms_norm import rms_norm

_INIT = {"ones": torch.ones, "zeros": torch.zeros}


class LigerRMSNorm(nn.Module):
    """x / rms(x) * (offset + weight) over the last dimension.

    Args:
        hidden_size: size of the last dimension; None only without a weight.
        eps: added to the mean square.
        offset: added to the weight.
        casting_mode: "llama", "gemma", "none" or "t5": where values are rounded, see the op.
        init_fn: "ones" or "zeros", what the weight starts as.
        in_place: accepted; no tensor of the caller is ever written.
        row_mode: accepted; the rows per program follow from the width.
        elementwise_affine: whether there is a weight.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int | None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        choice(type(self).__name__, "init_fn", init_fn, tuple(_INIT))
        weight = None
        if elementwise_affine:
            if hidden_size is None:
                raise ValueError(f"{type(self).__name__}: a norm with a weight needs its size.")
            weight = nn.Parameter(_INIT[init_fn](hidden_size))
        self.register_parameter("weight", weight)
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.in_place = in_place
        self.row_mode = row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same shape and dtype."""
        return rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self) -> str:
        size = None if self.weight is None else tuple(self.weight.shape)
        return (
            f"{size}, eps={self.variance_epsilon}, offset={self.offset}, "
            f"casting_mode={self.casting_mode!r}"
        )


class LigerRMSNormForGemma(LigerRMSNorm):
    """Gemma: the weight is stored as its difference from one and applied in fp32."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """Gemma 2: as Gemma."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    """Qwen3-Next and Qwen3.5: as Gemma 2."""


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    """MuseGlimmer's text tower: as Gemma 2."""


class LigerRMSNormForGemma3(LigerRMSNorm):
    """Gemma 3: as Gemma 2; its size is called `dim`."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """Gemma 4: the whole weight is stored and applied in fp32; `with_scale=False` has none."""

    def __init__(
        self,
        dim: int | None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(
            dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale
        )
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """MuseGlimmer: as Gemma 4; without a scale it needs no size."""

    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """OLMo 2 as the contract names it. (Hugging Face's class multiplies in fp32, which is
    `casting_mode="gemma"`; the patcher finds that by itself.)"""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """GLM-4: the defaults of `LigerRMSNorm`."""


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """Residual addition and RMSNorm: `layer(hidden_states, residual)` -> (normalised sum, sum).

    Args:
        hidden_size, eps, offset, casting_mode, init_fn, in_place: as in `LigerRMSNorm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Two `[*, hidden_size]` -> (norm(s), s) with s = hidden_states + residual."""
        how = (self.variance_epsilon, self.offset, self.casting_mode)
        return fused_add_rms_norm(hidden_states, residual, self.weight, *how)


class LigerModulatedRMSNorm(LigerRMSNorm):
    """Adaptive RMSNorm: `layer(hidden_states, scale, shift)` -> (1 + scale) * norm(hidden_states) + shift.

    Args:
        hidden_size, eps, offset, casting_mode, init_fn, in_place, elementwise_affine: as in `LigerRMSNorm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__(
            hidden_size, eps, offset, casting_mode, init_fn, in_place, None, elementwise_affine
        )

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None
    ) -> Tensor:
        """`[*, hidden_size]` -> the same shape and dtype; see the op for the shapes of scale and shift."""
        how = (self.variance_epsilon, self.offset, self.casting_mode)
        return modulated_rms_norm(hidden_states, self.weight, scale, shift, *how)


class LigerGatedRMSNorm(LigerRMSNorm):
    """RMSNorm with a gate: `layer(hidden_states, gate)`, the gate before or after the norm.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        norm_before_gate: True: norm(x) * weight * act(gate). False: norm(x * act(gate)) * weight.
        group_size: adjacent columns that share a norm; None for all.
        activation: "silu" or "sigmoid", of the gate.
        casting_mode: "llama" or "gemma": where values are rounded, see the op.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        norm_before_gate: bool = True,
        group_size: int | None = None,
        activation: str = "silu",
        casting_mode: str = "llama",
    ) -> None:
        super().__init__(hidden_size, eps, casting_mode=casting_mode)
        self.norm_before_gate = norm_before_gate
        self.group_size = group_size
        self.activation = activation

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Two `[*, hidden_size]` -> the shape and dtype of the first."""
        how = (self.norm_before_gate, self.group_size, self.activation, self.casting_mode)
        assert self.weight is not None
        return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, *how)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, norm_before_gate={self.norm_before_gate}, "
            f"group_size={self.group_size}, activation={self.activation!r}"
        )


class LigerLayerNorm(nn.Module):
    """LayerNorm over the last dimension, in fp32 inside.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the variance.
        bias: accepted; there always is a bias, and it starts as zeros, so that the checkpoints of a
            replaced `nn.LayerNorm` load.
        init_fn: "ones" or "zeros", what the weight starts as.
        impl, mode, backend: as in `liger_kernel.functional`; `backend` is the older name of `impl`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        choice("LigerLayerNorm", "init_fn", init_fn, tuple(_INIT))
        self.hidden_size = hidden_size
        self.weight = nn.Parameter(_INIT[init_fn](hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.variance_epsilon = eps
        self.impl, self.mode, self.backend = impl, mode, backend

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same shape and dtype."""
        chosen = {"impl": self.impl, "mode": self.mode, "backend": self.backend}
        return functional.layer_norm(
            hidden_states, self.weight, self.bias, self.variance_epsilon, **chosen
        )

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"
