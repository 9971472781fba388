"""Embedding."""

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import Inputs, Make


def _embedding(make: Make, tokens: int, words: int, width: int) -> Inputs:
    """Ids as text has them: few words often, most of them once (density falling as 1 / id)."""
    share = make.ids(1 << 20, tokens) / (1 << 20)
    return {"ids": (float(words) ** share).long() - 1, "weight": make(words, width)}


ROWS = [
    Bench(
        "embedding",
        inputs=_embedding,
        grads=("weight",),
        shapes={
            "8192x128256x4096": (8192, 128256, 4096),
            "32768x128256x4096": (32768, 128256, 4096),
            "8192x151936x2048": (8192, 151936, 2048),
        },
        tiny=(64, 512, 256),
        quick=("8192x128256x4096",),
    ),
]
