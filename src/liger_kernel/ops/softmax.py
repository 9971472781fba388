"""Softmax over the last dimension.   y = exp(x - max x) / sum exp(x - max x)

    x, y: [*, D]

Backward   dx = y * (dy - sum(dy * y))

Casts   fp32 throughout, one rounding at the end. Entries of -inf get 0; a row of nothing else, or one that holds NaN or
        +inf, is NaN, as in eager PyTorch.
Memory  forward reads x once and writes y, which is all that is kept; backward reads dy and y once and writes dx. Rows
        too wide for registers, or beginning on no multiple of 16 bytes, are visited twice, the second time from L2
        (`_softmax_kernels`), with 8 bytes for each of the programs that share one.
Paper   Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867
"""
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._columns import column_flags
from liger_kernel.ops._device import exp, row_base
from liger_kernel.ops._op import Cost, Op, first_order, like, named, spaced
from liger_kernel.ops._row_parts import board
from liger_kernel.ops._schedules import SM_WARPS, TILE, Entry, Table, card_of, fits_tile
from liger_kernel.ops._softmax_kernels import (
    BACKWARD,
    FORWARD,
    backward_wide_kernel,
    forward_wide_kernel,
    wide,
)
from liger_kernel.ops._triton import Launch, block_of, cdiv, planned, tl, triton

_MAX_BLOCK = 32768  # columns a program holds in registers, forward
_MAX_BYTES = 65536  # the same in backward, bytes of each of its two operands
_MIN_SHIFTED = 2048  # columns of rows that begin on no multiple of 16 bytes, from which on they are visited twice
_RESERVE = 4096  # bytes of shared memory that reductions may take beside the pipeline


def _fits(block: int, rows: int, warps: int, per_sm: int, stages: int) -> bool:
    pipelined = (per_sm > 0) == (stages > 1)
    return fits_tile(block, rows, warps) and pipelined and per_sm * warps <= SM_WARPS


# block of columns -> (rows, warps, programs per SM, stages); with one stage, a program for every tile. Narrower rows
# share the tile of the narrowest. Where only one program fits an SM, it fetches the next row while it works on one.
_FIELDS = {**TILE, "per_sm": (0, 1, 2, 4), "stages": (1, 2, 3)}
_BY_BLOCK = {
    256: (16, 4, 0, 1), 512: (8, 4, 0, 1), 1024: (4, 4, 0, 1), 2048: (2, 4, 0, 1), 4096: (1, 8, 0, 1),
    8192: (1, 16, 0, 1), 16384: (1, 32, 0, 1), 32768: (1, 32, 0, 1),
}  # fmt: skip
_FORWARD = Table(
    "softmax.forward", _FIELDS, {**_BY_BLOCK, 1024: (2, 2, 0, 1), 32768: (1, 16, 1, 3)}, _fits
)
_BACKWARD = Table("softmax.backward", _FIELDS, {**_BY_BLOCK, 16384: (1, 32, 1, 3)}, _fits)

# 1 reference


def reference(x: Tensor) -> Tensor:
    """The definition."""
    return torch.softmax(x, -1)


# 2 kernels


@triton.jit
def _forward_kernel(
    Y, X, sX_row, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    cols = tl.arange(0, BLOCK)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, n_rows, step, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        m_row = (row < n_rows)[:, None]
        mask = m_row & (cols < n_cols)[None, :]
        at_x = X + row_base(row, sX_row)[:, None] + cols[None, :]
        x = tl.load(at_x, mask=mask, other=float("-inf")).to(tl.float32)
        x = tl.where(m_row, x, 0.0)  # rows that do not exist: any numbers that make no NaN
        e = exp(x - tl.max(x, axis=1)[:, None])
        y = e * (1.0 / tl.sum(e, axis=1))[:, None]
        at_y = Y + row_base(row, n_cols)[:, None] + cols[None, :]
        tl.store(at_y, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    DX, DY, Y, sDY_row, sY_row, n_rows, n_cols,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, n_rows, step, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < n_rows)[:, None] & (cols < n_cols)[None, :]
        at_dy = DY + row_base(row, sDY_row)[:, None] + cols[None, :]
        at_y = Y + row_base(row, sY_row)[:, None] + cols[None, :]
        dy = tl.load(at_dy, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(at_y, mask=mask, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(dy * y, axis=1)[:, None])
        at_dx = DX + row_base(row, n_cols)[:, None] + cols[None, :]
        tl.store(at_dx, dx.to(DX.dtype.element_ty), mask=mask)


# 3 launch


def forward_bytes(n_cols: int, itemsize: int, *steps: int) -> int:
    """What is read of a row that is visited twice, of others 0; steps: from row to row of what is read."""
    twice = block_of(n_cols) > _MAX_BLOCK or _begins_anywhere(n_cols, itemsize, *steps)
    return n_cols * itemsize if twice else 0


def backward_bytes(n_cols: int, itemsize: int, *steps: int) -> int:
    """The same in backward."""
    twice = block_of(n_cols) * itemsize > _MAX_BYTES or _begins_anywhere(n_cols, itemsize, *steps)
    return 2 * n_cols * itemsize if twice else 0


def _begins_anywhere(n_cols: int, itemsize: int, *steps: int) -> bool:
    """Whether a second visit is cheaper than accesses of one element each."""
    return n_cols >= _MIN_SHIFTED and column_flags(n_cols, itemsize, n_cols, *steps)["SHIFTED"]


@planned
def _forward(
    device: torch.device, itemsize: int, n_rows: int, n_cols: int, x_step: int
) -> tuple[Launch, int]:
    """-> launch, and how many programs share a row, 0 where registers hold it."""
    if size := forward_bytes(n_cols, itemsize, x_step):
        given = device, itemsize, n_rows, n_cols, x_step
        return wide(forward_wide_kernel, FORWARD, size, *given)
    numbers, block = (x_step, n_rows, n_cols), block_of(n_cols)
    entry = _FORWARD.choose(block, itemsize, card_of(device))
    programs, meta = _narrow(device, entry, block, block * itemsize, n_rows)
    return Launch(_forward_kernel, (programs,), device, *numbers, **meta), 0


@planned
def _backward(
    device: torch.device, itemsize: int, n_rows: int, n_cols: int, dy_step: int, y_step: int
) -> tuple[Launch, int]:
    """-> as `_forward`."""
    if size := backward_bytes(n_cols, itemsize, dy_step, y_step):
        given = device, itemsize, n_rows, n_cols, dy_step, y_step
        return wide(backward_wide_kernel, BACKWARD, size, *given)
    numbers, block = (dy_step, y_step, n_rows, n_cols), block_of(n_cols)
    entry = _BACKWARD.choose(block, itemsize, card_of(device))
    programs, meta = _narrow(device, entry, block, 2 * block * itemsize, n_rows)
    return Launch(_backward_kernel, (programs,), device, *numbers, **meta), 0


def _narrow(
    device: torch.device, entry: Entry, block: int, row_bytes: int, n_rows: int
) -> tuple[int, dict[str, int]]:
    """row_bytes: a block of all operands; a pipeline has (stages - 1) times as much in shared memory."""
    info = _env.device_info(device)
    n, warps, per_sm, stages = entry
    n *= max(256 // block, 1)
    stages = min(stages, 1 + (info.shared_memory - _RESERVE) // row_bytes)
    tiles = cdiv(n_rows, n)
    programs = min(tiles, per_sm * info.sm_count) if stages > 1 else tiles
    meta = {"ROWS": n, "BLOCK": block, "STAGES": stages, "num_warps": min(warps, info.max_warps)}
    return programs, meta


def _start(plan: tuple[Launch, int], n_rows: int, *tensors: Tensor) -> None:
    run, parts = plan
    if parts:
        run(board(tensors[0].device, n_rows, parts), *tensors)
    else:
        run(*tensors)


def _fake_forward(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@named("(Tensor x) -> Tensor", _fake_forward)
def softmax_forward_kernel(x: Tensor) -> Tensor:
    """-> y like x, contiguous."""
    n_rows, n_cols, y = x.shape[:-1].numel(), x.shape[-1], like(x)
    x, step = spaced(x)
    _start(_forward(x.device, x.element_size(), n_rows, n_cols, step), n_rows, y, x)
    return y


def _fake_backward(dy: Tensor, y: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@named("(Tensor dy, Tensor y) -> Tensor", _fake_backward)
def softmax_backward_kernel(dy: Tensor, y: Tensor) -> Tensor:
    """-> dx like y, contiguous."""
    n_rows, n_cols, dx = y.shape[:-1].numel(), y.shape[-1], like(y)
    dy, dy_step = spaced(dy)
    y, y_step = spaced(y)
    plan = _backward(y.device, y.element_size(), n_rows, n_cols, dy_step, y_step)
    _start(plan, n_rows, dx, dy, y)
    return dx


# 4 op


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = softmax_forward_kernel(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_order("softmax")
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return softmax_backward_kernel(dy, y)


def supports(x: Tensor) -> str | None:
    """Every width and layout; an empty row has no maximum."""
    if not x.is_floating_point():
        return f"{x.dtype} is not a floating-point dtype"
    return "rows have no columns" if x.dim() == 0 or x.shape[-1] == 0 else None


def cost(x: Tensor) -> Cost:
    """x in, y out; then dy and y in, dx out."""
    n = x.numel() * x.element_size()
    return Cost(forward_bytes=2 * n, backward_bytes=3 * n, saved=0)


OP = Op("softmax", reference, reference, _Softmax.apply, supports, cost, rows=1)

# 5 public


def softmax(x: Tensor, impl: str | None = None) -> Tensor:
    """exp(x) / sum exp(x) over the last dimension.

    Args:
        x: `[*, D]` of any rank, width and strides; fp16, bf16, fp32 (fp64 on the torch path).
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, D]` in x's dtype, contiguous.
    Memory:
        Keeps the result for backward, x not.
    """
    return OP(x, impl=impl)


class LigerSoftmaxFunction:
    """`apply(input_)` is `softmax`."""

    @staticmethod
    def apply(input_: Tensor) -> Tensor:
        return softmax(input_)
