"""Which experts a token goes to is decided once, and the same for all models that are compared.

A router's top-k jumps: of two models that differ by a rounding, one sends a token elsewhere now and then, and what they
compute from there on cannot be compared. So the exact model's choices are noted, and the others make the same.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Choices(TorchFunctionMode):
    """Within the first block the indices of every `topk` are noted, within later ones they are given out again."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Tensor] = []
        self._next: Iterator[Tensor] | None = None

    def __enter__(self) -> "Choices":
        self._next = iter(self._made) if self._made else None
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk) or not args:
            return found
        if self._next is None:
            self._made.append(found[1])
            return found
        made = next(self._next, None)
        if made is None or made.shape != found[1].shape:
            return found
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        return torch.return_types.topk((args[0].gather(dim, made), made))


def recomputes(model: nn.Module) -> bool:
    """Whether activation checkpointing runs forwards again in backward, where no choice could be given out again."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
