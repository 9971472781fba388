import torch

from liger_kernel.ops import rms_norm
from liger_kernel.testing.properties import Case


def _inputs(shape, make, **_):
    return {"x": make(*shape), "weight": 1 + 0.2 * make(shape[-1])}


def _mixed(shape, make, **_):
    return {"x": make(*shape), "weight": make(shape[-1], dtype=torch.float32)}


def _wide_input(shape, make, **_):
    return {"x": make(*shape, dtype=torch.float32), "weight": make(shape[-1])}


def _no_weight(shape, make, **_):
    return {"x": make(*shape)}


def _opchecks(tensors, eps=1e-6, offset=0.0, casting_mode="llama"):
    x, w = tensors["x"], tensors["weight"]
    _, rstd = rms_norm.rms_norm_forward_kernel(x, w, eps, offset, casting_mode)
    backward = (x, x, w, rstd, offset, casting_mode, True, True)
    return [
        (rms_norm.rms_norm_forward_kernel, (x, w, eps, offset, casting_mode)),
        (rms_norm.rms_norm_backward_kernel, backward),
    ]


_OPTIONS = {"casting_mode": ["llama", "gemma", "none"], "offset": [0.0, 1.0], "eps": [1e-6, 1e-2]}

ROWS = [
    Case(
        rms_norm.OP,
        rms_norm.rms_norm,
        _inputs,
        shapes=[
            (3, 8),
            (1, 1),
            (7,),
            (5, 33),
            (0, 5),
            (2, 3, 257),
            (2, 1, 2, 3, 64),
            (3, 1100),
            (2, 33000),
        ],
        options=_OPTIONS,
        grads=("x", "weight"),
        opchecks=_opchecks,
        bad=[
            (
                "weight must have shape",
                lambda make: rms_norm.rms_norm(make(2, 4), make(3)),
                ValueError,
            ),
            (
                "casting_mode must be one of",
                lambda make: rms_norm.rms_norm(make(2, 4), make(4), casting_mode="lama"),
                ValueError,
            ),
        ],
    ),
    Case(
        rms_norm.OP,
        rms_norm.rms_norm,
        _mixed,
        shapes=[(3, 8), (5, 33)],
        options={"casting_mode": ["llama", "gemma", "t5"]},
        grads=("x", "weight"),
        label="rms_norm mixed dtypes",
    ),
    Case(
        rms_norm.OP,
        rms_norm.rms_norm,
        _wide_input,
        shapes=[(5, 33)],
        options={"casting_mode": ["t5"]},
        grads=("x", "weight"),
        label="rms_norm of fp32 with a narrow weight",
    ),
    Case(
        rms_norm.OP,
        lambda x, **options: rms_norm.rms_norm(x, None, **options),
        _no_weight,
        shapes=[(3, 8), (4, 129)],
        options={"casting_mode": ["llama", "gemma"]},
        grads=("x",),
        reference=lambda x, **options: rms_norm.reference(x, None, **options),
        label="rms_norm without weight",
    ),
    Case(
        rms_norm.OP,
        rms_norm.rms_norm,
        _inputs,
        shapes=[(513, 3)],
        options={"casting_mode": ["llama", "gemma"], "offset": [0.0, 1.0]},
        grads=("x", "weight"),
        label="rms_norm of many rows",
    ),
]
