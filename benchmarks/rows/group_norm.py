"""GroupNorm of the shapes of diffusion models: their networks, and the decoder with few, large groups."""

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import Inputs, Make

_GROUPS, _EPS = 32, 1e-6


def _images(make: Make, batch: int, channels: int, height: int, width: int) -> Inputs:
    x = make(batch, channels, height, width)
    return {"x": x, "weight": make(channels), "bias": make(channels)}


def _eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.group_norm(x, _GROUPS, weight, bias, _EPS)


ROWS = [
    Bench(
        "group_norm",
        inputs=_images,
        grads=("x", "weight", "bias"),
        shapes={
            "32x640x32x32": (32, 640, 32, 32),
            "32x320x64x64": (32, 320, 64, 64),
            "1x128x512x512": (1, 128, 512, 512),
        },
        tiny=(2, 64, 8, 8),
        quick=("32x320x64x64",),
        eager=lambda ops: _eager,
        ours={
            "ours": lambda ops: (
                lambda x, weight, bias: ops.group_norm(x, _GROUPS, weight, bias, _EPS)
            )
        },
        cost=lambda ops, x, weight, bias: ops.OP.cost(x, _GROUPS),
    ),
]

UPSTREAM = {
    "group_norm": lambda f, x, weight, bias: f.liger_group_norm(
        x, weight, bias, weight.shape[0], _GROUPS, _EPS
    ),
}
