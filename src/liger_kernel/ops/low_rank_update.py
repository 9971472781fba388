"""What LoRA adds to a linear layer.   out = y + scale * (x A^T) B^T

    x: [*, H]   A: [r, H]   B: [O, r]   y, out: [*, O]   h = x A^T: [N, r] fp32, N = rows of x

Backward, with g = scale * dout B, [N, r] fp32:

    dy = dout   dB = scale * dout^T h   dA = g^T x   dx = g A

With dropout x is m x / (1 - p) in all of this but in y's own computation, m a mask (`_dropout.py`).

Casts   The low-rank part is fp32 whatever the dtypes are, and meets y in fp32: one rounding, to y's dtype. bf16 x
        against fp32 A is multiplied exactly: A becomes three bf16 terms in registers.
Memory  keeps x, A, B and h, 4 r bytes a row: no copy of x in another dtype. Of the large operands, forward reads x once
        for h, then y, and writes out; backward reads dout twice (for g, for dB) and x once (dA), and writes dx. What is
        summed over rows passes through fp32 partials, added in a fixed order.
Around  a layer, as LoRA has it, y = layer(x) gives dx a second term. `low_rank_down` hands x on to the layer, so that
        this term comes back through its own backward, where the kernel that writes dx adds it: one pass, not three.
Paper   Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops import _dropout
from liger_kernel.ops import _low_rank_kernels as kernels
from liger_kernel.ops._norm_plan import pipeline
from liger_kernel.ops._op import (
    Cost,
    Op,
    compute_dtype,
    direct,
    first_order,
    like,
    named,
    no_autocast,
    require,
    spaced,
)
from liger_kernel.ops._reduce import sum_partials
from liger_kernel.ops._triton import Launch, block_of, cdiv, planned

_NAME = "low_rank_update"
_MOST = 256  # ranks that a program holds

# 1 reference


def reference(
    y: Tensor, x: Tensor, A: Tensor, B: Tensor, scale: float = 1.0, dropout: float = 0.0, seed: Tensor | None = None
) -> Tensor:  # fmt: skip
    """The definition."""
    dtype, kind = compute_dtype(y), x.device.type
    wide, dropped = x.to(dtype), _dropout.steps(dropout)
    if dropped:
        seed = _dropout.drawn(x) if seed is None else seed
        kept = _dropout.mask(seed, x.shape[:-1].numel(), x.shape[-1], dropped)
        wide = wide * kept.view(x.shape) * _dropout.factor(dropped)
    with no_autocast(kind):
        low_rank = (wide @ A.to(dtype).t()) @ B.to(dtype).t()
    return (y.to(dtype) + scale * low_rank).to(y.dtype)


# 2 launch

# block of ranks -> rows, columns, warps, stages, for x in 16 bits. At 16 ranks within 10 % of the best that was
# measured on an H200 (NOTES.md); wider tiles spill on other cards.
_DOWN = {
    16: (64, 128, 4, 4),
    32: (64, 64, 4, 6),
    64: (64, 64, 8, 5),
    128: (64, 64, 8, 3),
    256: (64, 32, 8, 3),
}
_COLUMNS = {
    16: (64, 128, 4, 4),
    32: (64, 128, 4, 4),
    64: (32, 128, 8, 4),
    128: (64, 64, 8, 3),
    256: (32, 64, 8, 3),
}
_UP = (64, 128, 4)  # rows, columns, warps
_STEP = 16  # ranks that a tile of the result takes at a time
_PER_SM = 2  # programs that sum over rows: their tiles are small


def _fake_down(x, w, scale, seed=None, dropped=0):
    return x.new_empty((x.shape[:-1].numel(), w.shape[0]), dtype=torch.float32)


@named("(Tensor x, Tensor w, float scale, Tensor? seed=None, int dropped=0) -> Tensor", _fake_down)
def low_rank_down_kernel(
    x: Tensor, w: Tensor, scale: float, seed: Tensor | None = None, dropped: int = 0
) -> Tensor:
    """x `[*, D]`, w `[r, D]` of any strides -> scale * x w^T, `[N, r]` fp32; of what a seed leaves of x."""
    x, step = spaced(x)
    n_rows, (rank, n_cols) = x.shape[:-1].numel(), w.shape
    sizes = (step, w.stride(), n_rows, n_cols, rank)
    parts, run = _down(x.device, x.dtype, w.dtype, *sizes, scale, dropped)
    h = x.new_empty((parts, n_rows * rank), dtype=torch.float32)
    run(h, x, w, seed)
    return (h if parts == 1 else sum_partials(h, h.dtype)).view(n_rows, rank)


@planned
def _down(
    device: torch.device, dtype: torch.dtype, w_dtype: torch.dtype, step: int, strides: tuple[int, ...],
    n_rows: int, n_cols: int, rank: int, scale: float, dropped: int,
) -> tuple[int, Launch]:  # fmt: skip
    """Few rows leave SMs idle: then several programs share the columns of a row."""
    block = _block(rank)
    rows, columns, warps, stages = _DOWN[block]
    columns = columns * 2 // dtype.itemsize
    blocks = cdiv(n_rows, rows)
    wanted = cdiv(_env.device_info(device).sm_count * 9 // 10, max(blocks, 1))
    share = cdiv(cdiv(n_cols, max(wanted, 1)), 4 * columns) * 4 * columns
    parts = cdiv(n_cols, share)
    tile = columns * (rows * dtype.itemsize + block * w_dtype.itemsize)
    meta = {
        "PRECISION": kernels.precision(dtype, w_dtype), "ROWS": rows, "COLUMNS": columns, "RANK": block,
        "STAGES": pipeline(stages, tile, device), "num_warps": warps,
    }  # fmt: skip
    numbers = (step, *strides, n_rows, n_cols, rank, share, scale, dropped)
    return parts, Launch(kernels.down_kernel, (blocks, parts), device, *numbers, **meta)


def _fake_up(y, h, w, scale, dtype, seed=None, dropped=0):
    return h.new_empty((h.shape[0], w.shape[0]) if y is None else y.shape, dtype=dtype)


@named(
    "(Tensor? y, Tensor h, Tensor w, float scale, ScalarType dtype, Tensor? seed=None, int dropped=0) -> Tensor",
    _fake_up,
)
def low_rank_up_kernel(
    y: Tensor | None, h: Tensor, w: Tensor, scale: float, dtype: torch.dtype, seed: Tensor | None = None,
    dropped: int = 0,
) -> Tensor:  # fmt: skip
    """h `[N, r]` fp32, w `[D, r]` of any strides -> y + scale * h w^T like y, without one `[N, D]`; contiguous. With a
    seed what is added is dropped in part."""
    (n_rows, rank), n_cols = h.shape, w.shape[0]
    out = h.new_empty((n_rows, n_cols), dtype=dtype) if y is None else like(y, dtype)
    y, step = (None, None) if y is None else spaced(y)
    sizes = (step, w.stride(), n_rows, n_cols, rank)
    _up(h.device, dtype, w.dtype, *sizes, scale, dropped)(out, y, h.contiguous(), w, seed)
    return out


@planned
def _up(
    device: torch.device, dtype: torch.dtype, w_dtype: torch.dtype, step: int | None, strides: tuple[int, ...],
    n_rows: int, n_cols: int, rank: int, scale: float, dropped: int,
) -> Launch:  # fmt: skip
    rows, columns, warps = _UP
    columns = columns * 2 // dtype.itemsize
    meta = {
        "PRECISION": kernels.precision(torch.float32, w_dtype), "ROWS": rows, "COLUMNS": columns,
        "RANK": min(_block(rank), _STEP), "num_warps": warps,
    }  # fmt: skip
    grid = (cdiv(n_rows, rows) * cdiv(n_cols, columns),)
    numbers = (step, *strides, n_rows, n_cols, rank, scale, dropped)
    return Launch(kernels.up_kernel, grid, device, *numbers, **meta)


def _fake_columns(x, g, scale, dtype, turned, seed=None, dropped=0):
    shape = (x.shape[-1], g.shape[1])
    return x.new_empty(shape[::-1] if turned else shape, dtype=dtype)


@named(
    "(Tensor x, Tensor g, float scale, ScalarType dtype, bool turned, Tensor? seed=None, int dropped=0) -> Tensor",
    _fake_columns,
)
def low_rank_columns_kernel(
    x: Tensor, g: Tensor, scale: float, dtype: torch.dtype, turned: bool, seed: Tensor | None = None, dropped: int = 0
) -> Tensor:  # fmt: skip
    """x `[*, D]`, g `[N, r]` fp32 -> scale * x^T g, `[D, r]`, or as its transpose; of what a seed leaves of x."""
    x, step = spaced(x)
    (n_rows, rank), n_cols = g.shape, x.shape[-1]
    shape = (rank, n_cols) if turned else (n_cols, rank)
    if n_rows == 0:
        return x.new_zeros(shape, dtype=dtype)
    sizes = (step, n_rows, n_cols, rank)
    parts, run = _columns(x.device, x.dtype, *sizes, scale, turned, dropped)
    sums = x.new_empty((parts, n_cols * rank), dtype=dtype if parts == 1 else torch.float32)
    run(sums, x, g.contiguous(), seed)
    return (sums if parts == 1 else sum_partials(sums, dtype)).view(shape)


@planned
def _columns(
    device: torch.device, dtype: torch.dtype, step: int, n_rows: int, n_cols: int, rank: int, scale: float,
    turned: bool, dropped: int,
) -> tuple[int, Launch]:  # fmt: skip
    block = _block(rank)
    rows, columns, warps, stages = _COLUMNS[block]
    rows = rows * 2 // dtype.itemsize
    blocks = cdiv(n_cols, columns)
    most = max(_PER_SM * _env.device_info(device).sm_count // blocks, 1)
    share = cdiv(cdiv(n_rows, most), rows) * rows
    parts = cdiv(n_rows, share)
    tile = rows * (columns * dtype.itemsize + 4 * block)
    meta = {
        "PRECISION": kernels.precision(dtype, torch.float32), "ROWS": rows, "COLUMNS": columns, "RANK": block,
        "STAGES": pipeline(stages, tile, device), "num_warps": warps,
    }  # fmt: skip
    strides = (1, n_cols) if turned else (rank, 1)
    numbers = (step, *strides, n_rows, n_cols, rank, share, scale, dropped)
    return parts, Launch(kernels.columns_kernel, (blocks, parts), device, *numbers, **meta)


def _block(rank: int) -> int:
    return max(block_of(rank), 16)  # what tensor cores take at least


# 3 op


class _Down(torch.autograd.Function):
    """x, A -> x, h if `through`, else h."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, A: Tensor, through: bool, dropped: int, seed: Tensor | None
    ) -> Any:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, A, seed)
        ctx.shape, ctx.dtype, ctx.dropped = x.shape, x.dtype, dropped
        ctx.set_materialize_grads(False)
        h = low_rank_down_kernel(x, A, _dropout.factor(dropped), seed, dropped)
        return (x.view_as(x), h) if through else h

    @staticmethod
    @first_order(_NAME)
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (x, A, seed), (*around, dh) = ctx.saved_tensors, grads
        dx, dA = around[0] if around else None, None
        if dh is not None:
            factor, drop = _dropout.factor(ctx.dropped), (seed, ctx.dropped)
            if ctx.needs_input_grad[0]:
                dx = low_rank_up_kernel(dx, dh, A.t(), factor, ctx.dtype, *drop).view(ctx.shape)
            if x is not None:
                dA = low_rank_columns_kernel(x, dh, factor, A.dtype, True, *drop)
        return dx, dA, None, None, None


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, h: Tensor, B: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(h if ctx.needs_input_grad[2] else None, B)
        ctx.scale = scale
        return low_rank_up_kernel(y, h, B, scale, y.dtype)

    @staticmethod
    @first_order(_NAME)
    def backward(ctx: Any, dy: Tensor) -> Any:
        h, B = ctx.saved_tensors
        need_y, need_h, _, _ = ctx.needs_input_grad
        dh = low_rank_down_kernel(dy, B.t(), ctx.scale) if need_h else None
        dB = None if h is None else low_rank_columns_kernel(dy, h, ctx.scale, B.dtype, False)
        return dy if need_y else None, dh, dB, None


_down_apply, _up_apply = direct(_Down.apply), direct(_Up.apply)


def _update(
    y: Tensor, x: Tensor, A: Tensor, B: Tensor, scale: float, dropout: float, seed: Tensor | None
) -> Tensor:
    return _up_apply(y, _down_apply(x, A, False, *_drops(x, dropout, seed)), B, scale)


def _drops(x: Tensor, dropout: float, seed: Tensor | None) -> tuple[int, Tensor | None]:
    dropped = _dropout.steps(dropout)
    if not dropped:
        return 0, None
    return dropped, _dropout.drawn(x) if seed is None else seed


def supports(y: Tensor, x: Tensor, A: Tensor, *_: Any) -> str | None:
    """Every layout, up to 256 ranks."""
    if 0 in (x.shape[-1], y.shape[-1]):
        return "rows have no columns"
    ranks = A.shape[0]
    return None if 1 <= ranks <= _MOST else f"{ranks} ranks, a program holds 1 to {_MOST}"


def cost(y: Tensor, x: Tensor, A: Tensor, B: Tensor, *_: Any) -> Cost:
    """y, x and the factors in, out out; then dout, x and the factors in, dx and the factors' gradients out; h kept."""
    n_rows, rank = x.shape[:-1].numel(), A.shape[0]
    factors, h = sum(w.numel() * w.element_size() for w in (A, B)), 4 * n_rows * rank
    large, dout = x.numel() * x.element_size(), y.numel() * y.element_size()
    return Cost(
        forward_bytes=large + 2 * dout + factors + h,
        backward_bytes=2 * large + dout + 2 * factors + h,
        saved=h,
        flops=2 * n_rows * (A.numel() + B.numel()),
    )


OP = Op(_NAME, reference, reference, _update, supports, cost)

# 4 public


def low_rank_update(
    y: Tensor, x: Tensor, A: Tensor, B: Tensor, scale: float = 1.0, dropout: float = 0.0, seed: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:  # fmt: skip
    """y + scale * (x A^T) B^T, a linear layer's output with LoRA's update.

    Args:
        y: `[*, O]` of any strides; not written.
        x: `[*, H]`, the same leading dimensions, any strides.
        A: `[r, H]`; B: `[O, r]`, any strides. fp16, bf16 or fp32 each of the four (fp64 on the torch path); they need
            not agree, and autocast changes none of them.
        scale: a number, LoRA's alpha / r.
        dropout: the share of x's elements, in [0, 1), that A does not see; the others count 1 / (1 - dropout) times.
        seed: an int64 tensor of one element, on x's device, which decides which; by default drawn from the generator
            of that device, so that a checkpointed call draws it again.
        impl: "triton" or "torch" for this call, None for the default choice. More than 256 ranks take the torch path.
    Returns:
        `[*, O]` in y's dtype, contiguous.
    Memory:
        Keeps x, A, B, the seed and 4 r bytes a row for backward; no mask.
    Raises:
        ValueError: shapes that do not fit each other, a share that is none.
    """
    _check(y, x, A, B, dropout)
    return OP(y, x, A, B, scale, dropout, seed, impl=impl)


def low_rank_down(
    x: Tensor, A: Tensor, dropout: float = 0.0, seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> x for the layer that LoRA updates, and h for `low_rank_up`; only where `OP.why_not` has nothing against it.

        x, h = low_rank_down(x, A)
        out = low_rank_up(layer(x), h, B, scale)

    is low_rank_update(layer(x), x, A, B, scale) whose gradients of x meet in one kernel instead of a sum of their own.
    """
    drop = _drops(x, dropout, seed)
    if not x.requires_grad:
        return x, _down_apply(x, A, False, *drop)
    return _down_apply(x, A, True, *drop)


def low_rank_up(y: Tensor, h: Tensor, B: Tensor, scale: float = 1.0) -> Tensor:
    """y + scale * h B^T, in y's dtype; see `low_rank_down`."""
    return _up_apply(y, h, B, scale)


def _check(y: Tensor, x: Tensor, A: Tensor, B: Tensor, dropout: float) -> None:
    fits = A.dim() == B.dim() == 2 and x.dim() > 0 and y.dim() > 0
    require(
        fits and y.shape[:-1] == x.shape[:-1] and A.shape[1] == x.shape[-1]
        and B.shape == (y.shape[-1], A.shape[0]),
        f"low_rank_update: y [*, O], x [*, H], A [r, H] and B [O, r] must fit each other; got {list(y.shape)}, "
        f"{list(x.shape)}, {list(A.shape)} and {list(B.shape)}.",
    )  # fmt: skip
    require(0.0 <= dropout < 1.0, f"low_rank_update: dropout must be in [0, 1); got {dropout}.")
