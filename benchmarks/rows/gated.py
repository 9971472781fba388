"""Gated activations of separate gate and up."""

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import Inputs, Make


def _gated(make: Make, rows: int, width: int) -> Inputs:
    return {"gate": make(rows, width), "up": make(rows, width)}


_GATED = {
    "inputs": _gated,
    "grads": ("gate", "up"),
    "shapes": {"8192x14336": (8192, 14336)},
    "tiny": (64, 1024),
    "quick": ("8192x14336",),
}

ROWS = [
    Bench("swiglu", **_GATED),
    Bench("geglu", **_GATED),
]

UPSTREAM = {
    "swiglu": lambda f, gate, up: f.liger_swiglu(gate, up),
    "geglu": lambda f, gate, up: f.liger_geglu(gate, up),
}
