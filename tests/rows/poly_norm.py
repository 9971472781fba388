import torch

from liger_kernel.ops import poly_norm
from liger_kernel.testing.properties import Case


def _inputs(shape, make, **_):
    return {"x": make(*shape), "weight": 0.3 + 0.1 * make(3), "bias": 1 + make(1)}


def _mixed(shape, make, **_):
    wide = {"dtype": torch.float32}
    return {"x": make(*shape, scale=30.0), "weight": make(3, **wide), "bias": make(1)}


def _opchecks(tensors, eps=1e-6):
    x, w, b = tensors.values()
    _, rstd = poly_norm.poly_norm_forward_kernel(x, w, b, eps)
    return [
        (poly_norm.poly_norm_forward_kernel, (x, w, b, eps)),
        (poly_norm.poly_norm_backward_kernel, (x, x, w, b, rstd, True, True)),
        (poly_norm.poly_norm_backward_kernel, (x, x, w, b, rstd, False, True)),
    ]


ROWS = [
    Case(
        poly_norm.OP,
        poly_norm.poly_norm,
        _inputs,
        shapes=[(3, 8), (1, 1), (7,), (5, 33), (0, 5), (2, 1, 3, 65), (3, 1100), (2, 33000)],
        options={"eps": [1e-6]},
        grads=("x", "weight", "bias"),
        opchecks=_opchecks,
        bad=[
            (
                r"weight must have shape \[3\]",
                lambda make: poly_norm.poly_norm(make(2, 4), make(4), make(1)),
                ValueError,
            ),
            (
                r"bias must have shape \[1\]",
                lambda make: poly_norm.poly_norm(make(2, 4), make(3), make(3)),
                ValueError,
            ),
            (
                "got a scalar",
                lambda make: poly_norm.poly_norm(make(), make(3), make(1)),
                ValueError,
            ),
        ],
    ),
    Case(
        poly_norm.OP,
        poly_norm.poly_norm,
        _mixed,
        shapes=[(3, 8)],
        options={"eps": [1e-2]},
        grads=("x", "weight", "bias"),
        label="poly_norm mixed dtypes",  # x^3 does not fit in fp16
    ),
]
