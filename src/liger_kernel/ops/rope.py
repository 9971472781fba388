"""Rotary position embedding.   y = x * cos + rotate(x) * sin   over the first rd of D columns

    (y1, y2) = (x1 c1 - x2 s1,  x2 c2 + x1 s2)   for every pair; columns beyond rd are copied

    q: [B, Hq, S, D]   k: [B, Hkv, S, D]   or [B, S, H, D], [S, H, D], [H, S, D]
    cos, sin: [B or 1, S, rd or rd / 2]

Pairs   rotate-half: x1, x2 = columns i and i + rd / 2 (Llama, GPT-NeoX, ...); interleaved: columns
        2i and 2i + 1 (Cohere, GLM, GPT-J, ...), and y1, y2 either there or in halves (DeepSeek's
        latent attention). c1, c2 and s1, s2 are the same columns of cos and sin: both are read,
        they may differ. Tables of half the width hold one value a pair.

Backward is the transposed rotation, the same kernel:

    (dx1, dx2) = (dy1 c1 + dy2 s2,  dy2 c2 - dy1 s1)

Casts   fp32 inside, one rounding, to q's and to k's own dtype. (With fp32 tables and 16-bit q one
        form of Hugging Face's returns fp32, the other casts back; attention casts in any case.)
Memory  reads q and k once and writes two new tensors, in one launch; never in place. Keeps cos and
        sin alone: backward reads the two gradients and writes two.
Paper   Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._op import Cost, Op, compute_dtype, direct, first_order, require
from liger_kernel.ops._rope_kernels import heads_within_tokens, rope_kernel, tokens_axis

Pair = tuple[Tensor, Tensor | None]

# 1 reference


def reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, rotary_dim: int | None = None,
    interleaved: bool = False, to_halves: bool = False, trailing: bool = False,
) -> Pair:  # fmt: skip
    """The definition: Hugging Face's operations in their order, in fp32 or wider, rounded once."""
    cos, sin, heads, rd = resolve("rope", q, k, cos, sin, unsqueeze_dim, rotary_dim)
    wide = torch.promote_types(compute_dtype(q), cos.dtype)
    if q.dim() == 3:
        cos, sin = cos[0], sin[0]
    cos, sin = (_a_column(t.to(wide), rd, interleaved).unsqueeze(heads) for t in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        rest = x.shape[-1] - rd
        turn, copied = x.split((rd, rest), -1) if not trailing else x.split((rest, rd), -1)[::-1]
        turn = turn.to(wide)
        y = (turn * cos + _quarter_turn(turn, interleaved) * sin).to(x.dtype)
        if to_halves:
            y = torch.cat((y[..., 0::2], y[..., 1::2]), dim=-1)
        return torch.cat((copied, y) if trailing else (y, copied), dim=-1) if rest else y

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


# 2 op


def rotation(name: str) -> Callable[..., Pair]:
    """`rope_kernel` as a differentiable function, without its last two arguments, for the op called `name`."""

    class Rotation(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor | None, heads: int, *how: Any
        ) -> Any:  # fmt: skip
            by_token = heads_within_tokens(q, heads)
            ctx.save_for_backward(cos, sin)
            ctx.how = heads, *how, by_token, True
            qy, ky = rope_kernel(q, k, cos, sin, heads, *how, by_token, False)
            return qy, None if k is None else ky

        @staticmethod
        @first_order(name)
        def backward(ctx: Any, dq: Tensor, dk: Any) -> Any:
            cos, sin = ctx.saved_tensors
            need_q, need_k = ctx.needs_input_grad[:2]
            first, second = (dq, dk if need_k else None) if need_q else (dk, None)
            first, second = rope_kernel(first, second, cos, sin, *ctx.how)
            grads = (first, second if need_k else None) if need_q else (None, first)
            return *grads, *(None,) * (len(ctx.needs_input_grad) - 2)

    return direct(Rotation.apply)


def supports(q: Tensor, k: Tensor | None, *rest: Any) -> str | None:
    """Every shape and layout; the kernel gives no gradient to the tables."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in rest):
        return "the kernel gives its tables no gradient"
    return None


def cost(q: Tensor, k: Tensor | None, *rest: Any) -> Cost:
    """q, k and the tables in, q' and k' out; backward the same with the gradients."""
    moved = sum(2 * x.numel() * x.element_size() for x in (q, k) if x is not None)
    moved += sum(t.numel() * t.element_size() for t in rest if isinstance(t, Tensor))
    return Cost(forward_bytes=moved, backward_bytes=moved, saved=0)


_rotate = rotation("rope")
OP = Op("rope", reference, reference, lambda *args: _rotate(*args, ()), supports, cost)

# 3 public


def resolve(
    op: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int, rotary_dim: int | None
) -> tuple[Tensor, Tensor, int, int]:  # fmt: skip
    """-> cos, sin as [B or 1, S, W], the heads' axis, the rotated width. Returns its own results."""
    heads = heads_axis(op, q, k, unsqueeze_dim)
    n, shape = q.dim(), list(q.shape)
    batch, seq_len = q.shape[:-3].numel(), shape[tokens_axis(q, heads)]
    c, s = _table(cos, n, heads), _table(sin, n, heads)
    if c.dim() != 3 or c.shape != s.shape or c.shape[0] not in (1, batch) or c.shape[1] != seq_len:
        raise ValueError(
            f"{op}: for q {shape} with heads on axis {heads}, cos and sin must both be"
            f" [{seq_len}, W], [{batch} or 1, {seq_len}, W] or of q's rank with one head; got"
            f" {list(cos.shape)} and {list(sin.shape)}."
        )
    return c, s, heads, rotated_width(op, c.shape[2], shape[-1], rotary_dim)


def heads_axis(op: str, q: Tensor, k: Tensor | None, unsqueeze_dim: int) -> int:
    """The axis of the heads that `unsqueeze_dim` means; ValueError if q has none there or k does not fit q."""
    n, shape = q.dim(), list(q.shape)
    if n not in (3, 4):
        raise ValueError(f"{op}: q must have 3 or 4 dimensions; got shape {shape}.")
    heads = unsqueeze_dim + n if unsqueeze_dim < 0 else max(unsqueeze_dim, n - 3)
    if heads not in (n - 3, n - 2):
        raise ValueError(
            f"{op}: unsqueeze_dim={unsqueeze_dim} names no axis of heads of q {shape}; use 1 for"
            " [B, H, S, D] and [S, H, D], 2 for [B, S, H, D], 0 for [H, S, D]."
        )
    if k is not None and [*k.shape[:heads], shape[heads], *k.shape[heads + 1 :]] != shape:
        raise ValueError(
            f"{op}: k must have q's shape but for the number of heads, axis {heads}; got q {shape}"
            f" and k {list(k.shape)}."
        )
    return heads


def _table(table: Tensor, n: int, heads: int) -> Tensor:
    """[S, W], [B or 1, S, W] or q's rank n with one head -> [B or 1, S, W]."""
    if table.dim() == n and table.shape[heads] == 1:
        table = table.squeeze(heads)
    return table.unsqueeze(0) if table.dim() == 2 else table


def rotated_width(op: str, width: int, dim: int, rotary_dim: int | None = None) -> int:
    """`rotary_dim`, by default the tables' width; ValueError if it fits neither them nor D."""
    rd = width if rotary_dim is None else rotary_dim
    if rd % 2 or not 0 < rd <= dim:
        name = "the width of cos" if rotary_dim is None else "rotary_dim"
        raise ValueError(
            f"{op}: {name} must be even and at most the head dimension {dim}; got {rd}."
        )
    if width not in (rd, rd // 2):
        raise ValueError(
            f"{op}: rotary_dim={rd} needs cos and sin of width {rd // 2} (one value a pair) or"
            f" {rd}; got {width}."
        )
    return rd


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *,
    unsqueeze_dim: int = 1, rotary_dim: int | None = None, interleaved: bool = False,
    to_halves: bool = False, trailing: bool = False, impl: str | None = None,
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
        rotary_dim: number of columns to rotate, the rest is copied; None: W.
        interleaved: pairs are columns (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        to_halves: write an interleaved pair to columns (i, i + rotary_dim / 2), as DeepSeek's latent
            attention does; scores do not depend on the order of columns.
        trailing: rotate the last `rotary_dim` columns instead of the first.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        (q', k') in the dtypes of q and k, dense. The kernel keeps q's order of tokens and heads in
        memory: the transposed view of a `(B, S, H, D)` tensor gives another one, and so do the
        gradients. cos and sin get gradients too if they require them, on the torch path.
    Memory:
        Keeps cos and sin for backward.
    Raises:
        ValueError: shapes that do not fit each other; a rotated width that is odd or exceeds D;
            `to_halves` without `interleaved`.
    """
    require(
        interleaved or not to_halves, "rope: to_halves is an order of interleaved pairs: say both."
    )
    cos, sin, heads, rd = resolve("rope", q, k, cos, sin, unsqueeze_dim, rotary_dim)
    return OP(q, k, cos, sin, heads, rd, interleaved, to_halves, trailing, impl=impl)


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
