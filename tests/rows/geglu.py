import torch

from liger_kernel import _env
from liger_kernel.ops import _gated, geglu
from liger_kernel.testing.properties import Case

# The interpreter truncates where act(gate) is rounded to bf16, and here up's fp32 leaves that in plain sight.
_NARROW = (torch.float16,) if _env.interpreting() else (torch.bfloat16, torch.float16)


def _pair(shape, make, **_):
    return {"gate": make(*shape, scale=2.0), "up": make(*shape)}


def _narrow_gate(shape, make, **_):
    return {"gate": make(*shape), "up": make(*shape, dtype=torch.float32)}


def _packed(shape, make, **_):
    return {"gate_up": make(*shape, scale=2.0)}


def _opchecks(tensors, approximate="tanh"):
    gate, up = tensors["gate"], tensors["up"]
    recipe = ("gelu_tanh" if approximate == "tanh" else "gelu", 1.0, 1.0)
    return [
        (_gated.gated_forward, (gate, up, *recipe)),
        (_gated.gated_backward, (up, gate, up, *recipe, True, True)),
    ]


_OPTIONS = {"approximate": ["tanh", "none"]}

ROWS = [
    Case(
        geglu.OP,
        geglu.geglu,
        _pair,
        shapes=[(3, 8), (1, 1), (7,), (5, 33), (0, 5), (2, 3, 257), (2, 1, 2, 3, 64), (3, 2100)],
        options=_OPTIONS,
        grads=("gate", "up"),
        opchecks=_opchecks,
        bad=[
            ("same shape", lambda make: geglu.geglu(make(2, 4), make(2, 3)), ValueError),
            (
                "approximate must be one of",
                lambda make: geglu.geglu(make(2), make(2), "tan"),
                ValueError,
            ),
        ],
    ),
    Case(
        geglu.OP,
        geglu.geglu,
        _narrow_gate,
        shapes=[(3, 8), (5, 33)],
        options=_OPTIONS,
        grads=("gate", "up"),
        dtypes=_NARROW,
        label="geglu, up in fp32",
    ),
    Case(
        geglu.OP_PACKED,
        geglu.geglu_packed,
        _packed,
        shapes=[(3, 16), (1, 2), (14,), (5, 66), (0, 6), (2, 3, 514), (2, 1, 2, 3, 32), (3, 4200)],
        options=_OPTIONS,
        grads=("gate_up",),
        bad=[
            ("last dimension must be even", lambda make: geglu.geglu_packed(make(2, 5)), ValueError)
        ],
    ),
]
