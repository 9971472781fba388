import torch

from liger_kernel.ops import sparsemax
from liger_kernel.testing.properties import Case


def _inputs(shape, make, **_):
    return {"x": make(*shape)}


def _steep(shape, make):
    """Values that Newton's steps leave one by one: gaps that double."""
    n = shape[-1]
    spread = -torch.logspace(0, -6, n, 10).flip(0) + 1e-3 * make(*shape, dtype=torch.float32).cpu()
    return {"x": spread.to(make.dtype).to(make.device)}


def _reference(x, dim=-1):
    return sparsemax.reference(x.movedim(dim, -1)).movedim(-1, dim)


def _opchecks(tensors, **_):
    y = sparsemax.sparsemax_forward_kernel(tensors["x"])
    return [
        (sparsemax.sparsemax_forward_kernel, (tensors["x"],)),
        (sparsemax.sparsemax_backward_kernel, (tensors["x"], y)),
    ]


ROWS = [
    Case(
        sparsemax.OP,
        sparsemax.sparsemax,
        _inputs,
        shapes=[(3, 8), (1, 1), (7,), (5, 33), (0, 5), (2, 1, 3, 257), (2, 1100), (2, 33000)],
        grads=("x",),
        reference=_reference,
        opchecks=_opchecks,
        bad=[
            (
                "dimension 0 of x .* is empty",
                lambda make: sparsemax.sparsemax(make(0, 3), 0),
                ValueError,
            ),
            ("got a scalar", lambda make: sparsemax.sparsemax(make()), ValueError),
        ],
    ),
    Case(
        sparsemax.OP,
        sparsemax.sparsemax,
        _inputs,
        shapes=[(2, 5, 3)],
        options={"dim": [0, -2]},
        grads=("x",),
        reference=_reference,
        label="sparsemax along other dimensions",
    ),
    Case(
        sparsemax.OP,
        sparsemax.sparsemax,
        _steep,
        shapes=[(2, 65)],
        grads=("x",),
        label="sparsemax of steep rows",
    ),
]
