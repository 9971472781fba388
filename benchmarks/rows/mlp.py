"""Whole MLPs: of one function, and over one part of the sequence at a time; and their second half."""

from typing import Any

from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import BOTH, FORWARD, Function, Inputs, Make


def _mlp(make: Make, tokens: int, hidden: int, inner: int) -> Inputs:
    def weight(rows: int, columns: int) -> Tensor:
        return make(rows, columns).mul_(columns**-0.5)

    return {
        "x": make(1, tokens, hidden),
        "gate_weight": weight(inner, hidden),
        "up_weight": weight(inner, hidden),
        "down_weight": weight(hidden, inner),
    }


def _reference(ops: Any) -> Function:
    from liger_kernel.ops import mlp

    return mlp.reference


def _cost(ops: Any, **inputs: Tensor) -> Any:
    from liger_kernel.ops import mlp

    return mlp.cost(*inputs.values())


def _second_half(make: Make, tokens: int, hidden: int, inner: int) -> Inputs:
    weight = make(hidden, inner).mul_(inner**-0.5)
    return {"gate": make(tokens, inner), "up": make(tokens, inner), "weight": weight}


def _tiled(ops: Any) -> Function:
    """In parts of as many tokens as the hidden size, each the MLP of one function."""
    from liger_kernel.ops.mlp import mlp

    def run(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        weights = (gate_weight, up_weight, down_weight)
        return ops.apply_tiled_mlp(lambda _, part: mlp(part, *weights), None, x, None, weights)

    return run


_ROW = {
    "inputs": _mlp,
    "grads": ("x", "gate_weight", "up_weight", "down_weight"),
    "tiny": (64, 64, 128),
    "modes": (FORWARD, BOTH),
    "clock": "wall",
    "eager": _reference,
    "cost": _cost,
    # as many operations as nine products of x's rows with a weight
    "products": lambda x, gate_weight, **_: (
        x.shape[1],
        gate_weight.shape[1],
        3 * gate_weight.shape[0],
    ),
}

ROWS = [
    Bench(
        "mlp",
        shapes={
            "8192x4096x14336": (8192, 4096, 14336),
            "8192x2048x8192": (8192, 2048, 8192),
        },
        quick=("8192x4096x14336",),
        **_ROW,
    ),
    Bench(
        "tiled_mlp",
        shapes={"32768x4096x14336": (32768, 4096, 14336)},
        quick=(),
        ours={"ours": _tiled},
        **_ROW,
    ),
    Bench(
        "gated_linear",
        inputs=_second_half,
        grads=("gate", "up", "weight"),
        shapes={"8192x4096x14336": (8192, 4096, 14336), "8192x2048x8192": (8192, 2048, 8192)},
        tiny=(64, 64, 128),
        quick=("8192x4096x14336",),
        products=lambda gate, weight, **_: (gate.shape[0], *weight.shape),
    ),
]
