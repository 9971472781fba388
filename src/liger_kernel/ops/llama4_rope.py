"""Rotary position embedding by complex numbers.   y = x * f,   x and y read as complex pairs of columns

    (y1, y2) = (x1 Re f - x2 Im f,  x2 Re f + x1 Im f)   for the columns (2i, 2i + 1)

    q: [B, S, Hq, D]   k: [B, S, Hkv, D]   freqs_cis: complex, one value a pair: [S, D / 2] or [B, S, D / 2]

Backward multiplies by the conjugate, the same kernel. It is that of `rope.py` with interleaved pairs; a complex table
lies in memory as Re, Im, Re, Im, ..., and is read there, without a copy of its parts.

Casts   fp32 inside, one rounding, to q's and to k's own dtype.
Memory  reads q, k and the table once and writes two new tensors, in one launch. Keeps the table.
Paper   Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864
"""

import torch
from torch import Tensor

from liger_kernel.ops._op import Op, choice, compute_dtype
from liger_kernel.ops._rope_kernels import tokens_axis
from liger_kernel.ops.rope import Pair, cost, heads_axis, rotation, supports

# 1 reference


def reference(q: Tensor, k: Tensor | None, freqs_cis: Tensor, unsqueeze_dim: int = 2) -> Pair:
    """The definition, as complex multiplication."""
    freqs, heads = _resolve(q, k, freqs_cis, unsqueeze_dim)
    return _product(q, k, freqs, heads)


def _product(q: Tensor, k: Tensor | None, table: Tensor, heads: int) -> Pair:
    """table: [B or 1, S, D], Re and Im in turns."""
    wide = torch.promote_types(compute_dtype(q), table.dtype)
    freqs = torch.view_as_complex(table.to(wide).unflatten(-1, (-1, 2)))
    freqs = (freqs[0] if q.dim() == 3 else freqs).unsqueeze(heads)

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * freqs).flatten(-2).to(x.dtype)

    return rotated(q), None if k is None else rotated(k)


# 2 op

_rotate = rotation("llama4_rope")


def _kernel(q: Tensor, k: Tensor | None, table: Tensor, heads: int) -> Pair:
    return _rotate(q, k, table, None, heads, q.shape[-1], True, False, False, ())


OP = Op("llama4_rope", reference, _product, _kernel, supports, cost)

# 3 public


def _resolve(
    q: Tensor, k: Tensor | None, freqs_cis: Tensor, unsqueeze_dim: int
) -> tuple[Tensor, int]:
    """-> the table as real [B or 1, S, D], the heads' axis."""
    heads = heads_axis("llama4_rope", q, k, unsqueeze_dim)
    if not freqs_cis.is_complex():
        raise ValueError(
            f"llama4_rope: freqs_cis must be complex, one value a pair; got {freqs_cis.dtype}. Use"
            " `rope` for tables of cos and sin."
        )
    batch, tokens = q.shape[:-3].numel(), q.shape[tokens_axis(q, heads)]
    pairs = q.shape[-1] // 2
    freqs = _table(freqs_cis, heads, batch, tokens)
    fits = freqs.dim() == 3 and freqs.shape[0] in (1, batch) and freqs.shape[1] >= tokens
    if not fits or q.shape[-1] % 2 or freqs.shape[2] != pairs:
        raise ValueError(
            f"llama4_rope: for q {list(q.shape)} with heads on axis {heads}, freqs_cis must be"
            f" [S, {pairs}], [S, 1, {pairs}], [{batch} or 1, S, {pairs}] or of q's rank with one head, S at"
            f" least {tokens}; got {list(freqs_cis.shape)}."
        )
    return torch.view_as_real(freqs[:, :tokens].resolve_conj()).flatten(-2), heads


def _table(freqs: Tensor, heads: int, batch: int, tokens: int) -> Tensor:
    """A table of one of the accepted shapes as [B or 1, S, D / 2]; any other as it is."""
    if freqs.dim() == 2:
        return freqs.unsqueeze(0)
    if freqs.dim() == 4 and freqs.shape[heads] == 1:
        return freqs.squeeze(heads)
    by_batch = tokens <= 1 and freqs.shape[0] in (1, batch)
    a_token = freqs.dim() == 3 and freqs.shape[1] == 1 and not by_batch  # [S, 1, D / 2]
    return freqs.transpose(0, 1) if a_token else freqs


def llama4_rope(
    q: Tensor, k: Tensor | None, freqs_cis: Tensor, unsqueeze_dim: int = 2, impl: str | None = None
) -> Pair:
    """Rotary position embedding of interleaved pairs by a complex table, out of place.

    Args:
        q: `[B, S, H, D]`, as Llama 4 has it; `[B, H, S, D]` with `unsqueeze_dim=1` (DeepSeek-V2);
            `[S, H, D]`. Any strides; fp16, bf16, fp32 (fp64 on the torch path).
        k: the same but for the number of heads and the dtype; None rotates q alone.
        freqs_cis: complex `[S, D/2]`, `[S, 1, D/2]`, `[B or 1, S, D/2]` or of q's rank with one head.
            Rows beyond q's tokens are not read. Any complex numbers, not only those of modulus 1.
        unsqueeze_dim: the axis of q that holds the heads.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        (q', k') in the dtypes of q and k, dense, tokens and heads in memory as in q. freqs_cis gets a
        gradient if it requires one, on the torch path.
    Memory:
        Keeps freqs_cis for backward.
    Raises:
        ValueError: freqs_cis is not complex, or shapes do not fit each other.
    """
    table, heads = _resolve(q, k, freqs_cis, unsqueeze_dim)
    return OP(q, k, table, heads, impl=impl)


class LigerLlama4RopeFunction:
    """`apply(q, k, freqs_cis, BLOCK_SIZE=None)` is `llama4_rope`; the block size follows from the shape."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> Pair:
        return llama4_rope(q, k, freqs_cis)


@torch.no_grad()
def llama4_rope_forward(
    q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None, imag_sign: float = 1.0
) -> Pair:
    """(q', k') without autograd; with `imag_sign=-1` the backward rotation of their gradients."""
    choice("llama4_rope_forward", "imag_sign", imag_sign, (1.0, -1.0))
    return llama4_rope(q, k, freqs_cis if imag_sign == 1.0 else freqs_cis.conj())
