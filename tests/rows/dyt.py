import torch

from liger_kernel.ops import dyt
from liger_kernel.testing.properties import Case


def _inputs(shape, make):
    gamma = 1 + 0.2 * make(shape[-1])
    return {
        "x": make(*shape, scale=2.0),
        "alpha": 0.5 + 0.1 * make(1),
        "gamma": gamma,
        "beta": make(shape[-1]),
    }


def _no_beta(shape, make):
    tensors = _inputs(shape, make)
    del tensors["beta"]
    return tensors


def _mixed(shape, make):
    wide = {"dtype": torch.float32}
    x, alpha = make(*shape), 0.5 + 0.1 * make(**wide)
    return {
        "x": x,
        "alpha": alpha,
        "gamma": make(shape[-1], **wide),
        "beta": make(shape[-1], **wide),
    }


def _opchecks(tensors):
    x, *params = tensors.values()
    return [
        (dyt.dyt_forward_kernel, (x, *params)),
        (dyt.dyt_backward_kernel, (x, x, *params, True, True)),
        (dyt.dyt_backward_kernel, (x, x, *params, True, False)),
    ]


ROWS = [
    Case(
        dyt.OP,
        dyt.dyt,
        _inputs,
        shapes=[(3, 8), (1, 1), (7,), (5, 33), (0, 5), (2, 0), (2, 1, 3, 65), (3, 1100)],
        grads=("x", "alpha", "gamma", "beta"),
        opchecks=_opchecks,
        bad=[
            (
                "alpha must hold one value",
                lambda make: dyt.dyt(make(2, 4), make(2), make(4)),
                ValueError,
            ),
            (
                "gamma must have the shape",
                lambda make: dyt.dyt(make(2, 4), make(1), make(3)),
                ValueError,
            ),
            (
                "beta must have the shape",
                lambda make: dyt.dyt(make(2, 4), make(1), make(4), make(1)),
                ValueError,
            ),
        ],
    ),
    Case(
        dyt.OP,
        dyt.dyt,
        _no_beta,
        shapes=[(3, 8)],
        grads=("x", "alpha", "gamma"),
        reference=lambda x, alpha, gamma: dyt.reference(x, alpha, gamma, None),
        label="dyt without beta",
    ),
    Case(
        dyt.OP,
        dyt.dyt,
        _mixed,
        shapes=[(3, 8)],
        grads=("x", "alpha", "gamma", "beta"),
        label="dyt mixed dtypes",
    ),
]
