import torch

from liger_kernel.ops import embedding
from liger_kernel.testing.properties import Case

# A shape is (V, D, *ids).


def _inputs(shape, make, padding_idx=None, skew=False):
    v, d, *ids = shape
    drawn = make.ids(v, *ids)
    if skew:  # one id fills most of the sorted order, over several cuts
        drawn = torch.where(make.chance(0.8, *ids), v // 2, drawn)
    return {"ids": drawn, "weight": make(v, d)}


def _call(function):
    return lambda ids, weight, padding_idx=None, skew=False: function(ids, weight, padding_idx)


def _opchecks(tensors):
    ids, weight = tensors["ids"], tensors["weight"]
    dy = weight[ids]
    return [
        (embedding.embedding_forward_kernel, (ids, weight, -1)),
        (embedding.embedding_backward_kernel, (dy, ids, weight.shape[0], 1)),
    ]


def _bad(ids, *shape, **options):
    return lambda make: embedding.embedding(
        torch.tensor(ids, device=make.device), make(*shape), **options
    )


_BAD = [
    ("int64 or int32", _bad([1.0], 3, 2), ValueError),
    ("weight must be \\[V, D\\]", _bad([1], 3), ValueError),
    ("padding_idx must lie within", _bad([1], 3, 2, padding_idx=3), ValueError),
]

ROWS = [
    Case(
        embedding.OP,
        _call(embedding.embedding),
        _inputs,
        shapes=[(5, 4, 3), (7, 33, 2, 3), (3, 1, 1), (4, 6, 0), (2, 2050, 2)],
        options={"padding_idx": [None, 1, -1]},
        grads=("weight",),
        reference=_call(embedding.reference),
        opchecks=_opchecks,
        bad=_BAD,
    ),
    Case(
        embedding.OP,
        _call(embedding.embedding),
        _inputs,
        shapes=[(3, 5, 66)],
        options={"skew": [True]},
        grads=("weight",),
        reference=_call(embedding.reference),
        label="embedding runs",
    ),
]
