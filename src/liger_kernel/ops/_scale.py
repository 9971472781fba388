"""Multiply buffers by a scalar that lives on the device, reading nothing when that scalar is 1."""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import observed
from liger_kernel.ops._triton import AVAILABLE, Launch, cdiv, planned, tl, triton

_BLOCK = 4096
_PER_SM = 8  # few programs: when factor is 1 each of them reads it and ends


@triton.jit
def _scale_share(X, factor, n, share, BLOCK: tl.constexpr):
    first = row_base(tl.program_id(0), share)
    for start in range(0, share, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = (at < share) & (at < n - first)
        x = tl.load(X + first + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(X + first + at, (x * factor).to(X.dtype.element_ty), mask=mask)


@triton.jit
def _scale_kernel(X, Y, Z, S, nX, nY, nZ, share_x, share_y, share_z, BLOCK: tl.constexpr):
    factor = tl.load(S).to(tl.float32)
    if factor != 1.0:
        _scale_share(X, factor, nX, share_x, BLOCK)
        if Y is not None:
            _scale_share(Y, factor, nY, share_y, BLOCK)
        if Z is not None:
            _scale_share(Z, factor, nZ, share_z, BLOCK)


def scale_(buffer: Tensor, factor: Tensor) -> Tensor:
    """buffer * factor, for a contiguous buffer nobody else holds and a 0-dim factor.

    The buffer is reused, and left alone when factor is 1; a compiler gets a plain product instead.
    """
    return scale_all_((buffer,), factor)[0]  # type: ignore[return-value]


def scale_all_(buffers: Sequence[Tensor | None], factor: Tensor) -> tuple[Tensor | None, ...]:
    """`scale_` of up to three buffers of one device, in one launch; None stays None."""
    if torch.compiler.is_compiling():
        return tuple(None if buffer is None else buffer * factor for buffer in buffers)
    given = [buffer for buffer in buffers if buffer is not None]
    fused = AVAILABLE and given and _env.triton_runs_on(given[0].device.type) and not observed()
    if fused and all(buffer.dtype != torch.float64 for buffer in given):
        sizes = [buffer.numel() for buffer in given]
        _plan(given[0].device, *sizes)(*given, *(None,) * (3 - len(given)), factor)
    else:
        for buffer in given:
            buffer.mul_(factor)
    return tuple(buffers)


@planned
def _plan(device: torch.device, *sizes: int) -> Launch:
    programs = min(cdiv(sum(sizes), _BLOCK), _PER_SM * _env.device_info(device).sm_count)
    # contiguous, below 2^31
    shares = [cdiv(cdiv(n, max(programs, 1)), _BLOCK) * _BLOCK for n in sizes]
    grid = (max(cdiv(n, max(share, 1)) for n, share in zip(sizes, shares, strict=True)),)
    none = [0] * (3 - len(sizes))
    numbers = (*sizes, *none, *shares, *none)
    return Launch(_scale_kernel, grid, device, *numbers, BLOCK=_BLOCK, num_warps=8)
