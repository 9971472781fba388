"""Activations and what stands in for one: elementwise functions and functions of a row."""

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import Inputs, Make

_MLP = {"shapes": {"8192x14336": (8192, 14336)}, "tiny": (64, 1024), "quick": ("8192x14336",)}


def _one(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width)}


def _untied(make: Make, rows: int, width: int) -> Inputs:
    """fp32, off the grid of bf16: no value lies exactly at the threshold, where the gradient is a matter of choice."""
    return {"x": make(rows, width).float().mul_(1.37)}


def _pair(make: Make, rows: int, width: int) -> Inputs:
    return {"gate": make(rows, width), "up": make(rows, width)}


def _dyt(make: Make, rows: int, width: int) -> Inputs:
    alpha = make(1).fill_(0.5)
    return {"x": make(rows, width), "alpha": alpha, "gamma": make(width), "beta": make(width)}


def _poly_norm(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "weight": make(3), "bias": make(1)}


def _shapes(*sizes: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return {f"{rows}x{width}": (rows, width) for rows, width in sizes}


ROWS = [
    Bench(
        "softmax",
        inputs=_one,
        grads=("x",),
        shapes=_shapes((65536, 1024), (8192, 8192), (4096, 32768), (4096, 131072)),
        tiny=(64, 1024),
        quick=("8192x8192", "4096x32768"),
    ),
    Bench(
        "sparsemax",
        inputs=_untied,
        grads=("x",),
        shapes=_shapes((8192, 4096), (4096, 32768), (1024, 131072)),
        tiny=(64, 1024),
        quick=("8192x4096",),
    ),
    Bench("relu_squared", inputs=_one, grads=("x",), **_MLP),
    Bench("reglu", inputs=_pair, grads=("gate", "up"), **_MLP),
    Bench(
        "dyt",
        inputs=_dyt,
        grads=("x", "alpha", "gamma", "beta"),
        shapes=_shapes((8192, 4096), (65536, 1024)),
        tiny=(64, 1024),
        quick=("8192x4096",),
    ),
    Bench(
        "poly_norm",
        inputs=_poly_norm,
        grads=("x", "weight", "bias"),
        shapes=_shapes((8192, 4096), (8192, 8192), (65536, 1024)),
        tiny=(64, 1024),
        quick=("8192x4096",),
    ),
]

UPSTREAM = {
    "softmax": lambda f, x: f.liger_softmax(x),
    "sparsemax": lambda f, x: f.liger_sparsemax(x),
    "relu_squared": lambda f, x: f.liger_relu_squared(x),
    "dyt": lambda f, x, alpha, gamma, beta: f.liger_dyt(x, alpha, gamma, beta),
    "poly_norm": lambda f, x, weight, bias: f.liger_poly_norm(x, weight, bias),
}
