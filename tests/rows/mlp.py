from liger_kernel.ops import mlp
from liger_kernel.testing.properties import Case

# A shape is (F, *x).


def _inputs(shape, make, **_):
    f, *x = shape
    h = x[-1]
    gate, up = (make(f, h, scale=h**-0.5) for _ in range(2))
    return {
        "x": make(*x),
        "gate_weight": gate,
        "up_weight": up,
        "down_weight": make(h, f, scale=f**-0.5),
    }


def _opchecks(tensors, scale=0.5, down=1.5):
    operands = tuple(tensors.values())
    y, gate_up = mlp.mlp_forward_kernel(*operands, scale, down)
    backward = (y, *operands, gate_up, scale, down)
    return [
        (mlp.mlp_forward_kernel, (*operands, scale, down)),
        (mlp.mlp_backward_kernel, (*backward, True, True, True)),
        (mlp.mlp_backward_kernel, (*backward, False, True, False)),
    ]


def _bad(*shapes):
    return lambda make: mlp.mlp(*(make(*shape) for shape in shapes))


_BAD = [
    ("the weights must be", _bad((2, 3), (4, 3), (5, 3), (3, 4)), ValueError),
    ("the weights must be", _bad((2, 3), (4, 2), (4, 2), (3, 4)), ValueError),
    ("the weights must be", _bad((2, 3), (4, 3), (4, 3), (3, 5)), ValueError),
]

ROWS = [
    Case(
        mlp.OP,
        mlp.mlp,
        _inputs,
        shapes=[(5, 3, 4), (33, 2, 3, 20), (1, 1), (6, 0, 4), (8, 2, 1, 5, 16)],
        options={"gate_multiplier": [1.0, 0.7], "down_multiplier": [1.0, 1.3]},
        grads=("x", "gate_weight", "up_weight", "down_weight"),
        opchecks=_opchecks,
        bad=_BAD,
    ),
]
