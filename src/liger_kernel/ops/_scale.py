"""Multiply a buffer by a scalar that lives on the device, reading nothing when that scalar is 1."""

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import observed
from liger_kernel.ops._triton import AVAILABLE, Launch, cdiv, planned, tl, triton

_BLOCK = 4096
_PER_SM = 8  # few programs: when factor is 1 each of them reads it and ends


@triton.jit
def _scale_kernel(X, S, n, share, BLOCK: tl.constexpr):
    factor = tl.load(S).to(tl.float32)
    if factor != 1.0:
        first = row_base(tl.program_id(0), share)
        for start in range(0, share, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = (at < share) & (at < n - first)
            x = tl.load(X + first + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(X + first + at, (x * factor).to(X.dtype.element_ty), mask=mask)


def scale_(buffer: Tensor, factor: Tensor) -> Tensor:
    """buffer * factor, for a contiguous buffer nobody else holds and a 0-dim factor.

    The buffer is reused, and left alone when factor is 1; a compiler gets a plain product instead.
    """
    if torch.compiler.is_compiling():
        return buffer * factor
    fused = AVAILABLE and _env.triton_runs_on(buffer.device.type)
    if not fused or observed() or buffer.dtype == torch.float64:
        return buffer.mul_(factor)
    _plan(buffer.device, buffer.numel())(buffer, factor)
    return buffer


@planned
def _plan(device: torch.device, n: int) -> Launch:
    programs = min(cdiv(n, _BLOCK), _PER_SM * _env.device_info(device).sm_count)
    share = cdiv(cdiv(n, max(programs, 1)), _BLOCK) * _BLOCK  # contiguous, below 2^31
    grid = (cdiv(n, max(share, 1)),)
    return Launch(_scale_kernel, grid, device, n, share, BLOCK=_BLOCK, num_warps=8)
