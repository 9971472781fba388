"""GroupNorm.   y = (x - mean) / sqrt(var + eps) * w + b,   mean and var over the channels of a group and all of space

    x, y: [B, C, *]   w, b: [C] or None   stats: [3, B * G] fp32, G groups of C / G channels, n values in each

Backward, with xhat = (x - mean) * rstd and, for every sample and channel, sums over space

    p = sum(dy * xhat),  q = sum(dy)      dw = sum over samples of p      db = sum over samples of q
    dx = rstd * (w * dy - sum(w * q) / n - xhat * sum(w * p) / n)         inner sums over the channels of the group

Casts   fp32 throughout, one rounding at the end. The variance is summed about the mean, or, in groups too large for
        registers, about the mean of their first values; and the mean is kept as the sum of two fp32 numbers, the second
        far below the first. So mean >> std costs no digits.
Memory  keeps x, w and 12 bytes a group. A group that fits in registers is read once in forward and once, with dy, in
        backward. A larger one is read twice, by one program, the second time backwards and mostly from L2; where groups
        are too few to fill the machine they are spread over programs, and the second read is another kernel's.
        dw and db come from fp32 sums [B, C] (times the parts of space), added up in a fixed order.
Paper   Wu and He, "Group Normalization", arXiv:1803.08494
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops import _group_norm_kernels as kernels
from liger_kernel.ops._op import Cost, Op, compute_dtype, dense, first_order, named, require
from liger_kernel.ops._reduce import sum_two_partials
from liger_kernel.ops._schedules import WARPS, Table
from liger_kernel.ops._triton import UNFUSED, block_of, cdiv, launch

# 1 reference


def reference(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6
) -> Tensor:
    """The definition."""
    n = x.shape[1:].numel() // num_groups
    wide = x.to(compute_dtype(x)).reshape(x.shape[0], num_groups, n)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y.reshape(x.shape)
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    if weight is not None:
        y = y * weight.to(y.dtype).view(shape)
    if bias is not None:
        y = y + bias.to(y.dtype).view(shape)
    return y.to(x.dtype)


# 2 launch

_MOST_HELD = 32768  # values of a group, padded, that a program of forward may hold in registers
_PARTS = 64  # programs a large group is spread over at most
_CHUNK = 16  # channels whose sums are read at a time


def _fits_held(most: int) -> Callable[..., bool]:
    """8 to 64 values a thread; groups of up to `most` values may be held whole."""

    def fits(key: int, tile: int, warps: int) -> bool:
        possible = tile < key if tile else key <= most
        return possible and 8 <= (tile or max(key, 256)) // (32 * warps) <= 64

    return fits


# values of a group, padded -> values that a program visits at a time (0: it holds the group in registers), warps
_FIELDS = {"tile": (0, 4096, 8192), "warps": WARPS}
_HELD = {256: (0, 1), 512: (0, 1), 1024: (0, 2), 2048: (0, 2), 4096: (0, 4), 8192: (0, 4)}
_FORWARD = Table(
    "group_norm.forward",
    _FIELDS,
    {**_HELD, 16384: (0, 8), 32768: (8192, 4), 65536: (8192, 32)},
    _fits_held(_MOST_HELD),
)
_BACKWARD = Table(
    "group_norm.backward",
    _FIELDS,
    {**_HELD, 2048: (0, 4), 4096: (0, 8), 16384: (4096, 4), 32768: (8192, 8)},
    _fits_held(16384),
)


def _layout(x: Tensor, num_groups: int) -> tuple[int, int, int, int, int, int]:
    """-> groups in all, groups, channels of each, values of a channel, values of a group, the latter padded."""
    batch, channels = x.shape[:2]
    per_group, size = channels // num_groups, x.shape[2:].numel()
    padded = block_of(per_group) * block_of(size)
    return batch * num_groups, num_groups, per_group, size, per_group * size, padded


def _schedule(table: Table, padded: int, x: Tensor) -> tuple[int, int]:
    """-> tile, warps."""
    tile, warps = table.entry(padded, x)
    return tile, min(warps, _env.device_info(x.device).max_warps)


def _spread(groups: int, work: int, device: torch.device) -> int:
    """Programs a large group is spread over: 1 where groups alone fill the machine, else about four an SM in all."""
    sms = _env.device_info(device).sm_count
    return 1 if groups >= 2 * sms else max(min(cdiv(4 * sms, groups), work, _PARTS), 1)


def _tiles(per_group: int, size: int, tile: int) -> tuple[dict[str, int], int]:
    """ROWS and BLOCK of the tiles of a large group, and how many there are."""
    block = min(block_of(size), tile)
    meta = {"ROWS": tile // block, "BLOCK": block}
    return meta, cdiv(per_group, meta["ROWS"]) * cdiv(size, block)


def _fake_forward(x, num_groups, weight, bias, eps):
    return x.new_empty(x.shape), x.new_empty((3, x.shape[0] * num_groups), dtype=torch.float32)


@named(
    "(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    _fake_forward,
)
def group_norm_forward_kernel(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    """-> y like x (contiguous), stats [3, B * G] fp32: mean = stats[0] + stats[1], rstd = stats[2]."""
    x = dense(x)
    n_groups, groups, per_group, size, n, padded = _layout(x, num_groups)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stats = torch.empty((3, n_groups), dtype=torch.float32, device=x.device)
    w, b = (None if p is None else dense(p) for p in (weight, bias))
    tile, warps = _schedule(_FORWARD, padded, x)
    if not tile:
        meta = {"CH": block_of(per_group), "SP": block_of(size), "num_warps": warps}
        args = (y, x, w, b, stats, groups, per_group, size, n, eps)
        launch(kernels.forward_kernel, (n_groups,), x.device, *args, **meta)
        return y, stats
    meta, tiles = _tiles(per_group, size, tile)
    parts = _spread(n_groups, cdiv(n, tile), x.device)
    share = cdiv(cdiv(n, parts), 16) * 16  # keeps parts of an aligned group aligned
    parts = cdiv(n, share)
    moments = None
    if parts > 1:
        moments = torch.empty((n_groups, parts, 3), dtype=torch.float32, device=x.device)
        launch(
            kernels.moments_kernel, (n_groups, parts), x.device, moments, x, n, share,
            SPAN=tile, num_warps=warps,
        )  # fmt: skip
    each = cdiv(tiles, parts)
    launch(
        kernels.forward_wide_kernel, (n_groups, cdiv(tiles, each)), x.device, y, x, w, b, stats, moments, groups,
        per_group, size, n, eps, share, parts, tiles, each, PARTS=_PARTS, SPAN=tile, **meta, num_warps=warps,
    )  # fmt: skip
    return y, stats


def _fake_backward(dy, x, num_groups, weight, stats, need_dx, need_params):
    params = [x.new_empty(x.shape[1] if need_params else 0) for _ in range(2)]
    if weight is not None:
        params = [p.to(weight.dtype) for p in params]
    return x.new_empty(x.shape if need_dx else 0), *params


@named(
    "(Tensor dy, Tensor x, int num_groups, Tensor? weight, Tensor stats, bool need_dx, bool need_params)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def group_norm_backward_kernel(
    dy: Tensor, x: Tensor, num_groups: int, weight: Tensor | None, stats: Tensor,
    need_dx: bool, need_params: bool,
) -> Any:  # fmt: skip
    """-> dx like x, dw and db in the weight's dtype, or x's without one; what is not needed is empty."""
    dy, x = dense(dy), dense(x)
    n_groups, groups, per_group, size, n, padded = _layout(x, num_groups)
    batch, channels = x.shape[:2]
    dtype = x.dtype if weight is None else weight.dtype
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    w = None if weight is None else dense(weight)
    flags = {"NEED_DX": need_dx, "NEED_P": need_params}
    shape = (batch, groups, per_group, size)
    schedule = _schedule(_BACKWARD, padded, x)
    if not schedule[0]:
        parts = 1
        sums = _sums(x, parts if need_params else 0)
        args = (dx, sums, dy, x, w, stats, *shape, n)
        meta = {"CH": block_of(per_group), "SP": block_of(size), "num_warps": schedule[1]}
        launch(kernels.backward_kernel, (n_groups,), x.device, *args, **flags, **meta, **UNFUSED)
    else:
        parts, sums = _backward_wide(dx, dy, x, w, stats, shape, flags, schedule)
    if not need_params:
        return dx, x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=dtype)
    return dx, *sum_two_partials(sums.view(2, parts * batch, channels), dtype, dtype)


def _sums(x: Tensor, parts: int) -> Tensor:
    return x.new_empty((2, parts * x.shape[0], x.shape[1]), dtype=torch.float32)


def _backward_wide(
    dx: Tensor, dy: Tensor, x: Tensor, w: Tensor | None, stats: Tensor,
    shape: tuple[int, int, int, int], flags: dict[str, bool], schedule: tuple[int, int],
) -> tuple[int, Tensor]:  # fmt: skip
    """Fill dx; -> parts of space, and the channels' sums in each."""
    batch, groups, per_group, size = shape
    n_groups, n = batch * groups, per_group * size
    tile, warps = schedule
    meta, tiles = _tiles(per_group, size, tile)
    programs = _spread(n_groups, tiles, x.device)
    parts = 1
    if programs == 1:
        sums = _sums(x, 1 if flags["NEED_P"] else 0)
    else:
        blocks = cdiv(per_group, meta["ROWS"])
        span = cdiv(size, _spread(n_groups * blocks, cdiv(size, meta["BLOCK"]), x.device))
        span = cdiv(span, meta["BLOCK"]) * meta["BLOCK"]
        parts = cdiv(size, span)
        sums = _sums(x, parts)
        args = (sums, dy, x, stats, *shape, span)
        grid = (n_groups * blocks, parts)
        launch(kernels.channel_sums_kernel, grid, x.device, *args, **meta, num_warps=warps)
        if not flags["NEED_DX"]:
            return parts, sums
    each = cdiv(tiles, programs)
    launch(
        kernels.dx_wide_kernel, (n_groups, cdiv(tiles, each)), x.device, dx, sums, dy, x, w, stats, *shape, n,
        parts, tiles, each, SPLIT=programs > 1, **flags, PARTS=_PARTS, CHUNK=_CHUNK, **meta, num_warps=warps,
        **UNFUSED,
    )  # fmt: skip
    return parts, sums


# 3 op


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        y, stats = group_norm_forward_kernel(x, num_groups, weight, bias, eps)
        ctx.save_for_backward(x, weight, stats)
        ctx.num_groups, ctx.bias_dtype = num_groups, None if bias is None else bias.dtype
        return y

    @staticmethod
    @first_order("group_norm")
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, stats = ctx.saved_tensors
        need_dx, _, need_dw, need_db, _ = ctx.needs_input_grad
        dx, dw, db = group_norm_backward_kernel(
            dy, x, ctx.num_groups, weight, stats, need_dx, need_dw or need_db
        )
        db = db.to(ctx.bias_dtype) if need_db else None
        return dx if need_dx else None, None, dw if need_dw else None, db, None


def supports(x: Tensor, *_: Any) -> str | None:
    """Every shape and layout; an empty group has no mean."""
    if not x.is_floating_point():
        return f"{x.dtype} is not a floating-point dtype"
    return "groups are empty" if x.shape[1:].numel() == 0 else None


def cost(x: Tensor, num_groups: int, *_: Any) -> Cost:
    """x in, y out; then dy and x in, dx out."""
    n = x.numel() * x.element_size()
    return Cost(forward_bytes=2 * n, backward_bytes=3 * n, saved=12 * x.shape[0] * num_groups)


OP = Op("group_norm", reference, reference, _GroupNorm.apply, supports, cost)

# 4 public


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    impl: str | None = None,
) -> Tensor:
    """Normalisation over groups of channels.

    Args:
        x: `[B, C, *]` with any number of further dimensions; fp16, bf16, fp32 (fp64 on the torch path). Copied
            unless it is contiguous.
        num_groups: divides C.
        weight, bias: `[C]`, or None for no scale, no shift; their dtypes may differ from x's.
        eps: added to the variance.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        x's shape and dtype, contiguous.
    Memory:
        Keeps x, weight and 12 bytes a group for backward.
    Raises:
        ValueError: x has no channels dimension, C is not a multiple of num_groups, or a parameter is not `[C]`.
    """
    require(
        x.dim() >= 2,
        f"group_norm: x must be [B, C, *]; got {x.dim()} dimension(s), {list(x.shape)}.",
    )
    channels = x.shape[1]
    require(
        num_groups > 0 and channels % num_groups == 0,
        f"group_norm: num_groups must divide the {channels} channels of x {list(x.shape)}; got {num_groups}.",
    )
    for name, p in (("weight", weight), ("bias", bias)):
        require(
            p is None or p.shape == (channels,),
            f"group_norm: {name} must have shape [{channels}], one value a channel of x {list(x.shape)}; "
            f"got {None if p is None else list(p.shape)}.",
        )
    return OP(x, num_groups, weight, bias, eps, impl=impl)


# The names other libraries call


def _checked_channels(x: Tensor, num_channels: int) -> None:
    require(
        x.dim() >= 2 and x.shape[1] == num_channels,
        f"group_norm: x must have num_channels = {num_channels} in dimension 1; got {list(x.shape)}.",
    )


class LigerGroupNormFunction:
    """`apply(X, weight, bias, num_channels, num_groups, eps)` is `group_norm`."""

    @staticmethod
    def apply(
        X: Tensor, affine_scaling_weight: Tensor, affine_shifting_bias: Tensor, num_channels: int, num_groups: int,
        eps: float,
    ) -> Tensor:  # fmt: skip
        _checked_channels(X, num_channels)
        return group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


def group_norm_forward(
    X: Tensor, num_channels: int, num_groups: int, W: Tensor, B: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """-> Y, X, Mean, RSTD [B, G], block, by the kernel and outside autograd."""
    _checked_channels(X, num_channels)
    y, stats = group_norm_forward_kernel(X, num_groups, W, B, eps)
    shift, step, rstd = stats.view(3, X.shape[0], num_groups)
    return y, X, shift + step, rstd, min(_layout(X, num_groups)[-1], _MOST_HELD)


def group_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor, B: Tensor, Mean: Tensor, RSTD: Tensor, num_channels: int, num_groups: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dX, dW, dB in new tensors, by the kernel and outside autograd."""
    _checked_channels(X, num_channels)
    stats = torch.stack([Mean.flatten(), torch.zeros_like(Mean).flatten(), RSTD.flatten()])
    return group_norm_backward_kernel(dY, X, num_groups, W, stats, True, True)
