from liger_kernel.ops import _pair_kernels, tvd
from liger_kernel.testing.properties import Case


def _inputs(shape, make, labelled=False, ignore_index=-100, **_):
    p, q = (make(*shape, scale=2.0).float().softmax(-1).to(make.dtype) for _ in range(2))
    tensors = {"p": p, "q": q}
    if labelled:
        labels = make.ids(50, *shape[:-1])
        labels = labels.masked_fill(make.chance(0.4, *shape[:-1]), ignore_index)
        tensors["shift_labels"] = labels
    return tensors


def _function(labelled=False, **kwargs):
    return tvd.tvd(**kwargs)


def _reference(labelled=False, **kwargs):
    return tvd.reference(**kwargs)


def _opchecks(tensors):
    p, q, labels = tensors.values()
    scale = p.new_full((), 0.5)
    return [
        (_pair_kernels.pair_forward, (p, q, labels, None, -100, "tvd", 0.0, False)),
        (_pair_kernels.pair_backward, (p, q, labels, scale, None, -100, "tvd", 0.0)),
    ]


_BAD = [
    (
        "reduction must be one of",
        lambda make: tvd.tvd(make(2, 4), make(2, 4), reduction="avg"),
        ValueError,
    ),
    ("same shape", lambda make: tvd.tvd(make(2, 4), make(2, 5)), ValueError),
    (
        "each of the 2 rows",
        lambda make: tvd.tvd(make(2, 4), make(2, 4), make.ids(4, 1)),
        ValueError,
    ),
]

ROWS = [
    Case(
        tvd.OP,
        _function,
        _inputs,
        shapes=[(3, 7), (0, 5), (2, 0), (2, 3, 48), (2, 1, 2, 3, 9), (2, 5003)],
        options={
            "reduction": ["batchmean", "none", "mean", "sum"],
            "labelled": [True, True, False],
            "ignore_index": [-100, 7],
        },
        grads=("p",),
        reference=_reference,
        opchecks=_opchecks,
        bad=_BAD,
    ),
]
