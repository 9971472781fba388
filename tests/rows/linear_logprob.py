import torch

from liger_kernel.ops import linear_logprob as lp
from liger_kernel.testing.properties import Case


def _inputs(shape, make, masked=0.4, **_):
    *tokens, width, vocab = shape
    targets = make.ids(vocab, *tokens)
    targets[make.chance(masked, *tokens)] = -100
    weight = make(vocab, width, scale=width**-0.5)
    return {
        "hidden": make(*tokens, width),
        "weight": weight,
        "bias": make(vocab),
        "targets": targets,
    }


def _function(masked=0.4, ids=None, **kwargs):
    return lp.linear_logprob(selected_token_ids=_ids(kwargs, ids), **kwargs)


def _reference(masked=0.4, ids=None, **kwargs):
    return lp.reference(selected_token_ids=_ids(kwargs, ids), **kwargs)


def _ids(kwargs, ids):
    if ids is None:
        return None
    vocab = kwargs["weight"].shape[0]
    return torch.tensor([i % vocab for i in ids], device=kwargs["weight"].device)


ROWS = [
    Case(
        lp.OP,
        _function,
        _inputs,
        shapes=[(6, 5, 7), (1, 1, 2), (2, 9, 16, 33), (0, 4, 5), (40, 24, 130), (3, 8, 9001)],
        options={
            "return_entropy": [False, True],
            "ids": [None, (0,), (5, 2)],
            "masked": [0.4, 0.0, 1.0],
            "softcap": [None, 5.0],
            "pre_scale": [1.0, 0.5],
            "temperature": [1.0, 0.7],
            "memory_budget": [None, 4096],
        },
        grads=("hidden", "weight", "bias"),
        reference=_reference,
        bad=[
            (
                "width",
                lambda make: lp.linear_logprob(make(2, 4), make(5, 3), make.ids(5, 2)),
                ValueError,
            ),
            (
                "temperature",
                lambda make: lp.linear_logprob(
                    make(2, 4), make(5, 4), make.ids(5, 2), temperature=0.0
                ),
                ValueError,
            ),
            (
                "selected_token_ids must be",
                lambda make: lp.linear_logprob(
                    make(2, 4), make(5, 4), make.ids(5, 2), selected_token_ids=make(3)
                ),
                ValueError,
            ),
        ],
    ),
]
