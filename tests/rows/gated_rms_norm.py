import torch

from liger_kernel.ops import gated_rms_norm
from liger_kernel.testing.properties import Case


def _inputs(shape, make, **_):
    return {"x": make(*shape), "gate": make(*shape), "weight": 1 + 0.2 * make(shape[-1])}


def _mixed(shape, make, **_):
    return {
        "x": make(*shape, dtype=torch.float32),
        "gate": make(*shape),
        "weight": make(shape[-1]),
    }


def _wide_weight(shape, make, **_):
    return {
        "x": make(*shape),
        "gate": make(*shape),
        "weight": make(shape[-1], dtype=torch.float32),
    }


def _opchecks(tensors, **options):
    x, z, w = tensors.values()
    how = (False, x.shape[-1] // 2, "silu", "llama")
    _, rstd = gated_rms_norm.gated_rms_norm_forward_kernel(x, z, w, 1e-6, *how)
    backward = gated_rms_norm.gated_rms_norm_backward_kernel
    return [
        (gated_rms_norm.gated_rms_norm_forward_kernel, (x, z, w, 1e-6, *how)),
        (backward, (x, x, z, w, rstd, *how, True, True, True)),
        (backward, (x, x, z, w, rstd, *how, False, True, False)),
    ]


def _call(*shapes, **options):
    return lambda make: gated_rms_norm.gated_rms_norm(*(make(*s) for s in shapes), **options)


ROWS = [
    Case(
        gated_rms_norm.OP,
        gated_rms_norm.gated_rms_norm,
        _inputs,
        shapes=[(2, 3, 8), (1, 1), (7,), (0, 5), (3, 257)],
        options={
            "norm_before_gate": [True, False, True, False],
            "casting_mode": ["llama", "llama", "gemma", "gemma"],
            "activation": ["silu", "silu", "sigmoid", "sigmoid"],
        },
        grads=("x", "gate", "weight"),
        opchecks=_opchecks,
        bad=[
            ("weight must have shape", _call((2, 4), (2, 4), (3,)), ValueError),
            ("gate must have the shape of x", _call((2, 4), (1, 4), (4,)), ValueError),
            ("group_size must divide", _call((2, 4), (2, 4), (4,), group_size=3), ValueError),
            (
                "activation must be one of",
                _call((2, 4), (2, 4), (4,), activation="relu"),
                ValueError,
            ),
            ("casting_mode must be", _call((2, 4), (2, 4), (4,), casting_mode="t5"), ValueError),
        ],
    ),
    Case(
        gated_rms_norm.OP,
        gated_rms_norm.gated_rms_norm,
        _inputs,
        shapes=[(2, 3, 12)],
        options={"group_size": [6, 4], "norm_before_gate": [False, True]},
        grads=("x", "gate", "weight"),
        label="gated_rms_norm in groups",
    ),
    Case(
        gated_rms_norm.OP,
        gated_rms_norm.gated_rms_norm,
        _mixed,
        shapes=[(5, 33)],
        options={"norm_before_gate": [False]},
        grads=("x", "gate", "weight"),
        dtypes=(torch.bfloat16, torch.float16),
        label="gated_rms_norm, x in fp32",
    ),
    Case(
        gated_rms_norm.OP,
        gated_rms_norm.gated_rms_norm,
        _wide_weight,
        shapes=[(5, 33)],
        grads=("x", "gate", "weight"),
        dtypes=(torch.bfloat16, torch.float16),
        label="gated_rms_norm, weight in fp32",
    ),
]
