"""Seam: RMSNorm.   y = x / rms(x) * (offset + weight)

Recognised by shape (a leaf with at most one vector and an eps) and by the probe, never by name: three rows of
(offset, casting mode) reproduce almost every RMSNorm class of transformers bit for bit.
"""

import functools
from typing import Any

import torch
from torch import nn

from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.apply import original_of

_ROWS = ((0.0, "llama"), (0.0, "gemma"), (1.0, "gemma"))
_EPS = ("variance_epsilon", "eps")
_WIDTH = 16


class NormSeam:
    """RMSNorm modules."""

    name = "rms_norm"
    flags = ("rms_norm",)

    def match(self, module: nn.Module) -> bool:
        """A leaf with an eps, nothing but one optional vector, and a forward of one argument."""
        cls = probe.plain_class(module)
        if cls.__module__.startswith("torch.nn") and cls is not getattr(nn, "RMSNorm", None):
            return False
        held = {name for name, p in module._parameters.items() if p is not None}
        leaf = not module._modules and not module._buffers and held <= {"weight"}
        return leaf and _eps_name(module) is not None and len(probe.arguments(cls)) == 1

    def probe(self, module: nn.Module, general: bool = False) -> tuple[str, Any]:
        """(description, recipe); `Refused` if no row reproduces the class."""
        eps_name = _eps_name(module)
        if getattr(module, str(eps_name)) is None:
            raise probe.Refused("its eps depends on the dtype")
        weighted = module._parameters.get("weight") is not None
        with probe.bench():
            for offset, mode in _ROWS if weighted else _ROWS[:2]:
                if _fits(module, general, weighted, str(eps_name), offset, mode):
                    cls = probe.plain_class(module)
                    return f"offset {offset:g}, {mode} casts", (cls, eps_name, offset, mode)
        raise probe.Refused("its values are not those of an RMSNorm we know")

    @functools.cache  # noqa: B019 - the seams live as long as the process
    def forward(self, recipe: Any) -> Any:
        """The function that replaces `forward`."""
        cls, eps_name, offset, mode = recipe
        original = original_of(cls.forward)
        argument = probe.arguments(cls)[0]

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **named: Any) -> Any:
            x = args[0] if args else named[argument]
            return rms_norm(x, getattr(self, "weight", None), getattr(self, eps_name), offset, mode)

        return forward


def _fits(
    module: nn.Module, general: bool, weighted: bool, eps_name: str, offset: float, mode: str
) -> bool:
    draw = probe.Draw()
    x, w = draw.rows(_WIDTH), draw(_WIDTH)
    real = module._parameters.get("weight")
    width = real.shape[0] if real is not None and real.dim() == 1 else -1
    forward = original_of(probe.plain_class(module).forward)

    def original(dtype: torch.dtype) -> Any:
        tensors: dict[str, torch.Tensor | None] = dict.fromkeys(module._parameters)
        if weighted:
            tensors["weight"] = probe.cast(w, dtype)
        return forward(probe.twin(module, {width: _WIDTH}, tensors, general), probe.cast(x, dtype))

    def candidate(dtype: torch.dtype) -> Any:
        weight = probe.cast(w, dtype) if weighted else None
        return rms_norm(
            probe.cast(x, dtype), weight, getattr(module, eps_name), offset, mode, impl="torch"
        )

    return probe.same(original, candidate, exact=True)


def _eps_name(module: nn.Module) -> str | None:
    return next((name for name in _EPS if name in vars(module)), None)
