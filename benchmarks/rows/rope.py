"""Rotary embeddings."""

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import Inputs, Make


def _rope(make: Make, batch: int, time: int, q_heads: int, k_heads: int, width: int) -> Inputs:
    """As models hand them over: transposed views of `[B, T, heads, width]`."""
    q, k = (make(batch, time, h, width).transpose(1, 2) for h in (q_heads, k_heads))
    frequencies = 1e4 ** -(torch.arange(0, width, 2, device=q.device) / width)
    angles = torch.arange(time, device=q.device)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)[None]
    return {"q": q, "k": k, "cos": angles.cos().to(q.dtype), "sin": angles.sin().to(q.dtype)}


def _rope_eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


ROWS = [
    Bench(
        "rope",
        inputs=_rope,
        grads=("q", "k"),
        shapes={"4x2048x32/8x128": (4, 2048, 32, 8, 128)},
        tiny=(1, 64, 8, 2, 64),
        quick=("4x2048x32/8x128",),
        eager=lambda ops: _rope_eager,
    ),
]

UPSTREAM = {
    "rope": lambda f, q, k, cos, sin: f.liger_rope(q, k, cos, sin),
}
