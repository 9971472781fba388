import torch

from liger_kernel.ops import _ce_batch, cross_entropy
from liger_kernel.testing.properties import Case


def _inputs(shape, make, ignore_index=-100, weighted=False, **_):
    *tokens, n_classes = shape
    target = make.ids(n_classes, *tokens)
    target = target.masked_fill(make.chance(0.3, *tokens), ignore_index)
    tensors = {"input": make(*shape, scale=3.0), "target": target}
    if weighted:
        tensors["weight"] = make(n_classes).abs() + 0.1
    return tensors


def _function(weighted=False, **kwargs):
    return cross_entropy.cross_entropy(**kwargs)


def _reference(weighted=False, **kwargs):
    return cross_entropy.reference(**kwargs)


def _opchecks(tensors):
    z, target = tensors["input"].view(-1, tensors["input"].shape[-1]), tensors["target"].view(-1)
    scales = torch.ones(2, device=z.device)
    launcher, options = _ce_batch.cross_entropy_rows, (-100, 0.1, 1e-3, 5.0)
    return [
        (launcher, (True, z, target, None, scales, None, True, True, *options)),
        (launcher, (True, z, target, None, scales, None, False, False, *options)),
    ]


def _bad(message, error=ValueError, target=None, **options):
    def call(make):
        labels = make.ids(4, 2) if target is None else target(make)
        return cross_entropy.cross_entropy(make(2, 4), labels, **options)

    return message, call, error


_BAD = [
    _bad("reduction must be one of", reduction="average"),
    _bad("label_smoothing must lie in", label_smoothing=1.5),
    _bad("softcap must be positive", softcap=0.0),
    _bad("one float for each of the 4 classes", weight=torch.ones(3)),
    _bad("one float for each of the 4 classes", weight=torch.ones(4, dtype=torch.int64)),
    _bad("target must have input's shape", target=lambda make: make.ids(4, 3)),
    _bad("target must hold class indices", target=lambda make: make(2)),
]

ROWS = [
    Case(
        cross_entropy.OP,
        _function,
        _inputs,
        shapes=[
            (3, 7),
            (5, 1),
            (4, 2),
            (7,),
            (6, 33),
            (0, 5),
            (2, 3, 48),
            (2, 2, 2, 3, 9),
            (3, 1000),
            (3, 40000),
        ],
        options={
            "reduction": ["mean", "sum", "none"],
            "softcap": [None, 5.0],
            "label_smoothing": [0.0, 0.1, 0.0, 0.0],
            "lse_square_scale": [0.0, 1e-2],
        },
        grads=("input",),
        reference=_reference,
        opchecks=_opchecks,
        bad=_BAD,
    ),
    Case(
        cross_entropy.OP,
        _function,
        _inputs,
        shapes=[(3, 7), (6, 33), (2, 2, 130), (2, 33001)],
        options={
            "reduction": ["mean", "none", "sum"],
            "label_smoothing": [0.0, 0.1, 1.0],
            "ignore_index": [0, -100],
            "return_z_loss": [True],
            "lse_square_scale": [1e-4],
            "weighted": [True],
        },
        grads=("input",),
        reference=_reference,
        label="cross_entropy with class weights",
    ),
]
