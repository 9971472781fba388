"""Dropout whose mask is a function of a seed: who needs it again makes it again, and nothing but the seed is kept.

Element (row, column) is dropped if its 16 random bits, as a number, are below `dropped`, so that a probability is a
multiple of 2^-16. Eight adjacent columns share one call of Philox with the counter (column / 8, row, 0, 0); seven
rounds of it pass all tests (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

import torch
from torch import Tensor

from liger_kernel.ops._triton import cdiv, tl, triton

STEPS = 1 << 16  # of a probability
_PHILOX_ROUNDS, _COLUMNS = 7, 8  # of one call
_ROUNDS: tl.constexpr = tl.constexpr(_PHILOX_ROUNDS)
_EACH: tl.constexpr = tl.constexpr(_COLUMNS)
_WORD = (1 << 32) - 1
_FACTORS, _KEYS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # Philox 4x32's


def steps(p: float) -> int:
    """`dropped` for a probability in [0, 1)."""
    return min(round(p * STEPS), STEPS - 1)


def factor(dropped: int) -> float:
    """What the kept elements are multiplied by."""
    return STEPS / (STEPS - dropped)


def drawn(x: Tensor) -> Tensor:
    """A seed from the generator of x's device, without waiting for it."""
    return torch.randint(1 << 62, (1,), device=x.device)


@triton.jit
def kept(SEED, row, first, dropped, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mask [ROWS, COLUMNS] of these rows and the columns from `first` on, a multiple of eight."""
    column = first // _EACH + tl.arange(0, COLUMNS // _EACH)
    nothing = tl.zeros((ROWS, COLUMNS // _EACH), tl.uint32)
    c0 = nothing + column.to(tl.uint32)[None, :]
    c1 = nothing + row.to(tl.uint32)[:, None]
    a, b, c, d = tl.philox(tl.load(SEED), c0, c1, nothing, nothing, _ROUNDS)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    low, high = (words & 0xFFFF).to(tl.int32), (words >> 16).to(tl.int32)
    return tl.reshape(tl.join(low, high), (ROWS, COLUMNS)) >= dropped


def mask(seed: Tensor, n_rows: int, n_cols: int, dropped: int) -> Tensor:
    """The same in torch, `[n_rows, n_cols]`: where elements are kept."""
    row, column = (torch.arange(n, device=seed.device) for n in (n_rows, cdiv(n_cols, _COLUMNS)))
    c0, c1 = torch.broadcast_tensors(column[None, :], row[:, None])
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_PHILOX_ROUNDS):
        (high2, low2), (high0, low0) = _product(_FACTORS[1], c2), _product(_FACTORS[0], c0)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEYS[0]) & _WORD, (k1 + _KEYS[1]) & _WORD
    words = torch.stack((c0, c1, c2, c3), -1)
    bits = torch.stack((words & 0xFFFF, words >> 16), -1)
    return bits.flatten(1)[:, :n_cols] >= dropped


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a product of two words."""
    upper = a * (b >> 16) + (a * (b & 0xFFFF) >> 16)
    return upper >> 16, a * b & _WORD
