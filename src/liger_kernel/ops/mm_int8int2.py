"""Product of int8 activations and ternary weights, four of which share a byte.   c = a w

    a: [M, K] int8   w: [K, N], entries -1, 0, 1   packed: [K / 4, N] uint8   c: [M, N] int32, exact

Bits 2i and 2i + 1 of packed[k, n] hold w[i K / 4 + k, n] + 1, the layout of BitNet checkpoints.

Memory  reads a and packed, a quarter of what int8 weights would be, and writes c. A byte is read once
        and meets the four blocks of a that its weights belong to; weights exist unpacked in registers
        only. Not differentiable.
Source  Ma et al., "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits", arXiv:2402.17764
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import Cost, Op, dense, named, require
from liger_kernel.ops._triton import cdiv, launch, tl, triton

_PER_BYTE = 4

# 1 reference


def reference(a: Tensor, packed: Tensor) -> Tensor:
    """The definition, in fp64, where these sums are exact on every device."""
    return (a.double() @ unpack_weights(packed).double()).to(torch.int32)


# 2 kernel


@triton.jit
def _matmul_kernel(
    C, A, sA_row, B, n_rows, n_cols, quarter,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Programs run in bands of BAND row blocks, so that those in flight share blocks of a and b."""
    pid = tl.program_id(0)
    across = tl.cdiv(n_cols, COLS)
    first = pid // (BAND * across) * BAND
    height = tl.minimum(tl.cdiv(n_rows, ROWS) - first, BAND)
    inside = pid % (BAND * across)
    row = (first + inside % height) * ROWS + tl.arange(0, ROWS)
    col = inside // height * COLS + tl.arange(0, COLS)
    m_row = (row < n_rows)[:, None]
    m_col = (col < n_cols)[None, :]
    at = row_base(row, sA_row)[:, None]
    c = tl.zeros((ROWS, COLS), tl.int32)
    for start in range(0, quarter, STEP):
        k = start + tl.arange(0, STEP)
        m_k = k < quarter
        packed = tl.load(
            B + row_base(k, n_cols)[:, None] + col[None, :], mask=m_k[:, None] & m_col, other=0
        )
        for i in tl.static_range(4):
            a = tl.load(A + at + (i * quarter + k)[None, :], mask=m_row & m_k[None, :], other=0)
            w = ((packed >> (2 * i)) & 3).to(tl.int8) - 1
            c = tl.dot(a, w.to(tl.int8), acc=c, out_dtype=tl.int32)
    tl.store(C + row_base(row, n_cols)[:, None] + col[None, :], c, mask=m_row & m_col)


# 3 launch

_TILE = {"ROWS": 64, "COLS": 128, "STEP": 64, "BAND": 8, "num_warps": 4}


def _fake_matmul(a, packed):
    return a.new_empty((a.shape[0], packed.shape[1]), dtype=torch.int32)


@named("(Tensor a, Tensor packed) -> Tensor", _fake_matmul)
def int8int2_matmul(a: Tensor, packed: Tensor) -> Tensor:
    """-> c, contiguous."""
    a = a if a.stride(1) == 1 else a.contiguous()
    packed = dense(packed)
    c = torch.empty((a.shape[0], packed.shape[1]), dtype=torch.int32, device=a.device)
    (n_rows, n_cols), quarter = c.shape, packed.shape[0]
    grid = (cdiv(n_rows, _TILE["ROWS"]) * cdiv(n_cols, _TILE["COLS"]),)
    args = (c, a, a.stride(0), packed, n_rows, n_cols, quarter)
    launch(_matmul_kernel, grid, a.device, *args, **_TILE)
    return c


# 4 op


def supports(a: Tensor, packed: Tensor) -> str | None:
    """Everything."""
    return None


def cost(a: Tensor, packed: Tensor) -> Cost:
    """a and packed in, c out; no backward."""
    moved = a.numel() + packed.numel() + 4 * a.shape[0] * packed.shape[1]
    return Cost(moved, 0, saved=0, flops=2 * a.numel() * packed.shape[1])


OP_MATMUL = Op("mm_int8int2", reference, reference, int8int2_matmul, supports, cost)

# 5 public


def matmul(a: Tensor, b: Tensor, impl: str | None = None) -> Tensor:
    """a times packed ternary weights, exact.

    Args:
        a: `[M, K]` int8, any strides.
        b: `[K / 4, N]` uint8, from `pack_weights`.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[M, N]` int32.
    Memory:
        No gradients, nothing kept.
    Raises:
        ValueError: other dtypes, or K is not four times the rows of b.
    """
    require(
        a.dtype == torch.int8 and b.dtype == torch.uint8,
        f"matmul: a must be int8 and b packed uint8; got {a.dtype} and {b.dtype}.",
    )
    require(
        a.dim() == 2 and b.dim() == 2 and a.shape[1] == _PER_BYTE * b.shape[0],
        f"matmul: a must be [M, K] and b [K / 4, N]; got {list(a.shape)} and {list(b.shape)}.",
    )
    return OP_MATMUL(a, b, impl=impl)


def pack_weights(intweights: Tensor, bits: int = 2) -> Tensor:
    """Ternary weights, four to a byte.

    Args:
        intweights: `[K, ...]` with entries -1, 0, 1 of any dtype, K a multiple of 4; left as it is.
        bits: 2.
    Returns:
        `[K / 4, ...]` uint8.
    Raises:
        ValueError: another number of bits, or K is no multiple of 4.
    """
    _check_bits("pack_weights", bits)
    require(
        intweights.dim() > 0 and intweights.shape[0] % _PER_BYTE == 0,
        f"pack_weights: the first dimension must be a multiple of 4; got {list(intweights.shape)}.",
    )
    quarters = (intweights + 1).to(torch.uint8).chunk(_PER_BYTE)
    packed = torch.zeros_like(quarters[0])
    for i, quarter in enumerate(quarters):
        packed |= quarter << (bits * i)
    return packed


def unpack_weights(packed: Tensor, bits: int = 2) -> Tensor:
    """What `pack_weights` packed: `[K / 4, ...]` uint8 -> `[K, ...]` int8 with entries -1, 0, 1."""
    _check_bits("unpack_weights", bits)
    quarters: list[Any] = [(packed >> (bits * i)) & 3 for i in range(_PER_BYTE)]
    return torch.cat(quarters).to(torch.int8) - 1


def _check_bits(name: str, bits: int) -> None:
    require(bits == 2, f"{name}: a byte holds four weights of 2 bits; got bits={bits}.")
