"""Norms beyond RMSNorm: with a residual, with a gate, modulated, and LayerNorm."""

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import Inputs, Make

_SHAPES = {"8192x4096": (8192, 4096), "8192x8192": (8192, 8192)}


def _added(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "residual": make(rows, width), "weight": make(width)}


def _layer(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "weight": make(width), "bias": make(width)}


def _gated(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "gate": make(rows, width), "weight": make(width)}


def _modulated(make: Make, samples: int, tokens: int, width: int) -> Inputs:
    return {
        "x": make(samples, tokens, width),
        "weight": make(width),
        "scale": make(samples, 1, width),
        "shift": make(samples, 1, width),
    }


ROWS = [
    Bench(
        "fused_add_rms_norm",
        inputs=_added,
        grads=("x", "residual", "weight"),
        shapes=_SHAPES,
        tiny=(64, 1024),
        quick=("8192x4096",),
    ),
    Bench(
        "layer_norm",
        inputs=_layer,
        grads=("x", "weight", "bias"),
        shapes={**_SHAPES, "16384x1152": (16384, 1152)},  # a vision tower
        tiny=(16, 1024),
        quick=("8192x4096",),
    ),
    Bench(
        "gated_rms_norm",
        inputs=_gated,
        grads=("x", "gate", "weight"),
        shapes={
            "262144x128": (262144, 128),  # Qwen3-Next: 32 value heads of 8,192 tokens
            "8192x4096": (8192, 4096),
        },
        tiny=(64, 1024),
        quick=("262144x128",),
    ),
    Bench(
        "modulated_rms_norm",
        inputs=_modulated,
        grads=("x", "weight", "scale", "shift"),
        shapes={
            "32x256x1152": (32, 256, 1152),
            "4x4096x3072": (4, 4096, 3072),
        },  # image transformers
        tiny=(4, 16, 1024),
        quick=("32x256x1152",),
    ),
]

UPSTREAM = {
    "fused_add_rms_norm": lambda f, x, residual, weight: f.liger_fused_add_rms_norm(
        x, residual, weight, 1e-6
    ),
    "layer_norm": lambda f, x, weight, bias: f.liger_layer_norm(x, weight, bias, 1e-6),
    "modulated_rms_norm": lambda f, x, weight, scale, shift: f.liger_modulated_rms_norm(
        x, weight, scale, shift
    ),
}
