from liger_kernel.ops import reglu
from liger_kernel.testing.properties import Case


def _pair(shape, make):
    return {"gate": make(*shape), "up": make(*shape)}


def _packed(shape, make):
    return {"gate_up": make(*shape)}


ROWS = [
    Case(
        reglu.OP,
        reglu.reglu,
        _pair,
        shapes=[(3, 8), (7,), (0, 5), (5, 2100)],
        grads=("gate", "up"),
        bad=[("same shape", lambda make: reglu.reglu(make(2, 4), make(2, 3)), ValueError)],
    ),
    Case(
        reglu.OP_PACKED,
        reglu.reglu_packed,
        _packed,
        shapes=[(3, 16), (14,), (0, 6), (2, 3, 66)],
        grads=("gate_up",),
        bad=[("must be even", lambda make: reglu.reglu_packed(make(2, 5)), ValueError)],
    ),
]
