"""Multiply a buffer by a scalar that lives on the device, reading nothing when that scalar is 1."""

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import observed
from liger_kernel.ops._triton import AVAILABLE, cdiv, launch, tl, triton

_BLOCK = 4096


@triton.jit
def _scale_kernel(X, S, n, BLOCK: tl.constexpr):
    factor = tl.load(S).to(tl.float32)
    if factor != 1.0:
        X += row_base(tl.program_id(0), BLOCK)
        left = n - row_base(tl.program_id(0), BLOCK)
        at = tl.arange(0, BLOCK)
        x = tl.load(X + at, mask=at < left, other=0.0).to(tl.float32)
        tl.store(X + at, (x * factor).to(X.dtype.element_ty), mask=at < left)


def scale_(buffer: Tensor, factor: Tensor) -> Tensor:
    """buffer * factor, for a contiguous buffer nobody else holds and a 0-dim factor.

    The buffer is reused, and left alone when factor is 1; a compiler gets a plain product instead.
    """
    if torch.compiler.is_compiling():
        return buffer * factor
    fused = AVAILABLE and _env.triton_runs_on(buffer.device.type)
    if not fused or observed() or buffer.dtype == torch.float64:
        return buffer.mul_(factor)
    grid, meta = (cdiv(buffer.numel(), _BLOCK),), {"BLOCK": _BLOCK, "num_warps": 8}
    launch(_scale_kernel, grid, buffer.device, buffer, factor, buffer.numel(), **meta)
    return buffer
