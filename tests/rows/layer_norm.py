import torch

from liger_kernel.ops import layer_norm
from liger_kernel.testing.properties import Case


def _inputs(shape, make, **_):
    return {
        "x": 3 + make(*shape),
        "weight": 1 + 0.2 * make(shape[-1]),
        "bias": 0.2 * make(shape[-1]),
    }


def _mixed(shape, make, **_):
    fp32 = {"dtype": torch.float32}
    return {"x": make(*shape), "weight": make(shape[-1], **fp32), "bias": make(shape[-1], **fp32)}


def _opchecks(tensors, eps=1e-6):
    x, w, b = tensors.values()
    _, mean, rstd = layer_norm.layer_norm_forward_kernel(x, w, b, eps)
    backward = layer_norm.layer_norm_backward_kernel
    return [
        (layer_norm.layer_norm_forward_kernel, (x, w, b, eps)),
        (backward, (x, x, w, b, mean, rstd, True, True, True)),
        (backward, (x, x, w, None, mean, rstd, False, True, False)),
    ]


ROWS = [
    Case(
        layer_norm.OP,
        layer_norm.layer_norm,
        _inputs,
        shapes=[(2, 3, 8), (1, 1), (7,), (0, 5), (3, 257)],
        grads=("x", "weight", "bias"),
        opchecks=_opchecks,
        bad=[
            (
                "weight must have shape",
                lambda make: layer_norm.layer_norm(make(2, 4), make(3)),
                ValueError,
            ),
            (
                "bias must have shape",
                lambda make: layer_norm.layer_norm(make(2, 4), make(4), make(3)),
                ValueError,
            ),
        ],
    ),
    Case(
        layer_norm.OP,
        layer_norm.layer_norm,
        _mixed,
        shapes=[(5, 33), (1, 33000)],
        options={"eps": [1e-2]},
        grads=("x", "weight", "bias"),
        dtypes=(torch.bfloat16, torch.float16),
        label="layer_norm mixed dtypes",
    ),
    Case(
        layer_norm.OP,
        lambda x, weight: layer_norm.layer_norm(x, weight),
        lambda shape, make: {"x": make(*shape), "weight": make(shape[-1])},
        shapes=[(4, 129)],
        grads=("x", "weight"),
        reference=lambda x, weight: layer_norm.reference(x, weight, None),
        label="layer_norm without bias",
    ),
    Case(
        layer_norm.OP,
        lambda x: layer_norm.layer_norm(x, None),
        lambda shape, make: {"x": make(*shape)},
        shapes=[(4, 9)],
        grads=("x",),
        reference=lambda x: layer_norm.reference(x, None, None),
        label="layer_norm without weight",
    ),
]
