from liger_kernel.ops import _pair_kernels, jsd
from liger_kernel.testing.properties import Case


def _inputs(shape, make, beta=0.5, labelled=False, ignore_index=-100, **_):
    """Distributions with entries of probability 0 on either side where the divergence stays finite."""
    log_q, log_p = (make(*shape, scale=3.0).float().log_softmax(-1) for _ in range(2))
    some = make.chance(0.3, *shape)
    if beta < 1.0:
        log_p = log_p.masked_fill(some, float("-inf"))
    if beta > 0.0:
        log_q = log_q.masked_fill(make.chance(0.2, *shape) & ~some, float("-inf"))
    tensors = {"log_q": log_q.to(make.dtype), "log_p": log_p.to(make.dtype)}
    if labelled:
        labels = make.ids(50, *shape[:-1])
        labels = labels.masked_fill(make.chance(0.4, *shape[:-1]), ignore_index)
        tensors["shift_labels"] = labels
    return tensors


def _function(labelled=False, **kwargs):
    return jsd.jsd(**kwargs)


def _reference(labelled=False, **kwargs):
    return jsd.reference(**kwargs)


def _opchecks(tensors):
    x, y, labels = tensors.values()
    scale = x.new_full((), 0.5)
    return [
        (_pair_kernels.pair_forward, (x, y, labels, scale, -100, "jsd", 0.5, True)),
        (_pair_kernels.pair_backward, (x, y, labels, scale, None, -100, "jsd", 0.5)),
    ]


_BAD = [
    ("beta must lie in", lambda make: jsd.jsd(make(2, 4), make(2, 4), beta=1.5), ValueError),
    ("same shape", lambda make: jsd.jsd(make(2, 4), make(3, 4)), ValueError),
    (
        "each of the 2 rows",
        lambda make: jsd.jsd(make(2, 4), make(2, 4), make.ids(4, 3)),
        ValueError,
    ),
    (
        "int64 or int32 label",
        lambda make: jsd.jsd(make(2, 4), make(2, 4), make(2)),
        ValueError,
    ),
]

ROWS = [
    Case(
        jsd.OP,
        _function,
        _inputs,
        shapes=[(3, 7), (5, 1), (0, 5), (2, 0), (2, 3, 48), (2, 1, 2, 3, 9), (2, 5003)],
        options={
            "beta": [0.5, 0.0, 1.0, 0.1],
            "labelled": [True, False],
            "ignore_index": [-100, 7, 7],
        },
        grads=("log_q",),
        reference=_reference,
        opchecks=_opchecks,
        bad=_BAD,
    ),
]
