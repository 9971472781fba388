"""Rotary position embedding under the names that models and frameworks call.

Each function takes the arguments of one of Hugging Face's and can stand in its place. All return new
tensors in the dtypes of q and k, computed in fp32; for shapes, layouts and errors see
`liger_kernel.ops.rope.rope`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops.llama4_rope import llama4_rope
from liger_kernel.ops.qwen2vl_mrope import qwen2vl_mrope
from liger_kernel.ops.rope import LigerRopeFunction, rope

__all__ = [
    "LigerRopeFunction",
    "apply_liger_llama4_rope_full",
    "liger_llama4_text_rotary_pos_emb",
    "liger_llama4_vision_rotary_pos_emb",
    "liger_multimodal_rotary_pos_emb",
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


def liger_multimodal_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    mrope_section: Sequence[int],
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Rotate-half embedding with temporal, height and width positions, as in Qwen2-VL.

    q `[B, Hq, S, D]`, k `[B, Hkv, S, D]`; cos, sin `[3, B, S, D]`; `mrope_section` three sizes, D / 2 in
    all. Each of the three sections of pairs reads its own table; see `liger_kernel.ops.qwen2vl_mrope`.
    """
    return qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_llama4_text_rotary_pos_emb(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Embedding by complex numbers, `apply_rotary_emb` of Llama 4: xq, xk `[B, S, H, D]`, freqs_cis
    complex `[B, S, D / 2]`; see `liger_kernel.ops.llama4_rope`."""
    return llama4_rope(xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(
    query: Tensor, key: Tensor, freqs_ci: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Embedding by complex numbers, `vision_apply_rotary_emb` of Llama 4: query, key `[B, S, H, D]`,
    freqs_ci `[S, D / 2]`, `[S, 1, D / 2]`, `[1, S, D / 2]` or `[1, S, 1, D / 2]`. Real ones scale the
    pairs, as a product with real numbers does there."""
    complex_ones = freqs_ci if freqs_ci.is_complex() else freqs_ci.to(torch.complex64)
    return llama4_rope(query, key, complex_ones)


def apply_liger_llama4_rope_full(modeling_module: Any) -> None:
    """Put the two functions above in the place of a Llama 4 modelling file's own, for every model of it.

    `liger_kernel.patch(model)` does that with an undo and after a probe; this is the bare name.
    """
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb
