"""Rotary position embedding.   y = x * cos + rotate(x) * sin   over the first rd of D columns

    (y1, y2) = (x1 c1 - x2 s1,  x2 c2 + x1 s2)   for every pair; columns beyond rd are copied

    q: [B, Hq, S, D]   k: [B, Hkv, S, D]   or [B, S, H, D], [S, H, D], [H, S, D]
    cos, sin: [B or 1, S, rd or rd / 2]

Pairs   rotate-half: x1, x2 = columns i and i + rd / 2 (Llama, GPT-NeoX, ...); interleaved: columns
        2i and 2i + 1 (Cohere, GLM, GPT-J, ...). c1, c2 and s1, s2 are the same columns of cos and
        sin: both are read, they may differ. Tables of half the width hold one value a pair.

Backward is the transposed rotation, the same kernel:

    (dx1, dx2) = (dy1 c1 + dy2 s2,  dy2 c2 - dy1 s1)

Casts   fp32 inside, one rounding, to q's and to k's own dtype. (With fp32 tables and 16-bit q one
        form of Hugging Face's returns fp32, the other casts back; attention casts in any case.)
Memory  reads q and k once and writes two new tensors, in one launch; never in place. Keeps cos and
        sin alone: backward reads the two gradients and writes two.
Paper   Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864
"""

import functools
from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import Cost, Op, compute_dtype, first_order, named
from liger_kernel.ops._triton import block_of, cdiv, launch, tl, triton

Pair = tuple[Tensor, Tensor | None]

# 1 reference


def reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
    unsqueeze_dim: int = 1, rotary_dim: int | None = None, interleaved: bool = False,
) -> Pair:  # fmt: skip
    """The definition: Hugging Face's operations in their order, in fp32 or wider, rounded once."""
    cos, sin, heads, rd = _resolve(q, k, cos, sin, unsqueeze_dim, rotary_dim)
    wide = torch.promote_types(compute_dtype(q), cos.dtype)
    if q.dim() == 3:
        cos, sin = cos[0], sin[0]
    cos, sin = (_a_column(t.to(wide), rd, interleaved).unsqueeze(heads) for t in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        turn = x[..., :rd].to(wide)
        y = (turn * cos + _quarter_turn(turn, interleaved) * sin).to(x.dtype)
        return y if rd == x.shape[-1] else torch.cat([y, x[..., rd:]], dim=-1)

    return rotated(q), None if k is None else rotated(k)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """(x1, x2) -> (-x2, x1) in every pair."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def _a_column(table: Tensor, rd: int, interleaved: bool) -> Tensor:
    """One value a column, from one a column or one a pair."""
    if table.shape[-1] == rd:
        return table
    return table.repeat_interleave(2, dim=-1) if interleaved else torch.cat((table, table), dim=-1)


# 2 kernels


@triton.jit
def _load_pairs(X, m_row, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """X, m_row: [T, H, 1] -> both members of every pair, [T, H, BLOCK] each, fp32."""
    if INTERLEAVED:
        col = tl.arange(0, 2 * BLOCK)[None, None, :]
        x = tl.load(X + col, mask=m_row & (col < 2 * HALF), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK, 2)))
    else:
        col = tl.arange(0, BLOCK)[None, None, :]
        mask = m_row & (col < HALF)
        x1 = tl.load(X + col, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(X + (col + HALF), mask=mask, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _rotate_heads(
    Y, sY_head, X, sX_head, o_y, o_x, m_token, c1, c2, s1, s2,
    N_HEADS: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """GROUP heads at a time. o_y, o_x, m_token: [T, 1, 1]; c1, c2, s1, s2: [T, GROUP, BLOCK]."""
    for first in range(0, N_HEADS, GROUP):
        head = first + tl.arange(0, GROUP)[None, :, None]
        m_row = m_token & (head < N_HEADS)
        x_row = X + (o_x + row_base(head, sX_head))
        y_row = Y + (o_y + row_base(head, sY_head))
        x1, x2 = _load_pairs(x_row, m_row, HALF, BLOCK, INTERLEAVED)
        y1 = (x1 * c1 - x2 * s1).to(Y.dtype.element_ty)
        y2 = (x2 * c2 + x1 * s2).to(Y.dtype.element_ty)
        if INTERLEAVED:
            col = tl.arange(0, 2 * BLOCK)[None, None, :]
            tl.store(y_row + col, tl.interleave(y1, y2), mask=m_row & (col < 2 * HALF))
        else:
            col = tl.arange(0, BLOCK)[None, None, :]
            mask = m_row & (col < HALF)
            tl.store(y_row + col, y1, mask=mask)
            tl.store(y_row + (col + HALF), y2, mask=mask)
        if TAIL > 0:
            col = tl.arange(0, TAIL)[None, None, :]
            mask = m_row & (col < DIM - 2 * HALF)
            rest = tl.load(x_row + (col + 2 * HALF), mask=mask, other=0.0)
            tl.store(y_row + (col + 2 * HALF), rest, mask=mask)


@triton.jit(do_not_specialize=["n_tokens", "seq_len"])
def _rope_kernel(
    QY, sQY_batch, sQY_token, sQY_head, Q, sQ_batch, sQ_token, sQ_head,
    KY, sKY_batch, sKY_token, sKY_head, K, sK_batch, sK_token, sK_head,
    COS, sC_batch, sC_token, SIN, sS_batch, sS_token, n_tokens, seq_len,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, BACKWARD: tl.constexpr,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    m_token = token < n_tokens
    b = token // seq_len
    t = token % seq_len
    # Repeated for every head of the group, so that the values land in the layout of x: a thread
    # reads what it needs and keeps it for all heads, instead of passing it on by shared memory.
    cos = tl.broadcast_to(COS + (row_base(b, sC_batch) + row_base(t, sC_token)), (TOKENS, GROUP, 1))
    sin = tl.broadcast_to(SIN + (row_base(b, sS_batch) + row_base(t, sS_token)), (TOKENS, GROUP, 1))
    if FULL:
        c1, c2 = _load_pairs(cos, m_token, HALF, BLOCK, INTERLEAVED)
        s1, s2 = _load_pairs(sin, m_token, HALF, BLOCK, INTERLEAVED)
    else:
        col = tl.arange(0, BLOCK)[None, None, :]
        c1 = tl.load(cos + col, mask=m_token & (col < HALF), other=0.0).to(tl.float32)
        s1 = tl.load(sin + col, mask=m_token & (col < HALF), other=0.0).to(tl.float32)
        c2 = c1
        s2 = s1
    if BACKWARD:
        swap = s1
        s1 = -s2
        s2 = -swap
    _rotate_heads(
        QY, sQY_head, Q, sQ_head, row_base(b, sQY_batch) + row_base(t, sQY_token),
        row_base(b, sQ_batch) + row_base(t, sQ_token), m_token, c1, c2, s1, s2,
        Q_HEADS, HALF, DIM, INTERLEAVED, GROUP, BLOCK, TAIL,
    )  # fmt: skip
    if K_HEADS > 0:
        _rotate_heads(
            KY, sKY_head, K, sK_head, row_base(b, sKY_batch) + row_base(t, sKY_token),
            row_base(b, sK_batch) + row_base(t, sK_token), m_token, c1, c2, s1, s2,
            K_HEADS, HALF, DIM, INTERLEAVED, GROUP, BLOCK, TAIL,
        )  # fmt: skip


# 3 launch

# A program rotates every head of a few tokens, GROUP heads at a time. A thread holds 8 pairs: one
# 16-byte load from either half of a head in 16 bit.
_PAIRS = 1024
_PAIRS_PER_WARP = 256


@functools.cache
def _group(q_heads: int, k_heads: int, most: int) -> int:
    """Heads taken at a time: the power of two within 4..most that leaves the fewest lanes idle."""
    sizes = [1 << i for i in range(2, most.bit_length())] or [most]
    return min(sizes, key=lambda g: (g * (cdiv(q_heads, g) + cdiv(k_heads, g)), -g))


def _tokens(x: Tensor, heads: int) -> int:
    """The axis of the tokens: the one beside `heads`, the axis of the heads."""
    return 2 * x.dim() - 5 - heads


def _strides(x: Tensor, heads: int) -> tuple[int, int, int]:
    """Of batch, token and head."""
    steps = x.stride()
    return steps[0] if len(steps) == 4 else 0, steps[_tokens(x, heads)], steps[heads]


def _columns_adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _new(x: Tensor, heads: int, by_token: bool) -> Tensor:
    """Uninitialised, of x's shape, dense; in memory heads lie within tokens, or tokens in heads."""
    tokens = _tokens(x, heads)
    if by_token == (tokens < heads):
        return x.new_empty(x.shape)
    shape = list(x.shape)
    shape[heads], shape[tokens] = shape[tokens], shape[heads]
    return x.new_empty(shape).transpose(heads, tokens)


def _fake(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
    heads: int, rotary_dim: int, interleaved: bool, by_token: bool, backward: bool,
) -> Any:  # fmt: skip
    return _new(q, heads, by_token), q.new_empty(0) if k is None else _new(k, heads, by_token)


@named(
    "(Tensor q, Tensor? k, Tensor cos, Tensor sin, int heads, int rotary_dim, bool interleaved,"
    " bool by_token, bool backward) -> (Tensor, Tensor)",
    _fake,
)
def rope_kernel(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
    heads: int, rotary_dim: int, interleaved: bool, by_token: bool, backward: bool,
) -> Any:  # fmt: skip
    """-> q, k (empty for None) rotated forth or `backward`; heads: an axis; cos: [B or 1, S, W]."""
    qy, ky = _fake(q, k, cos, sin, heads, rotary_dim, interleaved, by_token, backward)
    q, cos, sin = _columns_adjacent(q), _columns_adjacent(cos), _columns_adjacent(sin)
    args: tuple[Any, ...] = (qy, *_strides(qy, heads), q, *_strides(q, heads))
    q_heads, k_heads = q.shape[heads], 0 if k is None else k.shape[heads]
    if k is not None:
        k = _columns_adjacent(k)
    args += args if k is None else (ky, *_strides(ky, heads), k, *_strides(k, heads))
    for table in (cos, sin):
        args += (table, table.stride(0) if table.shape[0] > 1 else 0, table.stride(1))
    seq_len, dim, half = q.shape[_tokens(q, heads)], q.shape[-1], rotary_dim // 2
    n_tokens = q.shape[:-3].numel() * seq_len
    tail, block = dim - rotary_dim, block_of(half)
    group = _group(q_heads, k_heads, max(1, _PAIRS // block))
    size = max(1, _PAIRS // (group * block))
    warps = cdiv(size * group * block, _PAIRS_PER_WARP)
    launch(
        _rope_kernel, (cdiv(n_tokens, size),), q.device, *args, n_tokens, seq_len,
        Q_HEADS=q_heads, K_HEADS=k_heads, HALF=half, DIM=dim, INTERLEAVED=interleaved,
        FULL=cos.shape[-1] == rotary_dim, BACKWARD=backward, TOKENS=size, GROUP=group,
        BLOCK=block, TAIL=block_of(tail) if tail else 0,
        num_warps=min(warps, _env.device_info(q.device).max_warps),
    )  # fmt: skip
    return qy, ky


# 4 op


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
        heads: int, rotary_dim: int, interleaved: bool,
    ) -> Any:  # fmt: skip
        by_token = q.stride(_tokens(q, heads)) >= q.stride(heads)
        ctx.save_for_backward(cos, sin)
        ctx.options = heads, rotary_dim, interleaved, by_token, True
        qy, ky = rope_kernel(q, k, cos, sin, heads, rotary_dim, interleaved, by_token, False)
        return qy, None if k is None else ky

    @staticmethod
    @first_order("rope")
    def backward(ctx: Any, dq: Tensor, dk: Any) -> Any:
        cos, sin = ctx.saved_tensors
        need_q, need_k = ctx.needs_input_grad[:2]
        first, second = (dq, dk if need_k else None) if need_q else (dk, None)
        first, second = rope_kernel(first, second, cos, sin, *ctx.options)
        grads = (first, second if need_k else None) if need_q else (None, first)
        return *grads, None, None, None, None, None


def supports(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *_: Any) -> str | None:
    """Every shape and layout; the kernel gives no gradient to the tables."""
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return "the kernel gives cos and sin no gradient"
    return None


def cost(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *_: Any) -> Cost:
    """q, k, cos and sin in, q' and k' out; backward the same with the gradients."""
    moved = sum(2 * x.numel() * x.element_size() for x in (q, k) if x is not None)
    moved += sum(t.numel() * t.element_size() for t in (cos, sin))
    return Cost(forward_bytes=moved, backward_bytes=moved, saved=0)


OP = Op("rope", reference, reference, _Rope.apply, supports, cost)

# 5 public


def _resolve(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
    unsqueeze_dim: int, rotary_dim: int | None,
) -> tuple[Tensor, Tensor, int, int]:  # fmt: skip
    """-> cos, sin as [B or 1, S, W], the heads' axis, the rotated width. Returns its own results."""
    n, shape = q.dim(), list(q.shape)
    if n not in (3, 4):
        raise ValueError(f"rope: q must have 3 or 4 dimensions; got shape {shape}.")
    heads = unsqueeze_dim + n if unsqueeze_dim < 0 else max(unsqueeze_dim, n - 3)
    if heads not in (n - 3, n - 2):
        raise ValueError(
            f"rope: unsqueeze_dim={unsqueeze_dim} names no axis of heads of q {shape}; use 1 for"
            " [B, H, S, D] and [S, H, D], 2 for [B, S, H, D], 0 for [H, S, D]."
        )
    if k is not None and [*k.shape[:heads], shape[heads], *k.shape[heads + 1 :]] != shape:
        raise ValueError(
            f"rope: k must have q's shape but for the number of heads, axis {heads}; got q {shape}"
            f" and k {list(k.shape)}."
        )
    batch, seq_len = q.shape[:-3].numel(), shape[_tokens(q, heads)]
    c, s = _table(cos, n, heads), _table(sin, n, heads)
    if c.dim() != 3 or c.shape != s.shape or c.shape[0] not in (1, batch) or c.shape[1] != seq_len:
        raise ValueError(
            f"rope: for q {shape} with heads on axis {heads}, cos and sin must both be"
            f" [{seq_len}, W], [{batch} or 1, {seq_len}, W] or of q's rank with one head; got"
            f" {list(cos.shape)} and {list(sin.shape)}."
        )
    return c, s, heads, _rotated_width(c.shape[2], shape[-1], rotary_dim)


def _table(table: Tensor, n: int, heads: int) -> Tensor:
    """[S, W], [B or 1, S, W] or q's rank n with one head -> [B or 1, S, W]."""
    if table.dim() == n and table.shape[heads] == 1:
        table = table.squeeze(heads)
    return table.unsqueeze(0) if table.dim() == 2 else table


def _rotated_width(width: int, dim: int, rotary_dim: int | None) -> int:
    rd = width if rotary_dim is None else rotary_dim
    if rd % 2 or not 0 < rd <= dim:
        name = "the width of cos" if rotary_dim is None else "rotary_dim"
        raise ValueError(
            f"rope: {name} must be even and at most the head dimension {dim}; got {rd}."
        )
    if width not in (rd, rd // 2):
        raise ValueError(
            f"rope: rotary_dim={rd} needs cos and sin of width {rd // 2} (one value a pair) or"
            f" {rd}; got {width}."
        )
    return rd


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *,
    unsqueeze_dim: int = 1, rotary_dim: int | None = None, interleaved: bool = False,
    impl: str | None = None,
) -> Pair:  # fmt: skip
    """Rotary position embedding of queries and keys, out of place.

    Args:
        q: `[B, H, S, D]`; `[B, S, H, D]` with `unsqueeze_dim=2`; `[S, H, D]`; `[H, S, D]` with
            `unsqueeze_dim=0`. Any strides; fp16, bf16, fp32 (fp64 on the torch path).
        k: the same but for the number of heads and the dtype; None rotates q alone.
        cos, sin: `[S, W]`, `[B or 1, S, W]` or of q's rank with one head (`[B or 1, 1, S, W]`); any
            strides and dtype. W is the rotated width, one value a column, and every value is read:
            rotate-half tables are `c0 c1 ... c0 c1 ...`, interleaved ones `c0 c0 c1 c1 ...`, in
            both cases the two values of a pair may differ. With an explicit `rotary_dim`, W may be
            `rotary_dim / 2` instead: one value a pair, `c0 c1 ...`, for both styles.
        unsqueeze_dim: the axis of q that holds the heads, as in Hugging Face's functions; negative
            counts from the end. 0 with a 4-D q means 1 (said there with tables that lack a batch).
        rotary_dim: number of leading columns to rotate, the rest is copied; None: W.
        interleaved: pairs are columns (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        (q', k') in the dtypes of q and k, dense. The kernel keeps q's order of tokens and heads in
        memory: the transposed view of a `(B, S, H, D)` tensor gives another one, and so do the
        gradients. cos and sin get gradients too if they require them, on the torch path.
    Memory:
        Keeps cos and sin for backward.
    Raises:
        ValueError: shapes that do not fit each other; a rotated width that is odd or exceeds D.
    """
    cos, sin, heads, rd = _resolve(q, k, cos, sin, unsqueeze_dim, rotary_dim)
    return OP(q, k, cos, sin, heads, rd, interleaved, impl=impl)


class LigerRopeFunction:
    """The rotate-half form of `rope` by positional arguments; `position_ids` is not read."""

    @staticmethod
    def apply(
        q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1, rotary_dim: int | None = None,
    ) -> Pair:  # fmt: skip
        return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=rotary_dim)


# (q, k) -> (q', k') without autograd
rope_forward = torch.no_grad()(LigerRopeFunction.apply)


@torch.no_grad()
def rope_backward(
    dq: Tensor, dk: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1, rotary_dim: int | None = None,
) -> Pair:  # fmt: skip
    """(dq', dk') -> (dq, dk): the transposed rotation, by -sin with its halves swapped."""
    width = sin.shape[-1]
    swapped = sin.roll(width // 2, -1) if rotary_dim in (None, width) else sin
    return rope(dq, dk, cos, -swapped, unsqueeze_dim=unsqueeze_dim, rotary_dim=rotary_dim)
