"""Neighborhood attention.   o_i = sum over j in N(i) of softmax_j(scale <q_i, k_j>) v_j

    N(i) = {i + t * dilation : |t| <= kernel_size // 2}, cut off at both ends of the sequence and,
    with a key mask, at padding. A query that sees no key gives 0.
    q, k, v, o: [B, H, S, D]   key_mask: [B, S]   lse: [B, H, S] fp32

Backward, with p the weights and delta_i = <do_i, o_i>:

    dv_j = sum_i p_ij do_i          ds_ij = p_ij (<do_i, v_j> - delta_i)
    dq_i = scale sum_j ds_ij k_j    dk_j = scale sum_i ds_ij q_i

Casts   scores, softmax and sums in fp32; the weights and ds are rounded to the inputs' dtype where
        they meet v, k, q in a product, as in any fused attention.
Memory  nothing of size S x S or S x kernel_size: forward reads q, k, v and writes o; it keeps lse, 4
        bytes a query and head, beside its inputs and output. Backward is one kernel: it reads q, k,
        v, o, do and writes dq, dk, dv; neighbouring programs share the edges of their windows
        through the cache. Strided operands (heads in the last dimension of a projection) are read in
        place and o has q's layout, so that no head is ever transposed in memory.
Source  Hassani et al., "Neighborhood Attention Transformer", arXiv:2204.07143 (there windows are
        shifted at the ends, here they are cut off); Hassani and Shi, "Dilated Neighborhood Attention
        Transformer", arXiv:2209.15001; Dao, "FlashAttention-2", arXiv:2307.08691
"""

import math
from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops import _fused_neighborhood_attention_kernels as kernels
from liger_kernel.ops._dot import precision
from liger_kernel.ops._op import Cost, Op, first_order, named, require
from liger_kernel.ops._triton import block_of, cdiv, launch

_LOG2E = 1.4426950408889634
_MAX_DIM = 256  # a tile of queries and its fp32 sums stay in registers
_CHUNK = 128

# 1 reference


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The definition: all S x S scores and a mask."""
    return _masked(query, key, value, key_mask, kernel_size, dilation, scale, 0)


def _masked(q, k, v, key_mask, kernel_size, dilation, scale, ahead):
    """Attention of queries whose first is `ahead` positions after the first of the keys."""
    i = torch.arange(q.shape[2], device=q.device)[:, None] + ahead
    distance = (i - torch.arange(k.shape[2], device=q.device)).abs()
    seen = (distance <= kernel_size // 2 * dilation) & (distance % dilation == 0)
    if key_mask is not None:
        seen = seen & (key_mask != 0)[:, None, None, :]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2)) * scale
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(~seen, 0.0) @ v


def fallback(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The definition on chunks of queries, each with the keys that its windows reach."""
    seq, reach = query.shape[2], kernel_size // 2 * dilation
    step = max(2 * reach, _CHUNK)
    parts = []
    for first in range(0, max(seq, 1), step):
        begin, end = max(first - reach, 0), min(first + step + reach, seq)
        k, v = key[:, :, begin:end], value[:, :, begin:end]
        mask = None if key_mask is None else key_mask[:, begin:end]
        q = query[:, :, first : first + step]
        parts.append(_masked(q, k, v, mask, kernel_size, dilation, scale, first - begin))
    return torch.cat(parts, dim=2)


# 2 launch

# columns of a head -> positions a program owns, positions it visits at a time, warps: for windows
# that add little to the positions owned, where memory is the limit, for wider ones, and for fp32,
# which has no tensor cores and fills twice the space.
_WIDE_WINDOW = 65
_FORWARD = (
    {64: (64, 32, 4), 128: (64, 32, 4), 256: (64, 32, 8)},
    {64: (128, 64, 8), 128: (128, 64, 8), 256: (64, 32, 8)},
)
_BACKWARD = (
    {64: (64, 32, 4), 128: (64, 32, 8), 256: (32, 16, 8)},
    {64: (64, 64, 8), 128: (64, 32, 8), 256: (32, 16, 8)},
)
_FP32 = {64: (32, 32, 4), 128: (32, 32, 8), 256: (16, 16, 8)}
_DEEP = 160 << 10  # bytes of shared memory from which on three stages of every tile above fit


def _fake_forward(query, key, value, kernel_size, dilation, scale, key_mask):
    return _like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@named(
    "(Tensor query, Tensor key, Tensor value, int kernel_size, int dilation, float scale, Tensor? key_mask)"
    " -> (Tensor, Tensor)",
    _fake_forward,
)
def neighborhood_forward(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int, dilation: int, scale: float,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> o in query's layout, lse [B, H, S] fp32 in units of log2."""
    q, k, v = _rows(query), _rows(key), _rows(value)
    o = _like(query)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    grid, window, meta = _schedule(_FORWARD, q, kernel_size, dilation, key_mask)
    mask = q if key_mask is None else key_mask
    args = (*_strided(o), lse, *_strided(q, k, v), mask, *window, scale * _LOG2E)
    launch(kernels.forward_kernel, grid, q.device, *args, **meta)
    return o, lse


def _fake_backward(
    grad, query, key, value, o, lse, kernel_size, dilation, scale, key_mask, need_dq, need_dkv
):
    dq = _like(query) if need_dq else query.new_empty(0)
    dk = _like(key) if need_dkv else query.new_empty(0)
    return dq, dk, _like(value) if need_dkv else query.new_empty(0)


@named(
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor o, Tensor lse, int kernel_size, int dilation,"
    " float scale, Tensor? key_mask, bool need_dq, bool need_dkv) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def neighborhood_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, o: Tensor, lse: Tensor, kernel_size: int,
    dilation: int, scale: float, key_mask: Tensor | None, need_dq: bool, need_dkv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dq, dk, dv in the layouts of their operands; one that is not needed is empty."""
    do, q, k, v = _rows(grad), _rows(query), _rows(key), _rows(value)
    # A gradient that is not needed has no memory: its operand stands in and the flag keeps the kernel from writing it.
    dq = _like(query) if need_dq else q.new_empty(0)
    dk = _like(key) if need_dkv else q.new_empty(0)
    dv = _like(value) if need_dkv else q.new_empty(0)
    outputs = (dq if need_dq else q, *((dk, dv) if need_dkv else (k, v)))
    grid, window, meta = _schedule(_BACKWARD, q, kernel_size, dilation, key_mask)
    mask = q if key_mask is None else key_mask
    args = (
        *_strided(*outputs, do, o),
        lse,
        *_strided(q, k, v),
        mask,
        *window,
        scale,
        scale * _LOG2E,
    )
    needs = {"NEED_DQ": need_dq, "NEED_DKV": need_dkv}
    launch(kernels.backward_kernel, grid, q.device, *args, **needs, **meta)
    return dq, dk, dv


def _rows(x: Tensor) -> Tensor:
    """x with adjacent columns: itself wherever that is so."""
    return x if x.stride(3) == 1 else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """New memory in x's layout as far as columns stay adjacent."""
    new = torch.empty_like(x)
    return new if new.stride(3) == 1 else x.new_empty(x.shape)


def _strided(*tensors: Tensor) -> list[Any]:
    return [arg for x in tensors for arg in (x, *x.stride()[:3])]


def _schedule(
    table: Any, q: Tensor, kernel_size: int, dilation: int, key_mask: Tensor | None
) -> Any:
    """Grid, the scalars that describe the windows, and the kernel's constants."""
    batch, heads, seq, dim = q.shape
    apart = min(dilation, max(seq, 1))  # beyond the sequence's length every window is one position
    reach, width = kernel_size // 2, max(block_of(dim), 16)
    tiles = _FP32 if q.dtype == torch.float32 else table[kernel_size >= _WIDE_WINDOW]
    block, step, warps = tiles[max(width, 64)]
    grid = (cdiv(cdiv(seq, apart), block) * apart * batch * heads,)
    info = _env.device_info(q.device)
    meta = {
        "HAS_MASK": key_mask is not None,
        "PRECISION": precision(q.dtype),
        "BLOCK": block,
        "STEP": step,
        "DIM": width,
        "num_warps": min(warps, info.max_warps // 4),  # AMD's are 64 wide: four of them are eight
        "num_stages": 3 if info.shared_memory >= _DEEP else 2,
    }
    return grid, (heads, seq, dim, apart, reach), meta


# 3 op


class _NeighborhoodAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel_size: int, dilation: int, scale: float,
        key_mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        o, lse = neighborhood_forward(query, key, value, kernel_size, dilation, scale, key_mask)
        ctx.save_for_backward(query, key, value, o, lse, key_mask)
        ctx.window = kernel_size, dilation, scale
        return o

    @staticmethod
    @first_order("fused_neighborhood_attention")
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, o, lse, key_mask = ctx.saved_tensors
        need_dq, need_dk, need_dv = ctx.needs_input_grad[:3]
        dq, dk, dv = neighborhood_backward(
            grad, query, key, value, o, lse, *ctx.window, key_mask, need_dq, need_dk or need_dv
        )
        found = (dq if need_dq else None, dk if need_dk else None, dv if need_dv else None)
        return *found, None, None, None, None


def supports(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> str | None:
    """Heads of at most 256 columns, one dtype."""
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value are {query.dtype}, {key.dtype}, {value.dtype}"
    if not 0 < query.shape[-1] <= _MAX_DIM:
        return f"a head has {query.shape[-1]} columns; kernels take 1 to {_MAX_DIM}"
    return None


def cost(query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, *_: Any) -> Cost:
    """q, k, v in, o out; then q, k, v, o, do in, dq, dk, dv out. Scores and weighted sums are products."""
    n = query.numel() * query.element_size()
    rows = math.prod(query.shape[:3])
    flops = 4 * kernel_size * query.numel()
    return Cost(4 * n + 4 * rows, 8 * n + 4 * rows, saved=n + 4 * rows, flops=flops)


OP = Op(
    "fused_neighborhood_attention",
    reference,
    fallback,
    _NeighborhoodAttention.apply,
    supports,
    cost,
)

# 4 public


def fused_neighborhood_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of each position over a window of neighbours, exact and without S x S scores.

    Args:
        query, key, value: `[B, H, S, D]`, one shape, any strides; fp16, bf16, fp32 (fp64 on the torch
            path). Kernels take heads of up to 256 columns.
        kernel_size: positions in a window, odd; the query's own is in the middle.
        dilation: distance of neighbouring positions of a window.
        scale: factor of the scores; None for `D ** -0.5`.
        key_mask: `[B, S]`, bool or integer, nonzero where a key may be seen (0 for padding).
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[B, H, S, D]` in query's dtype and memory layout; 0 for a query that sees no key.
    Memory:
        Keeps query, key, value, the result and 4 bytes a query and head for backward.
    Raises:
        ValueError: shapes that differ or are not 4-D, an even or non-positive kernel_size, a
            dilation below 1, a mask of another shape or of floating-point numbers.
    """
    name = "fused_neighborhood_attention"
    require(
        query.dim() == 4 and query.shape == key.shape == value.shape,
        f"{name}: query, key and value must have one shape [B, H, S, D]; "
        f"got {list(query.shape)}, {list(key.shape)}, {list(value.shape)}.",
    )
    check_window(name, kernel_size, dilation)
    if key_mask is not None:
        expected = (query.shape[0], query.shape[2])
        require(
            key_mask.shape == expected and not key_mask.is_floating_point(),
            f"{name}: key_mask must be bool or integer of shape {list(expected)}, nonzero where a key may be "
            f"seen; got {key_mask.dtype} {list(key_mask.shape)}.",
        )
        key_mask = key_mask.to(torch.int32).contiguous()
    scale = query.shape[-1] ** -0.5 if scale is None and query.shape[-1] else scale
    return OP(query, key, value, kernel_size, dilation, scale, key_mask, impl=impl)


def check_window(name: str, kernel_size: int, dilation: int) -> None:
    """ValueError unless the window is one."""
    require(
        kernel_size > 0 and kernel_size % 2 == 1,
        f"{name}: kernel_size must be a positive odd number, so that a window has a middle; got {kernel_size}.",
    )
    require(dilation >= 1, f"{name}: dilation must be at least 1; got {dilation}.")


class LigerFusedNeighborhoodAttentionFunction:
    """`fused_neighborhood_attention` with positional arguments."""

    @staticmethod
    def apply(
        query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        return fused_neighborhood_attention(query, key, value, kernel_size, dilation, scale)


def fused_neighborhood_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """-> output, natural log-sum-exp of each query's scores [B, H, S] fp32 or None, by the kernel and
    outside autograd."""
    check_window("fused_neighborhood_attention_forward", kernel_size, dilation)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    o, lse = neighborhood_forward(query, key, value, kernel_size, dilation, scale, None)
    return o, lse / _LOG2E if return_lse else None
