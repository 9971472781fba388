"""RMSNorm."""

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import Inputs, Make


def _norm(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "weight": make(width)}


ROWS = [
    Bench(
        "rms_norm",
        inputs=_norm,
        grads=("x", "weight"),
        shapes={
            f"{rows}x{width}": (rows, width)
            for rows, width in (
                (8192, 2048),
                (8192, 4096),
                (16384, 4096),
                (8192, 8192),
                (4096, 16384),
                (65536, 1024),
            )
        },
        tiny=(64, 1024),
        quick=("8192x2048", "8192x4096"),
    ),
]

UPSTREAM = {
    "rms_norm": lambda f, x, weight: f.liger_rms_norm(x, weight, 1e-6),
}
