"""Losses of a student's hidden states and head against a teacher."""

import importlib
import math
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import BOTH, FORWARD, Inputs, Make
from liger_kernel.ops._op import Cost

_HEAD = {
    "shapes": {"A": (8192, 4096, 128256)},
    "tiny": (16, 64, 1024),
    "modes": (BOTH,),  # ours makes the gradient in forward: the parts are not comparable
    "clock": "wall",
}


def _student(make: Make, tokens: int, hidden: int, vocabulary: int) -> Inputs:
    weight = make(vocabulary, hidden).mul_(0.02)
    return {"student_input": make(tokens, hidden), "student_weight": weight}


def _two_heads(make: Make, *sizes: int) -> Inputs:
    """The teacher is another model of the same size."""
    teacher = _student(make, *sizes)
    return {
        **_student(make, *sizes),
        "teacher_input": teacher["student_input"],
        "teacher_weight": teacher["student_weight"],
    }


def _labelled(make: Make, tokens: int, *sizes: int) -> Inputs:
    inputs = _two_heads(make, tokens, *sizes)
    return {**inputs, "labels": make.ids(sizes[-1], tokens)}


def _probabilities(make: Make, tokens: int, hidden: int, vocabulary: int) -> Inputs:
    """bf16, as an offline teacher stores them."""
    target = make(tokens, vocabulary).float().softmax(-1).bfloat16()
    return {**_student(make, tokens, hidden, vocabulary), "target": target}


def _top_k(make: Make, tokens: int, hidden: int, vocabulary: int) -> Inputs:
    log_p, ids = make(tokens, 1024).float().log_softmax(-1).topk(64)
    ids = ids + 1024 * make.ids(vocabulary // 1024, tokens)[:, None]
    return {**_student(make, tokens, hidden, vocabulary), "log_p": log_p, "ids": ids}


def _logits(make: Make, tokens: int, vocabulary: int) -> Inputs:
    student, teacher = (make(tokens, vocabulary) for _ in range(2))
    return {
        "student_logits": student,
        "teacher_logits": teacher,
        "target": make.ids(vocabulary, tokens),
    }


# Plain torch


def _log_p(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight).float().log_softmax(-1)


def _jsd(log_q: Tensor, log_p: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_q, log_p) - math.log(2.0)
    kl = partial(F.kl_div, reduction="batchmean", log_target=True)
    return 0.5 * (kl(log_m, log_p) + kl(log_m, log_q))


def _jsd_eager(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor
) -> Tensor:
    with torch.no_grad():
        log_p = _log_p(teacher_input, teacher_weight)
    return _jsd(_log_p(student_input, student_weight), log_p)


def _distillation_eager(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, labels: Tensor
) -> Tensor:  # fmt: skip
    with torch.no_grad():
        log_p = _log_p(teacher_input, teacher_weight)
    log_q = _log_p(student_input, student_weight)
    return 0.5 * _jsd(log_q, log_p) + 0.5 * F.nll_loss(log_q, labels)


def _cosine_eager(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, labels: Tensor
) -> Tensor:  # fmt: skip
    with torch.no_grad():
        teacher = F.linear(teacher_input, teacher_weight).float()
    student = F.linear(student_input, student_weight).float()
    soft = 0.5 * (1.0 - F.cosine_similarity(student, teacher)).mean()
    return 0.5 * soft + 0.5 * F.cross_entropy(student, labels)


def _kl_eager(student_input: Tensor, student_weight: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(_log_p(student_input, student_weight), target.float(), reduction="batchmean")


def _top_k_eager(
    student_input: Tensor, student_weight: Tensor, log_p: Tensor, ids: Tensor
) -> Tensor:
    """The rest by subtraction, as it is usually written."""
    log_q = _log_p(student_input, student_weight).gather(-1, ids)
    rest_p, rest_q = (1.0 - t.exp().sum(-1) for t in (log_p, log_q))
    known = (log_p.exp() * (log_p - log_q)).sum(-1)
    return (known + torch.special.xlogy(rest_p, rest_p / rest_q)).mean()  # fmt: skip


def _ce_tvd_eager(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    log_q, p = student_logits.float().log_softmax(-1), teacher_logits.float().softmax(-1)
    ce = F.nll_loss(log_q, target, reduction="none")
    return ce, 0.5 * (log_q.exp() - p).abs().sum(-1)


# Ours


def _class_call(name: str, losses: Any) -> Any:
    loss = getattr(losses, name)()
    return lambda student_input, student_weight, teacher_input, teacher_weight, labels: loss(
        student_input, student_weight, teacher_input, teacher_weight, labels
    )


def _top_k_ours(ops: Any) -> Any:
    def call(student_input: Tensor, student_weight: Tensor, log_p: Tensor, ids: Tensor) -> Tensor:
        return ops.linear_distillation(
            student_input, student_weight, teacher_log_probs=log_p, teacher_ids=ids
        ).loss

    return call


def _upstream(name: str) -> Any:
    """The same class of a library that bears this package's name and stands in the place of it."""

    made = cache(lambda: _class_call(name, importlib.import_module("liger_kernel.chunked_loss")))
    return lambda _, **inputs: made()(**inputs)


def _cost(products: int) -> Any:
    def cost(_: Any, student_input: Tensor, student_weight: Tensor, **__: Tensor) -> Cost:
        given = (student_input, student_weight)
        size = sum(t.numel() * t.element_size() for t in given)
        flops = 2 * products * student_input.numel() * student_weight.shape[0]
        return Cost(size, size, saved=size, flops=flops)

    return cost


_CLASSES = {
    "distillation_jsd": ("LigerFusedLinearJSDLoss", _distillation_eager),
    "distillation_cosine": ("LigerFusedLinearCosineSimilarityLoss", _cosine_eager),
}
_GRADS = ("student_input", "student_weight")

ROWS = [
    Bench(
        "fused_linear_jsd",
        inputs=_two_heads,
        grads=_GRADS,
        eager=lambda _: _jsd_eager,
        cost=_cost(4),
        quick=("A",),
        **_HEAD,
    ),
    Bench(
        "fused_linear_kl_div",
        inputs=_probabilities,
        grads=_GRADS,
        eager=lambda _: _kl_eager,
        cost=_cost(3),
        quick=(),
        **_HEAD,
    ),
    Bench(
        "linear_distillation",
        inputs=_top_k,
        grads=_GRADS,
        eager=lambda _: _top_k_eager,
        ours={"ours": _top_k_ours},
        cost=_cost(3),
        quick=(),
        **_HEAD,
    ),
    *(
        Bench(
            op,
            inputs=_labelled,
            grads=_GRADS,
            eager=lambda _, eager=eager: eager,
            ours={"ours": partial(_class_call, name)},
            cost=_cost(4),
            module="liger_kernel.chunked_loss",
            quick=(),
            **_HEAD,
        )
        for op, (name, eager) in _CLASSES.items()
    ),
    Bench(
        "fused_ce_tvd",
        inputs=_logits,
        grads=("student_logits",),
        eager=lambda _: _ce_tvd_eager,
        shapes={"4096x128256": (4096, 128256)},
        tiny=(16, 1024),
        quick=("4096x128256",),
        modes=(FORWARD, BOTH),
    ),
]

UPSTREAM = {
    "fused_linear_jsd": lambda f, **inputs: f.liger_fused_linear_jsd(**inputs),
    "fused_linear_kl_div": lambda f, **inputs: f.liger_fused_linear_kl_div(**inputs),
    "fused_ce_tvd": lambda _, **inputs: importlib.import_module(
        "liger_kernel.transformers"
    ).LigerFusedCETVDLoss()(**inputs),
    **{op: _upstream(name) for op, (name, _) in _CLASSES.items()},
}
