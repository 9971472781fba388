"""LoRA's update of a linear layer's output, adapters in fp32 as PEFT has them."""

from typing import Any

from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import Function, Inputs, Make


def _adapted(make: Make, tokens: int, hidden: int, out: int, rank: int) -> Inputs:
    return {
        "y": make(tokens, out),
        "x": make(tokens, hidden),
        "A": make(rank, hidden).float().mul_(hidden**-0.5),
        "B": make(out, rank).float().mul_(rank**-0.5),
    }


def _peft(ops: Any) -> Function:
    """What `peft.tuners.lora.Linear` does behind the layer."""

    def update(y: Tensor, x: Tensor, A: Tensor, B: Tensor) -> Tensor:
        return (y + (x.to(A.dtype) @ A.t()) @ B.t() * 2.0).to(y.dtype)

    return update


def _ours(ops: Any) -> Function:
    def update(y: Tensor, x: Tensor, A: Tensor, B: Tensor) -> Tensor:
        return ops.low_rank_update(y, x, A, B, 2.0)

    return update


ROWS = [
    Bench(
        "low_rank_update",
        inputs=_adapted,
        grads=("y", "x", "A", "B"),
        shapes={
            "8192x4096x4096 r16": (8192, 4096, 4096, 16),
            "8192x4096x14336 r16": (8192, 4096, 14336, 16),
            "8192x14336x4096 r64": (8192, 14336, 4096, 64),
        },
        tiny=(64, 64, 64, 16),
        quick=("8192x4096x4096 r16",),
        eager=_peft,
        ours={"ours": _ours},
    ),
]
