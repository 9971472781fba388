"""Multimodal rotary position embedding: a token has a temporal, a height and a width position.

    y = x * c + rotate(x) * s   over rotate-half pairs (i, i + rd / 2), see `rope.py`

    q: [B, Hq, S, D]   k: [B, Hkv, S, D]   or [B, S, H, D]
    cos, sin: [3, B or 1, S, rd], one table for each position; mrope_section = (t, h, w), t + h + w = rd / 2

Pair i reads the temporal table if i < t, the height table if t <= i < t + h, else the width table, both of its columns
from the same one. (Models with interleaved sections, Qwen3-VL for one, mix the tables beforehand and call `rope`.)

Casts   fp32 inside, one rounding, to q's and to k's own dtype.
Memory  reads q, k and the chosen third of the tables once and writes two new tensors, in one launch: no mixed table is
        built. Keeps cos and sin; backward is the transposed rotation, the same kernel.
Paper   Wang et al., "Qwen2-VL", arXiv:2409.12191, section 2.1
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_kernel.ops import rope as _rope
from liger_kernel.ops._op import Cost, Op, require
from liger_kernel.ops._rope_kernels import tokens_axis
from liger_kernel.ops.rope import Pair, heads_axis, rotated_width, rotation, supports

_NAME = "qwen2vl_mrope"

# 1 reference


def reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> Pair:  # fmt: skip
    """The definition, as Hugging Face writes it: cut the tables into six pieces, take each from its own table."""

    def mixed(table: Tensor) -> Tensor:
        pieces = table.split([*mrope_section, *mrope_section], dim=-1)
        return torch.cat([piece[i % 3] for i, piece in enumerate(pieces)], dim=-1)

    return _rope.reference(q, k, mixed(cos), mixed(sin), unsqueeze_dim)


# 2 op

_rotate = rotation(_NAME)


def _kernel(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], heads: int
) -> Pair:
    t, h, _ = mrope_section
    return _rotate(q, k, cos, sin, heads, cos.shape[-1], False, False, False, (t, t + h))


def cost(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *_: object) -> Cost:
    """As `rope`; of each column one of the three tables is read."""
    return _rope.cost(q, k, cos[0], sin[0])


OP = Op(_NAME, reference, reference, _kernel, supports, cost)

# 3 public


def _check(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int
) -> int:  # fmt: skip
    """-> the heads' axis."""
    heads = heads_axis(_NAME, q, k, unsqueeze_dim)
    require(q.dim() == 4, f"{_NAME}: q must have 4 dimensions; got shape {list(q.shape)}.")
    batch, tokens = q.shape[0], q.shape[tokens_axis(q, heads)]
    fits = cos.dim() == 4 and cos.shape == sin.shape and cos.shape[1] in (1, batch)
    require(
        fits and cos.shape[0] == 3 and cos.shape[2] == tokens,
        f"{_NAME}: for q {list(q.shape)} with heads on axis {heads}, cos and sin must both be [3, {batch} or 1,"
        f" {tokens}, W]; got {list(cos.shape)} and {list(sin.shape)}.",
    )
    width = rotated_width(_NAME, cos.shape[-1], q.shape[-1])
    require(
        len(mrope_section) == 3 and min(mrope_section) >= 0 and sum(mrope_section) == width // 2,
        f"{_NAME}: mrope_section must be three sizes that add up to {width // 2}, half the width of cos; got"
        f" {list(mrope_section)}.",
    )
    return heads


def qwen2vl_mrope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1,
    impl: str | None = None,
) -> Pair:  # fmt: skip
    """Rotary position embedding with temporal, height and width positions, out of place.

    Args:
        q: `[B, H, S, D]`, or `[B, S, H, D]` with `unsqueeze_dim=2`. Any strides; fp16, bf16, fp32
            (fp64 on the torch path).
        k: the same but for the number of heads and the dtype; None rotates q alone.
        cos, sin: `[3, B or 1, S, W]`, one value a column; W <= D columns are rotated, the rest is copied.
        mrope_section: pairs that read the temporal, the height and the width table; W / 2 in all.
        unsqueeze_dim: the axis of q that holds the heads.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        (q', k') in the dtypes of q and k, dense, tokens and heads in memory as in q. cos and sin get
        gradients if they require them, on the torch path.
    Memory:
        Keeps cos and sin for backward.
    Raises:
        ValueError: shapes that do not fit each other, or sections that do not add up to W / 2.
    """
    heads = _check(q, k, cos, sin, mrope_section, unsqueeze_dim)
    return OP(q, k, cos, sin, tuple(mrope_section), heads, impl=impl)


class LigerQwen2VLMRopeFunction:
    """`qwen2vl_mrope` by positional arguments."""

    @staticmethod
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
    ) -> Pair:  # fmt: skip
        return qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim)


# (q, k, cos, sin, mrope_section) -> (q', k') without autograd
qwen2vl_mrope_forward = torch.no_grad()(LigerQwen2VLMRopeFunction.apply)


@torch.no_grad()
def qwen2vl_mrope_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
) -> Pair:
    """(dq', dk') -> (dq, dk): the transposed rotation, by -sin with its halves swapped."""
    swapped = sin.roll(sin.shape[-1] // 2, -1)
    return qwen2vl_mrope(dq, dk, cos, -swapped, mrope_section)
