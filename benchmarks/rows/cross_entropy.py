"""Cross entropy and log-probabilities of logits."""

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import BOTH, FORWARD, Inputs, Make


def _logits(make: Make, tokens: int, vocabulary: int) -> Inputs:
    return {"input": make(tokens, vocabulary), "target": make.ids(vocabulary, tokens)}


def _cross_entropy_eager(input: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(input.float(), target)


def _picked(make: Make, tokens: int, vocabulary: int) -> Inputs:
    return {"logits": make(tokens, vocabulary), "ids": make.ids(vocabulary, tokens)}


def _picked_eager(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


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
    Bench(
        "selective_log_softmax",
        inputs=_picked,
        grads=("logits",),
        shapes={"8192x128256": (8192, 128256), "16384x32000": (16384, 32000)},
        tiny=(64, 1024),
        quick=("16384x32000",),
        modes=(FORWARD, BOTH),
        eager=lambda ops: _picked_eager,
    ),
]

UPSTREAM = {
    "cross_entropy": lambda f, input, target: f.liger_cross_entropy(input, target),
}
