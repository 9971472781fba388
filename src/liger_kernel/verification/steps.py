"""Loss and gradients of one training step, how long it takes and the memory it needs."""

import contextlib
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import _env
from liger_kernel.bench.memory import PeakMemory
from liger_kernel.verification.result import Rows

Batch = Mapping[str, Any]
_SEED = 0  # of dropout: all models drop the same
_SMALL = (
    1e-3  # of the largest gradient; what is smaller may be all rounding, as a key's bias has it
)


@dataclass(frozen=True)
class Step:
    """What a step gave and cost; `peak`: bytes above the model, 0 where it was not measured."""

    loss: Tensor
    grads: dict[str, Tensor]
    seconds: float
    peak: int


def step(
    model: nn.Module, batch: Batch, choices: AbstractContextManager[Any], measure: bool = False
) -> Step:
    """Forward and backward in training mode; `.grad` of the parameters is neither read nor written.

    choices: what the forward runs in, see `choices.py`.
    measure: the peak memory. On a CPU a dispatch mode counts it, and the time means nothing. (The resident size of a
        process says little about the second of two models.)
    Raises:
        ValueError: the model returned no loss.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next(model.parameters()).device
    torch.manual_seed(_SEED)
    _train(model)
    _env.synchronize(device)
    with PeakMemory(device) if measure else contextlib.nullcontext() as meter:
        began = time.perf_counter()
        with torch.enable_grad():
            with choices:
                loss = getattr(model(**batch), "loss", None)
            if loss is None:
                raise ValueError(
                    f"{type(model).__name__} returned no loss for a batch of {', '.join(batch)}: give it labels."
                )
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        _env.synchronize(device)
        seconds = time.perf_counter() - began
    grads = {n: g for n, g in zip(named, found, strict=True) if g is not None}
    return Step(loss.detach(), grads, seconds, 0 if meter is None else meter.bytes)


def _train(model: nn.Module) -> None:
    """Training mode, but without the dropout of adapters, whose masks our kernels draw in another way."""
    model.train()
    for module in model.modules():
        dropout = getattr(module, "lora_dropout", None)
        if isinstance(dropout, nn.Module):
            dropout.eval()


def compare_steps(found: Step, plain: Step, truth: Step, index: int, rows: Rows) -> None:
    """The loss, and every gradient in the row of its parameter's name without layer numbers."""
    sizes = {name: float(g.norm()) for name, g in truth.grads.items()}
    least = _SMALL * max(sizes.values(), default=0.0)

    def errors(target: Tensor, size: float, *tensors: Tensor | None) -> list[float]:
        absent = torch.zeros_like(target)
        pair = ((absent if t is None else t).to(target.dtype) for t in tensors)
        return [float((t - target).norm()) / max(size, 1e-30) for t in pair]

    off = errors(truth.loss, abs(float(truth.loss)), found.loss, plain.loss)
    rows.of("loss", "loss").see(f"batch {index + 1}", index, *off)
    for name, target in truth.grads.items():
        off = errors(target, max(sizes[name], least), found.grads.get(name), plain.grads.get(name))
        rows.of("gradient", _group(name)).see(name, index, *off)


def _group(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
