from liger_kernel.ops import fused_linear_kl_div as op
from liger_kernel.testing.properties import Case


def _inputs(shape, make, labelled=True, ignore_index=-100, **_):
    *tokens, width, vocab = shape
    target = make(*tokens, vocab, scale=3.0).float().softmax(-1)
    target = target.masked_fill(make.chance(0.2, *tokens, vocab), 0.0)
    tensors = {
        "student_input": make(*tokens, width),
        "student_weight": make(vocab, width, scale=2 * width**-0.5),
        "target": target.to(make.dtype),
    }
    if labelled:
        labels = make.ids(vocab, *tokens)
        tensors["shift_labels"] = labels.masked_fill(make.chance(0.4, *tokens), ignore_index)
    return tensors


def _drop(function):
    return lambda labelled=True, **kwargs: function(**kwargs)


_BAD = [
    (
        "reduction must be one of",
        lambda make: op.fused_linear_kl_div(make(2, 4), make(5, 4), make(2, 5), reduction="none"),
        ValueError,
    ),
    (
        "must hold 2 rows of 5 probabilities",
        lambda make: op.fused_linear_kl_div(make(2, 4), make(5, 4), make(2, 6)),
        ValueError,
    ),
    (
        "eps must not be negative",
        lambda make: op.fused_linear_kl_div(make(2, 4), make(5, 4), make(2, 5), eps=-1.0),
        ValueError,
    ),
]

ROWS = [
    Case(
        op.OP,
        _drop(op.fused_linear_kl_div),
        _inputs,
        shapes=[(2, 4, 7), (0, 4, 5)],
        options={
            "reduction": ["batchmean", "mean", "sum"],
            "labelled": [True, False],
            "temperature": [2.0, 1.0],
            "eps": [1e-10, 0.02],
            "memory_budget": [200, None],
        },
        grads=("student_input", "student_weight"),
        reference=_drop(op.reference),
        bad=_BAD,
    ),
]
