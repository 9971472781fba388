"""Product of int8 activations and ternary weights, four of which share a byte.   c = a w

    a: [M, K] int8   w: [K, N], entries -1, 0, 1   packed: [K / 4, N] uint8   c: [M, N] int32, exact

Bits 2i and 2i + 1 of packed[k, n] hold w[i K / 4 + k, n] + 1, the layout of BitNet checkpoints.

Product  c^T = w^T a^T. Tensor cores take int8 operands from shared memory only where the summed dimension is
         adjacent: in a it is, in packed it is not. So weights are the operand that comes from registers. Bytes cross
         shared memory packed, and each meets the four blocks of a that its weights belong to.
Memory   reads a and packed, a quarter of what int8 weights would be, and writes c. For many rows packed is transposed
         beforehand, into K N / 4 bytes that live as long as the call. Not differentiable.
Source   Ma et al., "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits", arXiv:2402.17764
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernel.ops._descriptors import TensorDescriptor, aligned, pays
from liger_kernel.ops._device import row_base
from liger_kernel.ops._dot import grouped
from liger_kernel.ops._op import Cost, Op, dense, named, require
from liger_kernel.ops._triton import cdiv, launch, takes_ptx, tl, triton

_PER_BYTE = 4

# 1 reference


def reference(a: Tensor, packed: Tensor) -> Tensor:
    """The definition, in fp64, where these sums are exact on every device."""
    return (a.double() @ unpack_weights(packed).double()).to(torch.int32)


# 2 kernels


@triton.jit
def _lowest(packed, PTX: tl.constexpr):
    """Bits 0 and 1 of each byte, less 1. PTX: four bytes at once, where Triton would take each alone; bit 7 holds what
    a byte would borrow from the next.
    """
    if PTX:
        w = tl.inline_asm_elementwise(
            "{.reg .b32 t; lop3.b32 t, $1, 0x03030303, 0x80808080, 0xEA;"
            " sub.u32 t, t, 0x01010101; xor.b32 $0, t, 0x80808080;}",
            "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        w = ((packed & 3).to(tl.int8) - 1).to(tl.int8)
    return w


@triton.jit
def _next(packed, PTX: tl.constexpr):
    """Each byte's next weight becomes its lowest. PTX: a byte's upper bits are then of no use."""
    if PTX:
        packed = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 2;", "=r,r", [packed], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        packed >>= 2
    return packed


@triton.jit
def _matmul_kernel(
    C, A, sA_row, B, n_rows, n_cols, quarter,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    TURNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """TMA: A is a descriptor of [4, M, K / 4], which brings zeros beyond a quarter, B of packed or, TURNED, of its
    transpose.

    A thread holds rows n and n + 8 of each 16 of an operand. Unless TURNED adjacent columns of packed take these two
    places, so that one access brings both; the rows of c^T go back to their order at the end.
    """
    m_blocks, n_blocks = tl.cdiv(n_rows, ROWS), tl.cdiv(n_cols, COLS)
    m, n = grouped(tl.program_id(0), m_blocks, n_blocks, GROUP)
    row, col = m * ROWS, n * COLS
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    m_row = rows < n_rows
    m_col = cols < n_cols
    c = tl.zeros((COLS, ROWS), tl.int32)
    for start in range(0, quarter, STEP):
        k = start + tl.arange(0, STEP)
        m_k = k < quarter
        if TURNED:
            packed = B.load([col, start])
        else:
            if TMA:
                packed = B.load([start, col])
            else:
                at = B + row_base(k, n_cols)[:, None] + cols[None, :]
                packed = tl.load(at, mask=m_k[:, None] & m_col[None, :], other=0)
            packed = tl.permute(tl.reshape(packed, (STEP, COLS // 16, 8, 2)), (1, 3, 2, 0))
            packed = tl.reshape(packed, (COLS, STEP))
        for i in tl.static_range(4):
            if TMA:
                a = tl.reshape(A.load([i, row, start]), (ROWS, STEP))
            else:
                at = A + row_base(rows, sA_row)[:, None] + (i * quarter + k)[None, :]
                a = tl.load(at, mask=m_row[:, None] & m_k[None, :], other=0)
            c = tl.dot(_lowest(packed, PTX), tl.trans(a), acc=c, out_dtype=tl.int32)
            packed = _next(packed, PTX)
    if not TURNED:
        c = tl.permute(tl.reshape(c, (COLS // 16, 2, 8, ROWS)), (0, 2, 1, 3))
        c = tl.reshape(c, (COLS, ROWS))
    at = C + row_base(rows, n_cols)[None, :] + cols[:, None]
    tl.store(at, c, mask=m_row[None, :] & m_col[:, None])


@triton.jit
def _turn_kernel(T, B, n_cols, quarter, COLS: tl.constexpr, STEP: tl.constexpr):
    """T[n, k] = B[k, n]."""
    k = tl.program_id(0) * STEP + tl.arange(0, STEP)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    m_k, m_col = k < quarter, col < n_cols
    at = B + row_base(k, n_cols)[:, None] + col[None, :]
    packed = tl.load(at, mask=m_k[:, None] & m_col[None, :], other=0)
    at = T + row_base(col, quarter)[:, None] + k[None, :]
    tl.store(at, tl.trans(packed), mask=m_col[:, None] & m_k[None, :])


# 3 launch


class _Tile(NamedTuple):
    """Rows of a, columns and rows of packed that a program takes, and whether packed is transposed beforehand."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    turned: bool


# Up to so many rows, by descriptors. An integer product is waited for before the next begins: tiles leave room for two
# programs of an H200's multiprocessor, one of which multiplies while the other waits.
_TILES = {
    16: _Tile(16, 64, 128, 4, 5, turned=False),
    32: _Tile(32, 64, 128, 4, 4, turned=False),
    64: _Tile(64, 64, 128, 4, 3, turned=False),
    128: _Tile(128, 64, 64, 4, 3, turned=False),
    2048: _Tile(128, 128, 64, 8, 3, turned=False),
}
_MANY = _Tile(128, 128, 64, 8, 3, turned=True)
_PLAIN = _Tile(64, 128, 64, 8, 3, turned=False)  # by pointers
_GROUP = 8  # row tiles that share columns of packed
_TURN = {"COLS": 128, "STEP": 128}


def _turned(packed: Tensor) -> Tensor:
    """[N, K / 4]."""
    quarter, n_cols = packed.shape
    turned = packed.new_empty((n_cols, quarter))
    grid = (cdiv(quarter, _TURN["STEP"]), cdiv(n_cols, _TURN["COLS"]))
    launch(_turn_kernel, grid, packed.device, turned, packed, n_cols, quarter, **_TURN)
    return turned


def _described(a: Tensor, packed: Tensor, tile: _Tile) -> tuple[Any, Any]:
    """Descriptors of a by quarters and of packed, or of its transpose."""
    n_rows, quarter = a.shape[0], packed.shape[0]
    by_quarters = TensorDescriptor(
        a, [4, n_rows, quarter], [quarter, a.stride(0), 1], [1, tile.rows, tile.step]
    )
    if tile.turned:
        block = [tile.columns, tile.step]
        return by_quarters, TensorDescriptor.from_tensor(_turned(packed), block)
    return by_quarters, TensorDescriptor.from_tensor(packed, [tile.step, tile.columns])


def _fake_matmul(a, packed):
    return a.new_empty((a.shape[0], packed.shape[1]), dtype=torch.int32)


@named("(Tensor a, Tensor packed) -> Tensor", _fake_matmul)
def int8int2_matmul(a: Tensor, packed: Tensor) -> Tensor:
    """-> c, contiguous."""
    a = a if a.stride(1) == 1 else a.contiguous()
    packed = dense(packed)
    c = torch.empty((a.shape[0], packed.shape[1]), dtype=torch.int32, device=a.device)
    (n_rows, n_cols), quarter = c.shape, packed.shape[0]
    tma = (
        pays(a.device)
        and TensorDescriptor is not None
        and quarter % 16 == 0
        and aligned(packed)
        and aligned(a)
        and a.stride(0) >= a.shape[1]
    )
    tile, operands = _PLAIN, (a, packed)
    if tma:
        tile = next((tile for most, tile in _TILES.items() if n_rows <= most), _MANY)
        operands = _described(a, packed, tile)
    launch(
        _matmul_kernel, (cdiv(n_rows, tile.rows) * cdiv(n_cols, tile.columns),), a.device,
        c, operands[0], a.stride(0), operands[1], n_rows, n_cols, quarter,
        ROWS=tile.rows, COLS=tile.columns, STEP=tile.step, GROUP=_GROUP, TMA=tma, TURNED=tile.turned,
        PTX=takes_ptx(a.device), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
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
        No gradients, nothing kept. For many rows K N / 4 bytes during the call, on cards with tensor descriptors.
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
