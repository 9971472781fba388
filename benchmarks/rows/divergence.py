"""Divergences of two distributions."""

import math
from functools import partial

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import BOTH, Inputs, Make


def _two_log_probs(make: Make, tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """fp32, as distillation has them."""
    student, teacher = (make(tokens, vocabulary).float() for _ in range(2))
    return student.log_softmax(-1), teacher.log_softmax(-1)


def _kl_div(make: Make, tokens: int, vocabulary: int) -> Inputs:
    student, teacher = _two_log_probs(make, tokens, vocabulary)
    return {"y_pred": student, "y_true": teacher.exp_()}


def _jsd(make: Make, tokens: int, vocabulary: int) -> Inputs:
    student, teacher = _two_log_probs(make, tokens, vocabulary)
    return {"log_q": student, "log_p": teacher}


def _tvd(make: Make, tokens: int, vocabulary: int) -> Inputs:
    student, teacher = _two_log_probs(make, tokens, vocabulary)
    return {"p": student.exp_(), "q": teacher.exp_()}


def _kl_div_eager(y_pred: Tensor, y_true: Tensor) -> Tensor:
    return torch.nn.functional.kl_div(y_pred, y_true, reduction="batchmean")


def _jsd_eager(log_q: Tensor, log_p: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_q, log_p) - math.log(2.0)
    kl = partial(torch.nn.functional.kl_div, reduction="batchmean", log_target=True)
    return 0.5 * (kl(log_m, log_p) + kl(log_m, log_q))


def _tvd_eager(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p - q).abs().sum() / p.shape[0]


_PAIR = {
    "shapes": {"4096x128256": (4096, 128256)},
    "tiny": (16, 1024),
    "quick": ("4096x128256",),
    "modes": (BOTH,),  # ours makes the gradient in forward: the parts are not comparable
}

ROWS = [
    Bench(
        "kl_div",
        inputs=_kl_div,
        grads=("y_pred",),
        eager=lambda ops: _kl_div_eager,
        **_PAIR,
    ),
    Bench("jsd", inputs=_jsd, grads=("log_q",), eager=lambda ops: _jsd_eager, **_PAIR),
    Bench("tvd", inputs=_tvd, grads=("p",), eager=lambda ops: _tvd_eager, **_PAIR),
]

UPSTREAM = {
    "kl_div": lambda f, y_pred, y_true: f.liger_kl_div(y_pred, y_true, reduction="batchmean"),
    "jsd": lambda f, log_q, log_p: f.liger_jsd(log_q, log_p),
    "tvd": lambda f, p, q: f.liger_tvd(p, q, reduction="batchmean"),
}
