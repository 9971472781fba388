from liger_kernel.ops import relu_squared
from liger_kernel.testing.properties import Case


def _inputs(shape, make):
    return {"x": make(*shape, scale=2.0)}


def _opchecks(tensors):
    x = tensors["x"]
    return [
        (relu_squared.relu_squared_forward_kernel, (x,)),
        (relu_squared.relu_squared_backward_kernel, (x, x)),
    ]


ROWS = [
    Case(
        relu_squared.OP,
        relu_squared.relu_squared,
        _inputs,
        shapes=[(3, 8), (1, 1), (7,), (5, 33), (0, 5), (2, 1, 3, 257), (3, 2100)],
        grads=("x",),
        opchecks=_opchecks,
    ),
]
