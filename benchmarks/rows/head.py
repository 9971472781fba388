"""Losses of hidden states and the vocabulary head."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import BOTH, Inputs, Make

MIB = 1 << 20
IGNORED = -100


def _head(
    make: Make, tokens: int, hidden: int, vocabulary: int, ignored_percent: int = 0
) -> Inputs:
    target = make.ids(vocabulary, tokens)
    target[make.ids(100, tokens) < ignored_percent] = IGNORED
    weight = make(vocabulary, hidden).mul_(0.02)
    return {"input": make(tokens, hidden), "weight": weight, "target": target}


def _head_eager(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(input, weight)
    return torch.nn.functional.cross_entropy(logits.float(), target)


def _head_ours(ops: Any, budget: int | None = None) -> Any:
    function = partial(ops.fused_linear_cross_entropy, memory_budget=budget)
    return lambda **inputs: function(**inputs).loss


def _head_cost(ops: Any, input: Tensor, weight: Tensor, target: Tensor) -> Any:
    """Ignored tokens need no work."""
    kept = target != IGNORED
    return ops.OP.cost(input[kept], weight, target[kept])


def _head_products(input: Tensor, weight: Tensor, target: Tensor) -> tuple[int, int, int]:
    return int((target != IGNORED).sum()), input.shape[1], weight.shape[0]


def _logprob_eager(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_p = torch.nn.functional.linear(input, weight).float().log_softmax(-1)
    return log_p.gather(-1, target[:, None])[:, 0]


def _logprob_ours(ops: Any) -> Any:
    return lambda input, weight, target: ops.linear_logprob(input, weight, target).logp


_SHAPES = {
    "A": (8192, 4096, 128256),
    "B": (8192, 2048, 128256),
    "C": (16384, 4096, 32000),
    "D": (4096, 8192, 151936),
    "E": (32768, 4096, 128256),
}
_CROSS_ENTROPY = {
    "inputs": _head,
    "grads": ("input", "weight"),
    "tiny": (16, 64, 1024),
    "modes": (BOTH,),  # ours makes the gradient in forward: the parts are not comparable
    "clock": "wall",
    "eager": lambda ops: _head_eager,
    "cost": _head_cost,
    "products": _head_products,
}

ROWS = [
    Bench(
        "fused_linear_cross_entropy",
        shapes={
            **_SHAPES,
            "A/60": (8192, 4096, 128256, 60),
            "1M": (2048, 1024, 1_000_000),
        },
        quick=("A", "A/60"),
        ours={"ours": _head_ours},
        **_CROSS_ENTROPY,
    ),
    Bench(  # what less memory costs; 32 MiB at A: 128 tokens at a time
        "fused_linear_cross_entropy_budgets",
        shapes=_SHAPES,
        quick=(),
        ours={
            f"ours {name}": partial(_head_ours, budget=mib * MIB)
            for name, mib in {"1 GiB": 1024, "256 MiB": 256, "80 MiB": 80, "32 MiB": 32}.items()
        },
        module="liger_kernel.ops.fused_linear_cross_entropy",
        **_CROSS_ENTROPY,
    ),
    Bench(
        "linear_logprob",
        inputs=_head,
        grads=("input", "weight"),
        shapes={"A": (8192, 4096, 128256)},
        tiny=(16, 64, 1024),
        quick=(),
        modes=(BOTH,),
        clock="wall",
        eager=lambda ops: _logprob_eager,
        ours={"ours": _logprob_ours},
        cost=_head_cost,
    ),
]

UPSTREAM = {
    "fused_linear_cross_entropy": lambda f, input, weight, target: (
        f.liger_fused_linear_cross_entropy(input, weight, target)
    ),
}
