from liger_kernel.ops import fused_ce_tvd as op
from liger_kernel.testing.properties import Case


def _inputs(shape, make, ignore_index=-100, **_):
    target = make.ids(shape[-1], *shape[:-1])
    return {
        "student_logits": make(*shape, scale=2.0),
        "teacher_logits": make(*shape, scale=2.0),
        "target": target.masked_fill(make.chance(0.3, *shape[:-1]), ignore_index),
    }


def _reference(ignore_index=-100, softcap=None, teacher_post_scale=1.0, **tensors):
    transforms = ((1.0, softcap, 1.0), (1.0, None, teacher_post_scale))
    return op.reference(**tensors, ignore_index=ignore_index, transforms=transforms)


def _opchecks(tensors):
    x, y, target = tensors.values()
    plain = [1.0, 0.0, 1.0] * 2
    ce, tvd, *saved = op.ce_tvd_forward(x, y, target, -100, plain)
    return [
        (op.ce_tvd_forward, (x, y, target, -100, plain)),
        (op.ce_tvd_backward, (ce, tvd, x, y, target, *saved, -100, plain)),
    ]


_BAD = [
    (
        "same shape",
        lambda make: op.fused_ce_tvd(make(2, 4), make(2, 5), make.ids(4, 2)),
        ValueError,
    ),
    (
        "one label for each row",
        lambda make: op.fused_ce_tvd(make(2, 4), make(2, 4), make.ids(4, 3)),
        ValueError,
    ),
    (
        "softcap positive",
        lambda make: op.fused_ce_tvd(make(2, 4), make(2, 4), make.ids(4, 2), softcap=0.0),
        ValueError,
    ),
]

ROWS = [
    Case(
        op.OP,
        op.fused_ce_tvd,
        _inputs,
        shapes=[(2, 7), (0, 5), (2, 1, 33), (1, 2500)],
        options={
            "ignore_index": [-100, 3],
            "softcap": [None, 3.0],
            "teacher_post_scale": [1.0, 0.5],
        },
        grads=("student_logits",),
        reference=_reference,
        opchecks=_opchecks,
        bad=_BAD,
    ),
]
