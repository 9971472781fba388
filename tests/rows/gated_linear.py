from liger_kernel.ops import gated_linear
from liger_kernel.testing.properties import Case

# A shape is (H, *gate).


def _pair(shape, make, biased=False, **_):
    h, *x = shape
    f = x[-1]
    found = {"gate": make(*x, scale=2.0), "up": make(*x)}
    found["weight"] = make(h, f, scale=max(f, 1) ** -0.5)
    return found | ({"bias": make(h)} if biased else {})


def _packed(shape, make, **_):
    h, *x = shape
    f = x[-1] // 2
    return {"gate": make(*x, scale=2.0), "weight": make(h, f, scale=max(f, 1) ** -0.5)}


def _called(function):
    def call(
        gate, weight, up=None, bias=None, biased=False, activation="silu", gate_multiplier=1.0
    ):
        return function(gate, up, weight, bias, activation, gate_multiplier)

    return call


def _opchecks(tensors, activation="silu", gate_multiplier=1.0, **_):
    gate, up, weight = tensors["gate"], tensors.get("up"), tensors["weight"]
    recipe = (activation, gate_multiplier)
    dy = gated_linear.gated_linear_forward_kernel(gate, up, weight, None, *recipe)
    backward = (dy, gate, up, weight, *recipe)
    return [
        (
            gated_linear.gated_linear_forward_kernel,
            (gate, up, weight, tensors.get("bias"), *recipe),
        ),
        (gated_linear.gated_linear_backward_kernel, (*backward, True, True)),
        (gated_linear.gated_linear_backward_kernel, (*backward, False, True)),
        (gated_linear.gated_linear_backward_kernel, (*backward, True, False)),
    ]


def _bad(*shapes, **options):
    return lambda make: gated_linear.gated_linear(
        *(None if shape is None else make(*shape) for shape in shapes), **options
    )


_ACTIVATIONS = [*gated_linear.ACTIVATIONS]

ROWS = [
    Case(
        gated_linear.OP,
        _called(gated_linear.gated_linear),
        _pair,
        shapes=[
            (5, 3, 4),
            (3, 2, 3, 20),
            (1, 1),
            (6, 0, 4),
            (4, 7),
            (8, 2, 1, 5, 16),
            (16, 3, 257),
        ],
        options={"activation": _ACTIVATIONS, "gate_multiplier": [1.0, 0.7]},
        grads=("gate", "up", "weight"),
        reference=_called(gated_linear.reference),
        opchecks=_opchecks,
        bad=[
            ("same shape", _bad((2, 4), (2, 3), (5, 4)), ValueError),
            ("the weight must be", _bad((2, 4), (2, 4), (4, 5)), ValueError),
            ("the weight must be", _bad((2, 4), (2, 4), (5, 4), (4,)), ValueError),
            ("activation must be", _bad((2, 4), (2, 4), (5, 4), activation="tanh"), ValueError),
        ],
    ),
    Case(
        gated_linear.OP,
        _called(gated_linear.gated_linear),
        _pair,
        shapes=[(5, 3, 4), (3, 2, 3, 20), (1, 1), (6, 0, 4)],
        options={"activation": ["silu", "gelu"], "biased": [True]},
        grads=("gate", "up", "weight", "bias"),
        reference=_called(gated_linear.reference),
        label="gated_linear, bias",
    ),
    Case(
        gated_linear.OP,
        _called(gated_linear.gated_linear),
        _packed,
        shapes=[(5, 3, 4), (3, 2, 3, 20), (1, 2), (6, 0, 4), (4, 14), (16, 3, 130)],
        options={"activation": _ACTIVATIONS, "gate_multiplier": [1.0, 0.7]},
        grads=("gate", "weight"),
        reference=_called(gated_linear.reference),
        opchecks=_opchecks,
        bad=[("last dimension must be even", _bad((2, 5), None, (3, 2)), ValueError)],
        label="gated_linear, packed",
    ),
]
