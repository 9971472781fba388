"""RMSNorm layers. Every variant is `LigerRMSNorm` with other defaults; the table of models is
theirs, the arithmetic is `liger_kernel.ops.rms_norm`."""

import torch
from torch import Tensor, nn

from liger_kernel.ops._op import choice
from liger_kernel.ops.rms_norm import rms_norm

_INIT = {"ones": torch.ones, "zeros": torch.zeros}


class LigerRMSNorm(nn.Module):
    """x / rms(x) * (offset + weight) over the last dimension.

    Args:
        hidden_size: size of the last dimension; None only without a weight.
        eps: added to the mean square.
        offset: added to the weight.
        casting_mode: "llama", "gemma" or "none": where values are rounded, see the op.
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
