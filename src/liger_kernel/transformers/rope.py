"""Rotary position embedding under the names that models and frameworks call.

Each function takes the arguments of one of Hugging Face's and can stand in its place. All return new
tensors in the dtypes of q and k, computed in fp32; for shapes, layouts and errors see
`liger_kernel.ops.rope.rope`.
"""

from torch import Tensor

from liger_kernel.ops.rope import LigerRopeFunction, rope

__all__ = [
    "LigerRopeFunction",
    "liger_rotary_pos_emb",
    "liger_rotary_pos_emb_gpt_oss",
    "liger_rotary_pos_emb_vision",
]


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate-half embedding of q and k, `apply_rotary_pos_emb` of Llama and most others.

    q `[B, Hq, S, D]`, k `[B, Hkv, S, D]` (`[B, S, H, D]` with `unsqueeze_dim=2`); cos, sin `[S, W]`,
    `[B or 1, S, W]` or `[B or 1, 1, S, W]`. W < D rotates the first W columns and copies the rest.
    With `rotary_dim`, cos and sin may hold one value a pair (W = rotary_dim / 2). `position_ids` is
    not read: cos and sin are per position already.
    """
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=rotary_dim)


def liger_rotary_pos_emb_vision(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Rotate-half embedding of vision towers: q, k `[S, H, D]`, cos, sin `[S, D]`.

    A leading batch axis on all four is accepted.
    """
    return rope(q, k, cos, sin, unsqueeze_dim=-2)


def liger_rotary_pos_emb_gpt_oss(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Rotate-half embedding with one value a pair: cos, sin `[B or 1, S, D / 2]`."""
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=q.shape[-1])
