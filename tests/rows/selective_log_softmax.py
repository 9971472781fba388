from liger_kernel.ops import selective_log_softmax as op
from liger_kernel.testing.properties import Case

log_softmax = op.selective_log_softmax


def _inputs(shape, make, ignore_index=-100, masked=0.4, **_):
    *tokens, vocab = shape
    ids = make.ids(vocab, *tokens) if vocab else make.ids(1, *tokens)
    ids[make.chance(masked, *tokens)] = ignore_index
    return {"logits": make(*shape, scale=3.0), "ids": ids}


def _drop(function):
    return lambda masked=0, **kwargs: function(**kwargs)


def _opchecks(tensors):
    logits, ids = tensors["logits"].flatten(0, -2), tensors["ids"].flatten()
    stats = op.selective_log_softmax_forward(logits, ids, 0.5, -100, True)
    return [
        (op.selective_log_softmax_forward, (logits, ids, 0.5, -100, True)),
        (op.selective_log_softmax_backward, (logits, ids, stats, stats[0], 0.5, -100, True)),
    ]


ROWS = [
    Case(
        op.OP,
        _drop(log_softmax),
        _inputs,
        shapes=[(3, 7), (0, 5), (2, 1), (2, 3, 48), (5,), (2, 5003)],
        options={
            "temperature": [1.0, 0.7],
            "ignore_index": [-100, 3, -1],
            "masked": [0.4, 0.0, 1.0],
        },
        grads=("logits",),
        reference=_drop(op.reference),
        opchecks=_opchecks,
        bad=[
            ("logits must be", lambda make: log_softmax(make(2, 4), make.ids(4, 3)), ValueError),
            (
                "temperature must be positive",
                lambda make: log_softmax(make(2, 4), make.ids(4, 2), temperature=0.0),
                ValueError,
            ),
        ],
    )
]
