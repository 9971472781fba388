import torch

from liger_kernel.ops import linear_distillation as op
from liger_kernel.ops.head import pair
from liger_kernel.testing.properties import Case

IGNORE = -100
distill = op.linear_distillation


def _student(shape, make, masked):
    *tokens, width, vocab = shape
    targets = make.ids(vocab, *tokens)
    targets[make.chance(masked, *tokens)] = IGNORE
    return {
        "hidden": make(*tokens, width),
        "weight": make(vocab, width, scale=2 * width**-0.5),
        "targets": targets,
        "bias": make(vocab),
    }


def _with_head(shape, make, masked=0.4, more=0, **_):
    *tokens, _, vocab = shape
    return {
        **_student(shape, make, masked),
        "teacher_hidden": make(*tokens, 3),
        "teacher_weight": make(vocab + more, 3),
        "teacher_bias": make(vocab + more),
    }


def _stored(shape, make, masked=0.4, kind="kl", top=0, **_):
    """Log-probabilities, some -inf where the divergence stays finite; or the `top` largest and an unused slot."""
    *tokens, _, vocab = shape
    log_p = make(*tokens, vocab, scale=3.0).float().log_softmax(-1)
    tensors = _student(shape, make, masked)
    if not top:
        if kind != "reverse_kl":
            log_p = log_p.masked_fill(make.chance(0.3, *tokens, vocab), float("-inf"))
        return {**tensors, "teacher_log_probs": log_p.to(make.dtype)}
    log_p, ids = log_p.topk(min(top, vocab - 1), dim=-1)
    ids = ids.clone()
    if min(top, vocab - 1) > 1:
        ids[..., -1] = -1
    return {**tensors, "teacher_log_probs": log_p.to(make.dtype), "teacher_ids": ids}


def _drop(function):
    return lambda masked=0, more=0, top=0, **kwargs: function(**kwargs)


def _opchecks(tensors):
    t = tensors
    args = (
        t["hidden"], t["weight"], t["bias"], None, None, t["targets"], t["teacher_hidden"], t["teacher_weight"],
        t["teacher_bias"], None, None, None, None, None, "jsd", "logits", 0.3, 1.0, 1.0, 0.5, True, IGNORE,
        [1.0, 0.0, 1.0], [1.0, 0.0, 1.0], "same", 1, None, 1 << 20, None, None, 0, 0, True, True, True, True, False,
        False,
    )  # fmt: skip
    return [(pair.head_pair, args)]


def _bad(message, error=ValueError, **options):
    def call(make):
        given = {
            "hidden": make(2, 4),
            "weight": make(5, 4),
            "targets": make.ids(5, 2),
            "teacher_hidden": make(2, 3),
            "teacher_weight": make(5, 3),
        }
        more = {k: v(make) if callable(v) else v for k, v in options.items()}
        distill(**{**given, **more})

    return message, call, error


_NO_HEAD = {"teacher_hidden": None, "teacher_weight": None}
_BAD = [
    _bad("kind must be one of", kind="js"),
    _bad("reduction must be one of", reduction="none"),
    _bad("beta belongs to", beta=0.5),
    _bad("beta must lie in", kind="jsd", beta=1.5),
    _bad("hard loss needs targets", targets=None, weight_hard=1.0),
    _bad("one label for each row", targets=lambda make: make.ids(5, 3)),
    _bad("temperature must be positive", temperature=0.0),
    _bad("softcap must be positive", teacher_softcap=-1.0),
    _bad("no target to measure logits from", logits_dtype="offset"),
    _bad("give one of them", **_NO_HEAD),
    _bad("give one of them", teacher_log_probs=lambda make: make(2, 5)),
    _bad("give one of them", teacher_weight=None),
    _bad("teacher_ids belong to", teacher_ids=lambda make: make.ids(5, 2, 3)),
    _bad("fewer than the student's", teacher_weight=lambda make: make(4, 3)),
    _bad("same tokens", teacher_hidden=lambda make: make(3, 3)),
    _bad("needs the teacher's head", kind="cosine", teacher_log_probs=lambda make: make(2, 5), **_NO_HEAD),
    _bad("taken as they are", teacher_softcap=1.0, teacher_log_probs=lambda make: make(2, 5), **_NO_HEAD),
    _bad("must hold 2 rows of 5 classes", teacher_log_probs=lambda make: make(2, 4), **_NO_HEAD),
    _bad(
        "int64 or int32",
        teacher_log_probs=lambda make: make(2, 3),
        teacher_ids=lambda make: make(2, 3),
        **_NO_HEAD,
    ),
]  # fmt: skip

ROWS = [
    Case(
        op.OP,
        _drop(distill),
        _with_head,
        shapes=[(6, 4, 7), (1, 1, 2), (0, 4, 5), (1, 3, 3, 33), (1, 3, 2500)],
        options={
            "kind": ["jsd", "kl", "cosine", "tvd", "reverse_kl"],
            "weight_hard": [0.3, 0.0, 0.7],
            "temperature": [2.0, 1.0, 1.0, 0.7],
            "softcap": [None, 3.0],
            "teacher_softcap": [4.0, None],
            "pre_scale": [1.0, 0.5],
            "teacher_post_scale": [0.5, 1.0, 1.0],
            "masked": [0.4, 0.0, 0.5, 1.0],
            "more": [0, 0, 2, 3],
            "reduction": ["mean", "sum"],
            "memory_budget": [200, None],
        },
        grads=("hidden", "weight"),
        reference=_drop(op.reference),
        opchecks=_opchecks,
        bad=_BAD,
    ),
    Case(
        op.OP,
        _drop(distill),
        _stored,
        shapes=[(6, 4, 7), (1, 2, 2), (1, 3, 2500)],
        options={
            "kind": ["kl", "jsd", "tvd", "reverse_kl"],
            "top": [0, 3, 0, 2],
            "weight_hard": [0.5, 0.0, 0.3],
            "temperature": [1.0, 2.0],
            "softcap": [None, 3.0, None],
            "masked": [0.0, 0.4, 0.6],
            "memory_budget": [None, 200],
        },
        grads=("hidden", "weight", "bias"),
        reference=_drop(op.reference),
        label="linear_distillation from a stored teacher",
        dtypes=(torch.float32, torch.bfloat16),
    ),
]
