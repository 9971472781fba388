"""A layer between several residual streams: manifold-constrained hyper-connections."""

import torch
from torch import Tensor, nn

from liger_kernel.ops._op import require
from liger_kernel.transformers.functional import (
    liger_mhc_coeffs,
    liger_mhc_forward,
    liger_mhc_post_res,
    liger_mhc_pre,
)

__all__ = ["LigerMHC", "liger_mhc_coeffs", "liger_mhc_post_res", "liger_mhc_pre"]

_PHI_STD = 0.02


class LigerMHC(nn.Module):
    """Wraps a layer `[*, c] -> [*, c]` into one on `hc` streams, `[*, hc, c] -> [*, hc, c]`.

    The gates are functions of the streams; see `liger_kernel.ops.mhc`. A model starts from
    `x.unsqueeze(-2).repeat(1, 1, hc, 1)` and ends with a sum or mean over streams.

    Args:
        layer: the layer; any module that keeps the shape of its one input.
        hc: number of streams.
        c: width.
        tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult: as in `liger_kernel.ops.mhc.mhc_coeffs`.
        phi_dtype: dtype of `phi`; b and the alphas are fp32.
        allow_fp32: whether the streams may be fp32.
    Raises:
        ValueError: the last two dimensions of an input are not `[hc, c]`.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.hc, self.c = hc, c
        self.tmax, self.rms_eps, self.pre_eps = tmax, rms_eps, pre_eps
        self.sinkhorn_eps, self.post_mult, self.allow_fp32 = sinkhorn_eps, post_mult, allow_fp32
        out = 2 * hc + hc * hc
        self.phi = nn.Parameter((_PHI_STD * torch.randn(hc * c, out)).to(phi_dtype))
        self.b = nn.Parameter(torch.zeros(out))
        self.alpha_pre = nn.Parameter(torch.ones(()))
        self.alpha_post = nn.Parameter(torch.ones(()))
        self.alpha_res = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Streams `[*, hc, c]` -> new streams of the same shape and dtype."""
        require(
            x.shape[-2:] == (self.hc, self.c),
            f"LigerMHC: the last two dimensions of x must be [{self.hc}, {self.c}]; got {list(x.shape)}.",
        )
        return liger_mhc_forward(
            x,
            self.layer,
            self.phi,
            self.b,
            self.alpha_pre,
            self.alpha_post,
            self.alpha_res,
            allow_fp32=self.allow_fp32,
            tmax=self.tmax,
            rms_eps=self.rms_eps,
            pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            post_mult=self.post_mult,
        )

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}, post_mult={self.post_mult}"
