from liger_kernel.ops import fused_linear_jsd as op
from liger_kernel.testing.properties import Case


def _inputs(shape, make, labelled=True, ignore_index=-100, **_):
    *tokens, width, vocab = shape
    tensors = {
        "student_input": make(*tokens, width),
        "student_weight": make(vocab, width, scale=2 * width**-0.5),
        "teacher_input": make(*tokens, 3),
        "teacher_weight": make(vocab, 3),
    }
    if labelled:
        labels = make.ids(10 * vocab, *tokens)  # compared with ignore_index alone
        tensors["shift_labels"] = labels.masked_fill(make.chance(0.4, *tokens), ignore_index)
    return tensors


def _drop(function):
    return lambda labelled=True, **kwargs: function(**kwargs)


_BAD = [
    (
        "jsd_beta must lie in",
        lambda make: op.fused_linear_jsd(make(2, 4), make(5, 4), make(2, 3), make(5, 3), None, -0.1),
        ValueError,
    ),
    (
        "same classes",
        lambda make: op.fused_linear_jsd(make(2, 4), make(5, 4), make(2, 3), make(6, 3)),
        ValueError,
    ),
    (
        "width",
        lambda make: op.fused_linear_jsd(make(2, 4), make(5, 4), make(2, 4), make(5, 3)),
        ValueError,
    ),
    (
        "reduction must be one of",
        lambda make: op.fused_linear_jsd(make(2, 4), make(5, 4), make(2, 3), make(5, 3), reduction="mean"),
        ValueError,
    ),
]  # fmt: skip

ROWS = [
    Case(
        op.OP,
        _drop(op.fused_linear_jsd),
        _inputs,
        shapes=[(2, 4, 7), (0, 4, 5)],
        options={
            "jsd_beta": [0.5, 0.0, 1.0],
            "labelled": [True, False],
            "temperature": [1.0, 2.0],
            "memory_budget": [None, 200],
            "reduction": ["batchmean", "sum"],
        },
        grads=("student_input", "student_weight"),
        reference=_drop(op.reference),
        bad=_BAD,
    ),
]
