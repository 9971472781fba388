"""What is measured: one row per operator. `liger-kernel bench [ROW ...]` runs it.

A row names its inputs, its shapes, and the plain torch that users would write without this package
(`eager`: also what torch.compile compiles and what results are checked against). `ours` defaults to
the operator's public function, the floor comes from its `OP.cost`.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench, Peer
from liger_kernel.bench.work import BOTH, Inputs, Make

MIB = 1 << 20
IGNORED = -100

# Inputs ---------------------------------------------------------------------------------------------------------------


def _norm(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "weight": make(width)}


def _gated(make: Make, rows: int, width: int) -> Inputs:
    return {"gate": make(rows, width), "up": make(rows, width)}


def _rope(make: Make, batch: int, time: int, q_heads: int, k_heads: int, width: int) -> Inputs:
    """As models hand them over: transposed views of `[B, T, heads, width]`."""
    q, k = (make(batch, time, h, width).transpose(1, 2) for h in (q_heads, k_heads))
    frequencies = 1e4 ** -(torch.arange(0, width, 2, device=q.device) / width)
    angles = torch.arange(time, device=q.device)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)[None]
    return {"q": q, "k": k, "cos": angles.cos().to(q.dtype), "sin": angles.sin().to(q.dtype)}


def _logits(make: Make, tokens: int, vocabulary: int) -> Inputs:
    return {"input": make(tokens, vocabulary), "target": make.ids(vocabulary, tokens)}


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


def _head(
    make: Make, tokens: int, hidden: int, vocabulary: int, ignored_percent: int = 0
) -> Inputs:
    target = make.ids(vocabulary, tokens)
    target[make.ids(100, tokens) < ignored_percent] = IGNORED
    weight = make(vocabulary, hidden).mul_(0.02)
    return {"input": make(tokens, hidden), "weight": weight, "target": target}


# What users write today -----------------------------------------------------------------------------------------------


def _rope_eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def _cross_entropy_eager(input: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(input.float(), target)


def _head_eager(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _cross_entropy_eager(torch.nn.functional.linear(input, weight), target)


def _kl_div_eager(y_pred: Tensor, y_true: Tensor) -> Tensor:
    return torch.nn.functional.kl_div(y_pred, y_true, reduction="batchmean")


def _jsd_eager(log_q: Tensor, log_p: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_q, log_p) - math.log(2.0)
    kl = partial(torch.nn.functional.kl_div, reduction="batchmean", log_target=True)
    return 0.5 * (kl(log_m, log_p) + kl(log_m, log_q))


def _tvd_eager(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p - q).abs().sum() / p.shape[0]


# Ours, where it takes more than the operator's own name ---------------------------------------------------------------


def _loss(function: Any, **options: Any) -> Any:
    return lambda **inputs: function(**inputs, **options).loss


def _logprob_eager(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_p = torch.nn.functional.linear(input, weight).float().log_softmax(-1)
    return log_p.gather(-1, target[:, None])[:, 0]


def _logprob_ours(ops: Any) -> Any:
    return lambda input, weight, target: ops.linear_logprob(input, weight, target).logp


def _head_ours(ops: Any, budget: int | None = None) -> Any:
    return _loss(ops.fused_linear_cross_entropy, memory_budget=budget)


def _head_cost(ops: Any, input: Tensor, weight: Tensor, target: Tensor) -> Any:
    """Ignored tokens need no work."""
    kept = target != IGNORED
    return ops.OP.cost(input[kept], weight, target[kept])


def _head_products(input: Tensor, weight: Tensor, target: Tensor) -> tuple[int, int, int]:
    return int((target != IGNORED).sum()), input.shape[1], weight.shape[0]


# The table ------------------------------------------------------------------------------------------------------------

_GATED = {
    "inputs": _gated,
    "grads": ("gate", "up"),
    "shapes": {"8192x14336": (8192, 14336)},
    "tiny": (64, 1024),
    "quick": ("8192x14336",),
}

_PAIR = {
    "shapes": {"4096x128256": (4096, 128256)},
    "tiny": (64, 1024),
    "quick": ("4096x128256",),
    "modes": (BOTH,),  # ours makes the gradient in forward: the parts are not comparable
}

TABLE = [
    Bench(
        "rms_norm",
        inputs=_norm,
        grads=("x", "weight"),
        shapes={
            f"{rows}x{width}": (rows, width)
            for rows, width in (
                (8192, 2048),
                (8192, 4096),
                (16384, 4096),
                (8192, 8192),
                (4096, 16384),
                (65536, 1024),
            )
        },
        tiny=(64, 1024),
        quick=("8192x2048", "8192x4096"),
    ),
    Bench(
        "rope",
        inputs=_rope,
        grads=("q", "k"),
        shapes={"4x2048x32/8x128": (4, 2048, 32, 8, 128)},
        tiny=(1, 64, 8, 2, 64),
        quick=("4x2048x32/8x128",),
        eager=lambda ops: _rope_eager,
    ),
    Bench("swiglu", **_GATED),
    Bench("geglu", **_GATED),
    Bench(
        "cross_entropy",
        inputs=_logits,
        grads=("input",),
        shapes={
            f"{tokens}x{vocabulary}": (tokens, vocabulary)
            for tokens, vocabulary in ((8192, 128256), (4096, 151936), (8192, 32000))
        },
        tiny=(64, 1024),
        quick=("8192x32000",),
        modes=(BOTH,),  # ours makes the gradient in forward: the parts are not comparable
        eager=lambda ops: _cross_entropy_eager,
        ours={"ours": lambda ops: _loss(ops.cross_entropy)},
        cost=lambda ops, input, target: ops.OP.cost(input, target, None, "mean"),
    ),
    Bench(
        "fused_linear_cross_entropy",
        inputs=_head,
        grads=("input", "weight"),
        shapes={
            "A": (8192, 4096, 128256),
            "A/60": (8192, 4096, 128256, 60),
            "B": (8192, 2048, 128256),
            "C": (16384, 4096, 32000),
            "D": (4096, 8192, 151936),
            "E": (32768, 4096, 128256),
        },
        tiny=(64, 64, 1024),
        quick=("A", "A/60"),
        modes=(BOTH,),  # likewise
        clock="wall",
        eager=lambda ops: _head_eager,
        ours={
            "ours": _head_ours,
            "ours 1 GiB": partial(_head_ours, budget=1024 * MIB),
            "ours 250 MiB": partial(_head_ours, budget=250 * MIB),
            "ours 80 MiB": partial(_head_ours, budget=80 * MIB),
        },
        cost=_head_cost,
        products=_head_products,
    ),
    Bench(
        "kl_div",
        inputs=_kl_div,
        grads=("y_pred",),
        eager=lambda ops: _kl_div_eager,
        **_PAIR,
    ),
    Bench("jsd", inputs=_jsd, grads=("log_q",), eager=lambda ops: _jsd_eager, **_PAIR),
    Bench("tvd", inputs=_tvd, grads=("p",), eager=lambda ops: _tvd_eager, **_PAIR),
    Bench(
        "linear_logprob",
        inputs=_head,
        grads=("input", "weight"),
        shapes={"A": (8192, 4096, 128256)},
        tiny=(64, 64, 1024),
        quick=(),
        modes=(BOTH,),
        clock="wall",
        eager=lambda ops: _logprob_eager,
        ours={"ours": _logprob_ours},
        cost=_head_cost,
    ),
]

# Other libraries, in processes of their own: `--peer upstream=FOLDER`, the folder that holds the installed package.
PEERS = {
    "upstream": Peer(  # bears this package's name
        module="liger_kernel.transformers.functional",
        distribution="liger-kernel",
        calls={
            "rms_norm": lambda f, x, weight: f.liger_rms_norm(x, weight, 1e-6),
            "rope": lambda f, q, k, cos, sin: f.liger_rope(q, k, cos, sin),
            "swiglu": lambda f, gate, up: f.liger_swiglu(gate, up),
            "geglu": lambda f, gate, up: f.liger_geglu(gate, up),
            "cross_entropy": lambda f, input, target: f.liger_cross_entropy(input, target),
            "fused_linear_cross_entropy": lambda f, input, weight, target: (
                f.liger_fused_linear_cross_entropy(input, weight, target)
            ),
            "kl_div": lambda f, y_pred, y_true: f.liger_kl_div(
                y_pred, y_true, reduction="batchmean"
            ),
            "jsd": lambda f, log_q, log_p: f.liger_jsd(log_q, log_p),
            "tvd": lambda f, p, q: f.liger_tvd(p, q, reduction="batchmean"),
        },
    ),
}
