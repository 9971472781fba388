"""What happened to the logits between the head and the loss, as a list of named steps.

A step is `(name, argument)`. A list of steps can be replayed on real logits, or folded into what the head engine does
anyway. Steps that move rows are not here: they commute with the head and are applied to the hidden states at once.

    mul c, div c      scalar                          tanh
    add v             a vector over the vocabulary    cut (start, stop)     some of the vocabulary
    to dtype          a cast; the engine computes in fp32 whatever it says
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Step = tuple[str, Any]


def replay(steps: tuple[Step, ...], logits: Tensor) -> Tensor:
    """The steps on real logits `[*, V]`, in the order and the roundings of the model's own code."""
    for name, argument in steps:
        if name == "mul":
            logits = logits * argument
        elif name == "div":
            logits = logits / argument
        elif name == "tanh":
            logits = torch.tanh(logits)
        elif name == "add":
            logits = logits + argument
        elif name == "cut":
            logits = logits[..., argument[0] : argument[1]]
        else:
            logits = logits.to(argument)
    return logits


@dataclass
class Transform:
    """logits = softcap(pre_scale * (h W[start:stop]^T + b + shift)),   softcap(u) = cap * tanh(u / cap)"""

    pre_scale: float = 1.0
    softcap: float | None = None
    shift: Tensor | None = None
    start: int = 0
    stop: int | None = None


def fold(steps: tuple[Step, ...]) -> Transform | None:
    """The steps as one `Transform`, None if they are not of that form.

    c * tanh(a * z) has one free parameter; softcap = c and pre_scale = a * c leave no scale behind
    the cap. Products and quotients are kept apart, so that `/ 30, tanh, * 30` gives a pre_scale of
    exactly 1.
    """
    out = Transform()
    times = [1.0, 1.0]  # product of the multipliers before the cap, after it
    over = [1.0, 1.0]  # of the divisors
    capped = 0
    for name, argument in steps:
        if name == "mul":
            times[capped] *= argument
        elif name == "div":
            over[capped] *= argument
        elif name == "tanh" and not capped:
            capped = 1
        elif name == "cut":
            out.start, out.stop = out.start + argument[0], out.start + argument[1]
            out.shift = None if out.shift is None else out.shift[argument[0] : argument[1]]
        elif name == "add" and not capped and times[0] != 0.0:
            shift = argument if times[0] == over[0] else argument * (over[0] / times[0])
            out.shift = shift if out.shift is None else out.shift + shift
        elif name != "to":
            return None
    out.pre_scale = times[0] / over[0]
    if capped:
        out.softcap = times[1] / over[1]
        out.pre_scale = times[0] * times[1] / (over[0] * over[1])
        if out.softcap <= 0.0:
            return None
    return out


def split_index(index: Any, rank: int) -> tuple[Any, slice | None] | None:
    """An index of logits as (index of the rows, slice of the vocabulary), None for "all of them".

    None instead of the pair for an index that does not split that way.
    """
    items = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, (Tensor, int, slice)) or i is Ellipsis for i in items):
        return None
    used = sum(_axes(item) for item in items)
    dots = any(item is Ellipsis for item in items)
    if items[-1] is Ellipsis or (used < rank and not dots):  # the vocabulary is not mentioned
        return (items, None) if used < rank else None
    *rows, last = items
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    cut = None if last.start in (None, 0) and last.stop is None else last
    every = all(i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in rows)
    return None if every else (*rows, slice(None)), cut


def _axes(item: Any) -> int:
    """How many axes one part of an index consumes."""
    if item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1
