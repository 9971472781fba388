"""Losses of preference and reinforcement learning on hidden states and a head: sequences of one length."""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import BOTH, Inputs, Make
from liger_kernel.ops._op import Cost

_SHAPE = {
    "shapes": {"A": (8, 1024, 4096, 128256)},
    "tiny": (4, 8, 64, 1024),
    "quick": ("A",),
    "modes": (BOTH,),
    "clock": "wall",
    "module": "liger_kernel.chunked_loss",
}


def _sequences(make: Make, batch: int, tokens: int, hidden: int, vocabulary: int) -> Inputs:
    return {
        "input": make(batch, tokens, hidden),
        "weight": make(vocabulary, hidden).mul_(0.02),
        "target": make.ids(vocabulary, batch, tokens),
    }


def _pairs(make: Make, *sizes: int) -> Inputs:
    """The reference is another model of the same size."""
    other = _sequences(make, *sizes)
    return {
        **_sequences(make, *sizes),
        "ref_input": other["input"],
        "ref_weight": other["weight"],
    }


def _samples(make: Make, *sizes: int) -> Inputs:
    inputs = _sequences(make, *sizes)
    old = _logp(**inputs).detach() + 0.02 * make(*sizes[:2]).float()
    return {**inputs, "advantages": make(sizes[0]).float(), "old": old}


def _logp(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_p = torch.nn.functional.linear(input, weight).float().log_softmax(-1)
    return log_p.gather(-1, target[..., None])[..., 0]


def _dpo_eager(
    input: Tensor, weight: Tensor, target: Tensor, ref_input: Tensor, ref_weight: Tensor
) -> Tensor:
    with torch.no_grad():
        reference = _logp(ref_input, ref_weight, target).sum(-1)
    chosen, rejected = (_logp(input, weight, target).sum(-1) - reference).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def _grpo_eager(
    input: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, old: Tensor
) -> Tensor:
    ratio = (_logp(input, weight, target) - old).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -gain.mean(-1).mean()


def _dpo(losses: Any) -> Any:
    loss = losses.LigerFusedLinearDPOLoss()
    return lambda input, weight, target, ref_input, ref_weight: loss(
        weight, input, target, ref_input=ref_input, ref_weight=ref_weight
    )[0]


def _grpo(losses: Any) -> Any:
    loss = losses.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="grpo")

    def call(input: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, old: Tensor) -> Any:
        mask = torch.ones_like(target)
        return loss(input, weight, target, mask, advantages, old_per_token_logps=old)[0]

    return call


def _upstream(make: Any) -> Any:
    """The same call of a library that bears this package's name and stands in the place of it."""
    made = functools.cache(lambda: make(importlib.import_module("liger_kernel.chunked_loss")))
    return lambda _, **inputs: made()(**inputs)


def _cost(products: int) -> Any:
    def cost(_: Any, input: Tensor, weight: Tensor, **__: Tensor) -> Cost:
        size = input.numel() * input.element_size() + weight.numel() * weight.element_size()
        return Cost(size, size, saved=size, flops=2 * products * input.numel() * weight.shape[0])

    return cost


ROWS = [
    Bench(
        "dpo",
        inputs=_pairs,
        grads=("input", "weight"),
        eager=lambda _: _dpo_eager,
        ours={"ours": _dpo},
        cost=_cost(4),
        **_SHAPE,
    ),
    Bench(
        "grpo",
        inputs=_samples,
        grads=("input", "weight"),
        eager=lambda _: _grpo_eager,
        ours={"ours": _grpo},
        cost=_cost(3),
        **_SHAPE,
    ),
]

UPSTREAM = {"dpo": _upstream(_dpo), "grpo": _upstream(_grpo)}
