import torch
from torch.nn.functional import linear

from liger_kernel.ops import low_rank_update as op
from liger_kernel.testing.properties import Case

# A shape is (O, r, *x).
_SHAPES = [(5, 2, 3, 4), (3, 1, 1), (9, 17, 2, 2, 129), (4, 3, 0, 5), (130, 2, 65, 6)]


def _seed(make):
    return torch.tensor([1 << 40 | 12345], device=make.device)


def _inputs(shape, make, **_):
    out, rank, *x = shape
    return {
        "seed": _seed(make),
        "y": make(*x[:-1], out),
        "x": make(*x),
        "A": make(rank, x[-1], scale=x[-1] ** -0.5),
        "B": make(out, rank, scale=rank**-0.5),
    }


def _layer(shape, make, **_):
    """With the layer that LoRA updates, whose result is y; factors in fp32, as PEFT has them."""
    out, rank, *x = shape
    return {
        "seed": _seed(make),
        "x": make(*x),
        "weight": make(out, x[-1], scale=x[-1] ** -0.5),
        "A": make(rank, x[-1], dtype=torch.float32, scale=x[-1] ** -0.5),
        "B": make(out, rank, dtype=torch.float32, scale=rank**-0.5),
    }


def _reference(seed, x, weight, A, B, scale, dropout):
    return op.reference(linear(x, weight), x, A, B, scale, dropout, seed)


def _around(seed, x, weight, A, B, scale, dropout):
    if not op.OP.uses_kernels((x, x, A, B, scale)):
        return _reference(seed, x, weight, A, B, scale, dropout)
    x, h = op.low_rank_down(x, A, dropout, seed)
    return op.low_rank_up(linear(x, weight), h, B, scale)


def _opchecks(tensors, scale=0.5, dropped=16384):
    seed, y, x, A, B = tensors.values()
    h = op.low_rank_down_kernel(x, A, scale)
    return [
        (op.low_rank_down_kernel, (x, A, scale, seed, dropped)),
        (op.low_rank_up_kernel, (y, h, B, scale, y.dtype)),
        (op.low_rank_up_kernel, (None, h, B, scale, torch.bfloat16, seed, dropped)),
        (op.low_rank_columns_kernel, (x, h, scale, A.dtype, True, seed, dropped)),
        (op.low_rank_columns_kernel, (y, h, scale, B.dtype, False)),
    ]


def _bad(*shapes, **options):
    return lambda make: op.low_rank_update(*(make(*shape) for shape in shapes), **options)


ROWS = [
    Case(
        op.OP,
        op.low_rank_update,
        _inputs,
        shapes=_SHAPES,
        options={"scale": [2.0, 0.3], "dropout": [0.0, 0.25]},
        grads=("y", "x", "A", "B"),
        opchecks=_opchecks,
        bad=[
            ("must fit each other", _bad((2, 5), (2, 4), (3, 4), (3, 5)), ValueError),
            ("must fit each other", _bad((3, 5), (2, 4), (3, 4), (5, 3)), ValueError),
            ("dropout must be in", _bad((2, 5), (2, 4), (3, 4), (5, 3), dropout=1.0), ValueError),
        ],
    ),
    Case(
        op.OP,
        _around,
        _layer,
        shapes=[(5, 2, 3, 4)],
        options={"scale": [0.5], "dropout": [0.25, 0.0]},
        grads=("x", "weight", "A", "B"),
        reference=_reference,
        label="low_rank_update around a layer",
    ),
]
