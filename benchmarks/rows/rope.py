"""Rotary embeddings."""

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import Function, Inputs, Make


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


def _llama4(make: Make, batch: int, time: int, q_heads: int, k_heads: int, width: int) -> Inputs:
    """`[B, T, heads, width]` and one complex number a pair, in fp32."""
    q, k = (make(batch, time, h, width) for h in (q_heads, k_heads))
    angles = make(batch, time, width // 2).float()
    return {"q": q, "k": k, "freqs_cis": torch.polar(torch.ones_like(angles), angles)}


def _mrope(make: Make, batch: int, time: int, q_heads: int, k_heads: int, width: int) -> Inputs:
    q, k = (make(batch, time, h, width).transpose(1, 2) for h in (q_heads, k_heads))
    return {"q": q, "k": k, "cos": make(3, batch, time, width), "sin": make(3, batch, time, width)}


def _sections(width: int) -> list[int]:
    """Qwen2-VL's for 128 columns: 16 pairs of time, 24 each of height and width."""
    return [width // 8, 3 * width // 16, 3 * width // 16]


def _with_sections(function: Function) -> Function:
    return lambda q, k, cos, sin: function(q, k, cos, sin, _sections(q.shape[-1]))


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
    Bench(
        "llama4_rope",
        inputs=_llama4,
        grads=("q", "k"),
        shapes={"4x2048x40/8x128": (4, 2048, 40, 8, 128)},
        tiny=(1, 64, 8, 2, 64),
        quick=(),
    ),
    Bench(
        "qwen2vl_mrope",
        inputs=_mrope,
        grads=("q", "k"),
        shapes={"4x2048x28/4x128": (4, 2048, 28, 4, 128)},
        tiny=(1, 64, 8, 2, 64),
        quick=(),
        eager=lambda ops: _with_sections(ops.reference),
        ours={"ours": lambda ops: _with_sections(ops.qwen2vl_mrope)},
    ),
]

UPSTREAM = {
    "qwen2vl_mrope": lambda f, q, k, cos, sin: f.liger_qwen2vl_mrope(
        q, k, cos, sin, _sections(q.shape[-1])
    ),
    "rope": lambda f, q, k, cos, sin: f.liger_rope(q, k, cos, sin),
}
