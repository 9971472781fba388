"""Product of int8 activations and packed ternary weights, as BitNet's linears at inference."""

import importlib
from typing import Any

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import FORWARD, Function, Inputs, Make


def _inputs(make: Make, tokens: int, width: int, out: int) -> Inputs:
    a = (make.ids(255, tokens, width) - 127).to(torch.int8)
    packed = torch.zeros(width // 4, out, dtype=torch.uint8, device=a.device)
    for i in range(4):
        packed |= make.ids(3, width // 4, out).to(torch.uint8) << 2 * i
    return {"a": a, "b": packed}


def _eager(ops: Any) -> Function:
    """torch's product of int8 matrices, after unpacking."""
    return lambda a, b: torch.ops.aten._int_mm(a, ops.unpack_weights(b))


def _established(_: Any, a: Tensor, b: Tensor) -> Tensor:
    """In the other library's own process."""
    return importlib.import_module("liger_kernel.ops.experimental.mm_int8int2").matmul(a, b)


ROWS = [
    Bench(
        "mm_int8int2",
        inputs=_inputs,
        grads=(),
        shapes={
            "32x2560x6912": (32, 2560, 6912),  # BitNet b1.58 2B4T
            "2048x2560x6912": (2048, 2560, 6912),
            "8192x4096x14336": (8192, 4096, 14336),
        },
        tiny=(32, 64, 64),
        quick=("2048x2560x6912",),
        modes=(FORWARD,),
        eager=_eager,
        ours={"ours": lambda ops: ops.matmul},
        cost=lambda ops, a, b: ops.OP_MATMUL.cost(a, b),
    ),
]

UPSTREAM = {"mm_int8int2": _established}
