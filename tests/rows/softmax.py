import torch

from liger_kernel import _env
from liger_kernel.ops import softmax
from liger_kernel.testing.properties import Case

# The interpreter truncates to bf16: it keeps a probability of 1 as 1 - 2^-8, which a nearly one-hot row cannot hide.
_SHARP = (torch.float32, torch.float16) if _env.interpreting() else None


def _inputs(shape, make):
    return {"x": make(*shape)}


def _peaked(shape, make):
    return {"x": make(*shape, scale=40.0)}


def _opchecks(tensors):
    y = softmax.softmax_forward_kernel(tensors["x"])
    return [
        (softmax.softmax_forward_kernel, (tensors["x"],)),
        (softmax.softmax_backward_kernel, (tensors["x"], y)),
    ]


ROWS = [
    Case(
        softmax.OP,
        softmax.softmax,
        _inputs,
        shapes=[(3, 8), (1, 1), (7,), (5, 33), (0, 5), (2, 1, 3, 257), (2, 1100), (2, 33001)],
        grads=("x",),
        opchecks=_opchecks,
    ),
    Case(
        softmax.OP,
        softmax.softmax,
        _peaked,
        shapes=[(3, 8), (2, 1100)],
        grads=("x",),
        dtypes=_SHARP or (torch.float32, torch.bfloat16, torch.float16),
        label="softmax of peaked rows",
    ),
]
