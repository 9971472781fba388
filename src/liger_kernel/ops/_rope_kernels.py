"""The kernel of every rotary embedding, and its launch. What it computes: `rope.py`.

    interleaved  a pair is columns (2i, 2i + 1) of the rd rotated ones instead of (i, i + rd / 2)
    to_halves    an interleaved pair is written to columns (i, i + rd / 2)
    trailing     the rotated columns are the last rd of D instead of the first
    tables       cos and sin [B or 1, S, rd], a value a column; [.., rd / 2], a value a pair; or, with sin None, cos
                 [.., rd] holds c0 s0 c1 s1 ..., the memory of a complex table
    sections     (t, h): cos and sin are [3, B or 1, S, rd]; pair i reads the first table if i < t, the second if
                 t <= i < h, else the third

All heads of a few tokens are rotated by one program, so that the tables are read once for q and k.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import like, named
from liger_kernel.ops._triton import Launch, block_of, cdiv, planned, tl, triton

# 1 kernels


@triton.jit
def _load_pairs(
    X, m_row, LOW: tl.constexpr, HIGH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """X, m_row: [T, H, 1] -> both members of the pairs LOW..HIGH, zeros elsewhere; [T, H, BLOCK] each, fp32."""
    if PAIRS:
        col = tl.arange(0, 2 * BLOCK)[None, None, :]
        mask = m_row & (col >= 2 * LOW) & (col < 2 * HIGH)
        x = tl.load(X + col, mask=mask, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK, 2)))
    else:
        col = tl.arange(0, BLOCK)[None, None, :]
        mask = m_row & (col >= LOW) & (col < HIGH)
        x1 = tl.load(X + col, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(X + (col + HALF), mask=mask, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _store_pairs(Y, y1, y2, m_row, HALF: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    y1 = y1.to(Y.dtype.element_ty)
    y2 = y2.to(Y.dtype.element_ty)
    if PAIRS:
        col = tl.arange(0, 2 * BLOCK)[None, None, :]
        tl.store(Y + col, tl.interleave(y1, y2), mask=m_row & (col < 2 * HALF))
    else:
        col = tl.arange(0, BLOCK)[None, None, :]
        mask = m_row & (col < HALF)
        tl.store(Y + col, y1, mask=mask)
        tl.store(Y + (col + HALF), y2, mask=mask)


@triton.jit
def _load_columns(
    TABLE, s_section, m_token, FIRST: tl.constexpr, SECOND: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The values of both columns of every pair, from one table or from the sections of three.

    Three masked loads, of which each lane takes part in one: the masks are constant over a vector
    access, a pointer that depends on the section would break it up.
    """
    x1, x2 = _load_pairs(TABLE, m_token, 0, FIRST, HALF, BLOCK, PAIRS)
    if FIRST < HALF:
        h1, h2 = _load_pairs(TABLE + s_section, m_token, FIRST, SECOND, HALF, BLOCK, PAIRS)
        w1, w2 = _load_pairs(TABLE + 2 * s_section, m_token, SECOND, HALF, HALF, BLOCK, PAIRS)
        x1 += h1 + w1
        x2 += h2 + w2
    return x1, x2


@triton.jit
def _rotate_heads(
    Y, sY_head, X, sX_head, o_y, o_x, m_token, c1, c2, s1, s2,
    N_HEADS: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, READ_PAIRS: tl.constexpr,
    WRITE_PAIRS: tl.constexpr, TRAILING: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """GROUP heads at a time. o_y, o_x, m_token: [T, 1, 1]; c1, c2, s1, s2: [T, GROUP, BLOCK]."""
    turned = DIM - 2 * HALF if TRAILING else 0
    copied = 0 if TRAILING else 2 * HALF
    for first in range(0, N_HEADS, GROUP):
        head = first + tl.arange(0, GROUP)[None, :, None]
        m_row = m_token & (head < N_HEADS)
        x_row = X + (o_x + row_base(head, sX_head))
        y_row = Y + (o_y + row_base(head, sY_head))
        x1, x2 = _load_pairs(x_row + turned, m_row, 0, HALF, HALF, BLOCK, READ_PAIRS)
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
        _store_pairs(y_row + turned, y1, y2, m_row, HALF, BLOCK, WRITE_PAIRS)
        if REST > 0:
            col = tl.arange(0, REST)[None, None, :]
            mask = m_row & (col < DIM - 2 * HALF)
            rest = tl.load(x_row + (col + copied), mask=mask, other=0.0)
            tl.store(y_row + (col + copied), rest, mask=mask)


@triton.jit(do_not_specialize=["n_tokens", "seq_len"])
def _rope_kernel(
    QY, Q, KY, K, COS, SIN, sQY_batch, sQY_token, sQY_head, sQ_batch, sQ_token, sQ_head,
    sKY_batch, sKY_token, sKY_head, sK_batch, sK_token, sK_head,
    sC_section, sC_batch, sC_token, sS_section, sS_batch, sS_token, n_tokens, seq_len,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    READ_PAIRS: tl.constexpr, WRITE_PAIRS: tl.constexpr, TRAILING: tl.constexpr, TABLE: tl.constexpr,
    TABLE_PAIRS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BACKWARD: tl.constexpr,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    m_token = token < n_tokens
    b = token // seq_len
    t = token % seq_len
    # Repeated for every head of the group, so that the values land in the layout of x: a thread
    # reads what it needs and keeps it for all heads, instead of passing it on by shared memory.
    cos = tl.broadcast_to(COS + (row_base(b, sC_batch) + row_base(t, sC_token)), (TOKENS, GROUP, 1))
    sin = tl.broadcast_to(SIN + (row_base(b, sS_batch) + row_base(t, sS_token)), (TOKENS, GROUP, 1))
    if TABLE == "column":
        c1, c2 = _load_columns(
            cos, tl.cast(sC_section, tl.int64), m_token, FIRST, SECOND, HALF, BLOCK, TABLE_PAIRS
        )
        s1, s2 = _load_columns(
            sin, tl.cast(sS_section, tl.int64), m_token, FIRST, SECOND, HALF, BLOCK, TABLE_PAIRS
        )
    else:
        if TABLE == "complex":
            c1, s1 = _load_pairs(cos, m_token, 0, HALF, HALF, BLOCK, True)
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
        Q_HEADS, HALF, DIM, READ_PAIRS, WRITE_PAIRS, TRAILING, GROUP, BLOCK, REST,
    )  # fmt: skip
    if K_HEADS > 0:
        _rotate_heads(
            KY, sKY_head, K, sK_head, row_base(b, sKY_batch) + row_base(t, sKY_token),
            row_base(b, sK_batch) + row_base(t, sK_token), m_token, c1, c2, s1, s2,
            K_HEADS, HALF, DIM, READ_PAIRS, WRITE_PAIRS, TRAILING, GROUP, BLOCK, REST,
        )  # fmt: skip


# 2 launch

# A program rotates every head of a few tokens, GROUP heads at a time. A thread holds 8 pairs: one
# 16-byte load from either half of a head in 16 bit.
_PAIRS = 1024
_PAIRS_PER_WARP = 256


@functools.cache
def _group(q_heads: int, k_heads: int, most: int) -> int:
    """Heads taken at a time: the power of two within 4..most that leaves the fewest lanes idle."""
    sizes = [1 << i for i in range(2, most.bit_length())] or [most]
    return min(sizes, key=lambda g: (g * (cdiv(q_heads, g) + cdiv(k_heads, g)), -g))


def tokens_axis(x: Tensor, heads: int) -> int:
    """The axis of the tokens: the one beside `heads`, the axis of the heads."""
    return _tokens_axis(x.dim(), heads)


def _tokens_axis(dims: int, heads: int) -> int:
    return 2 * dims - 5 - heads


def heads_within_tokens(x: Tensor, heads: int) -> bool:
    """Whether in x's memory the heads of a token lie together, as projections leave them."""
    return x.stride(tokens_axis(x, heads)) >= x.stride(heads)


def _strides(steps: Sequence[int], heads: int) -> tuple[int, int, int]:
    """Of batch, token and head."""
    return steps[0] if len(steps) == 4 else 0, steps[_tokens_axis(len(steps), heads)], steps[heads]


def _columns_adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _table_strides(steps: Sequence[int], batches: int) -> tuple[int, int, int]:
    """Of section, batch (0 for a table without one) and token."""
    *section, batch, token, _ = steps
    return section[0] if section else 0, batch if batches > 1 else 0, token


def _new(x: Tensor, heads: int, by_token: bool) -> Tensor:
    """Uninitialised, of x's shape, dense; in memory heads lie within tokens, or tokens in heads."""
    tokens = tokens_axis(x, heads)
    if by_token == (tokens < heads):
        return like(x)
    return like(x.transpose(heads, tokens)).transpose(heads, tokens)


def _fake(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor | None, heads: int, rotary_dim: int,
    interleaved: bool, to_halves: bool, trailing: bool, sections: Sequence[int], by_token: bool, backward: bool,
) -> Any:  # fmt: skip
    return _new(q, heads, by_token), q.new_empty(0) if k is None else _new(k, heads, by_token)


@named(
    "(Tensor q, Tensor? k, Tensor cos, Tensor? sin, int heads, int rotary_dim, bool interleaved, bool to_halves,"
    " bool trailing, int[] sections, bool by_token, bool backward) -> (Tensor, Tensor)",
    _fake,
)
def rope_kernel(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor | None, heads: int, rotary_dim: int,
    interleaved: bool, to_halves: bool, trailing: bool, sections: Sequence[int], by_token: bool, backward: bool,
) -> Any:  # fmt: skip
    """-> q, k (empty for None) rotated forth or `backward`; heads: an axis; the rest as in the module's docstring."""
    qy, ky = _new(q, heads, by_token), q.new_empty(0) if k is None else _new(k, heads, by_token)
    q, cos = _columns_adjacent(q), _columns_adjacent(cos)
    k = None if k is None else _columns_adjacent(k)
    sin = None if sin is None else _columns_adjacent(sin)
    # What is not there has a stand-in that is not read.
    pair = (qy, q) if k is None else (ky, k)
    tensors = (qy, q, *pair, cos, cos if sin is None else sin)
    run = _plan(
        q.device, q.shape, 0 if k is None else k.shape[heads], cos.shape, tuple(t.stride() for t in tensors), heads,
        rotary_dim, interleaved, to_halves, trailing, tuple(sections), sin is None, backward,
    )  # fmt: skip
    run(*tensors)
    return qy, ky


@planned
def _plan(
    device: torch.device, shape: torch.Size, k_heads: int, table: torch.Size, steps: tuple[tuple[int, ...], ...],
    heads: int, rotary_dim: int, interleaved: bool, to_halves: bool, trailing: bool, sections: tuple[int, ...],
    is_complex: bool, backward: bool,
) -> Launch:  # fmt: skip
    q_heads, seq_len, dim = shape[heads], shape[_tokens_axis(len(shape), heads)], shape[-1]
    n_tokens, half = shape[:-3].numel() * seq_len, rotary_dim // 2
    block, rest = block_of(half), block_of(dim - rotary_dim) if dim > rotary_dim else 0
    width = max(block, rest // 2)  # in pairs: columns that are only copied take as many registers
    group = _group(q_heads, k_heads, max(1, _PAIRS // width))
    size = max(1, _PAIRS // (group * width))
    warps = cdiv(size * group * width, _PAIRS_PER_WARP)
    first, second = sections or (half, half)
    written = interleaved and not to_halves
    strides = [_strides(s, heads) for s in steps[:4]]
    strides += [_table_strides(s, table[-3]) for s in steps[4:]]
    return Launch(
        _rope_kernel, (cdiv(n_tokens, size),), device, *itertools.chain(*strides), n_tokens, seq_len,
        Q_HEADS=q_heads, K_HEADS=k_heads, HALF=half, DIM=dim, READ_PAIRS=written if backward else interleaved,
        WRITE_PAIRS=interleaved if backward else written, TRAILING=trailing,
        TABLE="complex" if is_complex else "column" if table[-1] == rotary_dim else "pair",
        TABLE_PAIRS=interleaved, FIRST=first, SECOND=second, BACKWARD=backward, TOKENS=size, GROUP=group,
        BLOCK=block, REST=rest, num_warps=min(warps, _env.device_info(device).max_warps),
    )  # fmt: skip
