"""Cross entropy of logits."""

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import BOTH, Inputs, Make


def _logits(make: Make, tokens: int, vocabulary: int) -> Inputs:
    return {"input": make(tokens, vocabulary), "target": make.ids(vocabulary, tokens)}


def _cross_entropy_eager(input: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(input.float(), target)


ROWS = [
    Bench(
        "cross_entropy",
        inputs=_logits,
        grads=("input",),
        shapes={
            f"{tokens}x{vocabulary}": (tokens, vocabulary)
            for tokens, vocabulary in ((8192, 128256), (4096, 151936), (8192, 32000))
        },
        tiny=(64, 1024),
        quick=("8192x32000",),
        modes=(BOTH,),  # ours makes the gradient in forward: the parts are not comparable
        eager=lambda ops: _cross_entropy_eager,
        ours={"ours": lambda ops: lambda **inputs: ops.cross_entropy(**inputs).loss},
        cost=lambda ops, input, target: ops.OP.cost(input, target, None, "mean"),
    ),
]

UPSTREAM = {
    "cross_entropy": lambda f, input, target: f.liger_cross_entropy(input, target),
}
