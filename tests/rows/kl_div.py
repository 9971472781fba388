import torch

from liger_kernel.ops import _pair_kernels, kl_div
from liger_kernel.testing.properties import Case


def _inputs(shape, make, log_target=False, **_):
    """Distributions with entries of probability 0 on either side and on both."""
    y_pred, y_true = (make(*shape, scale=3.0).float().log_softmax(-1) for _ in range(2))
    y_true = y_true.masked_fill(make.chance(0.2, *shape), float("-inf"))
    y_true = y_true if log_target else y_true.exp()
    return {"y_pred": y_pred.to(make.dtype), "y_true": y_true.to(make.dtype)}


def _opchecks(tensors):
    x, y = tensors["y_pred"], tensors["y_true"]
    scale, up = x.new_full((), 0.5), torch.ones_like(x)
    return [
        (_pair_kernels.pair_forward, (x, y, None, scale, 0, "kl", 1e-10, True)),
        (_pair_kernels.pair_forward, (x, y, None, None, 0, "kl", 1e-10, False)),
        (_pair_kernels.pair_backward, (x, y, None, None, up, 0, "kl", 1e-10)),
    ]


_BAD = [
    (
        "reduction must be one of",
        lambda make: kl_div.kl_div(make(2, 4), make(2, 4), "avg"),
        ValueError,
    ),
    ("same shape", lambda make: kl_div.kl_div(make(2, 4), make(2, 5)), ValueError),
    (
        "must be floating-point",
        lambda make: kl_div.kl_div(make(2, 4), make.ids(3, 2, 4)),
        ValueError,
    ),
    (
        "eps must not be negative",
        lambda make: kl_div.kl_div(make(4), make(4), eps=-1.0),
        ValueError,
    ),
]

ROWS = [
    Case(
        kl_div.OP,
        kl_div.kl_div,
        _inputs,
        shapes=[(3, 7), (5, 1), (7,), (0, 5), (2, 0), (2, 3, 48), (2, 1, 2, 3, 9), (2, 5003)],
        options={
            "reduction": ["batchmean", "none", "mean", "sum"],
            "log_target": [False, True, True],
            "eps": [1e-10, 0.01],
        },
        grads=("y_pred",),
        opchecks=_opchecks,
        bad=_BAD,
    ),
]
