import torch

from liger_kernel import _env
from liger_kernel.ops import _gated, swiglu
from liger_kernel.testing.properties import Case

# The interpreter truncates where act(gate) is rounded to bf16, and here up's fp32 leaves that in plain sight.
_NARROW = (torch.float16,) if _env.interpreting() else (torch.bfloat16, torch.float16)


def _pair(shape, make, **_):
    return {"gate": make(*shape, scale=2.0), "up": make(*shape)}


def _narrow_gate(shape, make, **_):
    return {"gate": make(*shape), "up": make(*shape, dtype=torch.float32)}


def _narrow_up(shape, make, **_):
    return {"gate": make(*shape, dtype=torch.float32), "up": make(*shape)}


def _packed(shape, make, **_):
    return {"gate_up": make(*shape, scale=2.0)}


def _opchecks(tensors, gate_multiplier=1.0, down_multiplier=1.0):
    recipe = ("silu", gate_multiplier, down_multiplier)
    pair = tensors["gate"], tensors["up"]
    return [
        (_gated.gated_forward, (*pair, *recipe)),
        (_gated.gated_backward, (tensors["up"], *pair, *recipe, True, True)),
        (_gated.gated_backward, (tensors["up"], *pair, *recipe, False, True)),
    ]


def _packed_opchecks(tensors, gate_multiplier=1.0, down_multiplier=1.0):
    recipe = ("silu", gate_multiplier, down_multiplier)
    gate, up = _gated.halves(tensors["gate_up"])
    return [
        (_gated.gated_forward, (gate, up, *recipe)),
        (_gated.gated_packed_backward, (up, tensors["gate_up"], *recipe)),
    ]


_OPTIONS = {"gate_multiplier": [1.0, 0.75], "down_multiplier": [1.0, 1.5]}

ROWS = [
    Case(
        swiglu.OP,
        swiglu.swiglu,
        _pair,
        shapes=[
            (3, 8),
            (1, 1),
            (7,),
            (5, 33),
            (0, 5),
            (2, 0),
            (2, 3, 257),
            (2, 1, 2, 3, 64),
            (3, 2100),
        ],
        options=_OPTIONS,
        grads=("gate", "up"),
        opchecks=_opchecks,
        bad=[("same shape", lambda make: swiglu.swiglu(make(2, 4), make(2, 3)), ValueError)],
    ),
    Case(
        swiglu.OP,
        swiglu.swiglu,
        _narrow_gate,
        shapes=[(3, 8), (5, 33)],
        options={"gate_multiplier": [1.0, 0.75]},
        grads=("gate", "up"),
        dtypes=_NARROW,
        label="swiglu, up in fp32",
    ),
    Case(
        swiglu.OP,
        swiglu.swiglu,
        _narrow_up,
        shapes=[(3, 8), (5, 33)],
        grads=("gate", "up"),
        label="swiglu, gate in fp32",
    ),
    Case(
        swiglu.OP_PACKED,
        swiglu.swiglu_packed,
        _packed,
        shapes=[
            (3, 16),
            (1, 2),
            (14,),
            (5, 66),
            (0, 6),
            (2, 0),
            (2, 3, 514),
            (2, 1, 2, 3, 32),
            (3, 4200),
        ],
        options=_OPTIONS,
        grads=("gate_up",),
        opchecks=_packed_opchecks,
        bad=[
            (
                "last dimension must be even",
                lambda make: swiglu.swiglu_packed(make(2, 5)),
                ValueError,
            )
        ],
    ),
]
