import torch

from liger_kernel.ops import group_norm
from liger_kernel.testing.properties import Case


def _inputs(shape, make, **_):
    channels = shape[1]
    return {"x": make(*shape), "weight": 1 + 0.2 * make(channels), "bias": make(channels)}


def _offset(shape, make, **_):
    return {"x": 1000 + make(*shape), "weight": 1 + 0.2 * make(shape[1]), "bias": make(shape[1])}


def _mixed(shape, make, **_):
    wide = {"dtype": torch.float32}
    return {"x": make(*shape), "weight": make(shape[1], **wide), "bias": make(shape[1])}


def _plain(shape, make, **_):
    return {"x": make(*shape)}


def _call(x, num_groups, weight=None, bias=None, eps=1e-6):
    return group_norm.group_norm(x, num_groups, weight, bias, eps)


def _reference(x, num_groups, weight=None, bias=None, eps=1e-6):
    return group_norm.reference(x, num_groups, weight, bias, eps)


def _opchecks(tensors, num_groups=2, eps=1e-6):
    x, w, b = tensors.values()
    _, stats = group_norm.group_norm_forward_kernel(x, num_groups, w, b, eps)
    backward = (x, x, num_groups, w, stats)
    return [
        (group_norm.group_norm_forward_kernel, (x, num_groups, w, b, eps)),
        (group_norm.group_norm_backward_kernel, (*backward, True, True)),
        (group_norm.group_norm_backward_kernel, (*backward, True, False)),
    ]


ROWS = [
    Case(
        group_norm.OP,
        _call,
        _inputs,
        shapes=[
            (1, 4, 3),
            (1, 2, 1),
            (3, 6),
            (0, 4, 3),
            (1, 6, 2, 3, 5),
        ],
        options={"num_groups": [2]},
        grads=("x", "weight", "bias"),
        reference=_reference,
        opchecks=_opchecks,
        bad=[
            (r"must be \[B, C, \*\]", lambda make: group_norm.group_norm(make(4), 2), ValueError),
            (
                "must divide the 4 channels",
                lambda make: group_norm.group_norm(make(2, 4, 3), 3),
                ValueError,
            ),
            (
                "weight must have shape",
                lambda make: group_norm.group_norm(make(2, 4, 3), 2, make(3)),
                ValueError,
            ),
            (
                "bias must have shape",
                lambda make: group_norm.group_norm(make(2, 4, 3), 2, make(4), make(4, 1)),
                ValueError,
            ),
            (
                "num_channels = 3",
                lambda make: group_norm.LigerGroupNormFunction.apply(
                    make(2, 4, 3), make(4), make(4), 3, 1, 1e-6
                ),
                ValueError,
            ),
        ],
    ),
    Case(
        group_norm.OP,
        _call,
        _inputs,
        shapes=[
            (1, 4, 5),
            (1, 4, 129, 65),  # held in registers by forward, not by backward
            (4, 18, 10, 210),  # many groups: a program for each
            (1, 300, 129),  # few, of many channels: each one spread over programs
        ],
        options={"num_groups": [2]},
        grads=("x", "weight", "bias"),
        reference=_reference,
        dtypes=(torch.bfloat16,),
        label="group_norm of large groups",
    ),
    Case(
        group_norm.OP,
        _call,
        _offset,
        shapes=[(1, 4, 5), (1, 2, 33000)],
        options={"num_groups": [2], "eps": [1e-3]},
        grads=("x", "weight", "bias"),
        reference=_reference,
        dtypes=(torch.float32,),
        label="group_norm far from zero",
    ),
    Case(
        group_norm.OP,
        _call,
        _mixed,
        shapes=[(1, 4, 5)],
        options={"num_groups": [1]},
        grads=("x", "weight", "bias"),
        reference=_reference,
        label="group_norm mixed dtypes",
    ),
    Case(
        group_norm.OP,
        _call,
        _plain,
        shapes=[(1, 4, 5)],
        options={"num_groups": [2]},
        grads=("x",),
        reference=_reference,
        label="group_norm without parameters",
    ),
]
