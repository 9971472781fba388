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
from liger_kernel.transformers.patch.rematerialise import rebuildable

_ROWS = ((0.0, "llama"), (0.0, "gemma"), (1.0, "gemma"))
_EPS = ("variance_epsilon", "eps")
_WIDTH = 16
_norm = rebuildable(rms_norm)


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
        return leaf and eps_name(module) is not None and len(probe.arguments(cls)) == 1

    def probe(self, module: nn.Module, general: bool = False) -> tuple[str, Any]:
        """(description, recipe); `Refused` if no row reproduces the class."""
        eps = str(eps_name(module))
        if getattr(module, eps) is None:
            raise probe.Refused("its eps depends on the dtype")
        weighted = module._parameters.get("weight") is not None
        with probe.bench():
            for offset, mode in _ROWS if weighted else _ROWS[:2]:
                if _fits(module, general, weighted, eps, offset, mode):
                    cls = probe.plain_class(module)
                    if mode == "llama" and weighted and _takes_the_weights_dtype(module, general):
                        mode = "t5"
                    return f"offset {offset:g}, {mode} casts", (cls, eps, offset, mode)
        raise probe.Refused("its values are not those of an RMSNorm we know")

    @functools.cache  # noqa: B019 - the seams live as long as the process
    def forward(self, recipe: Any) -> Any:
        """The function that replaces `forward`."""
        cls, eps, offset, mode = recipe
        original = original_of(cls.forward)
        argument = probe.arguments(cls)[0]

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **named: Any) -> Any:
            x = args[0] if args else named[argument]
            return _norm(x, getattr(self, "weight", None), getattr(self, eps), offset, mode)

        return forward


def _fits(
    module: nn.Module, general: bool, weighted: bool, eps: str, offset: float, mode: str
) -> bool:
    draw = probe.Draw()
    x, w = draw.rows(_WIDTH), draw(_WIDTH)

    def original(dtype: torch.dtype) -> Any:
        return _run(
            module, general, probe.cast(x, dtype), probe.cast(w, dtype) if weighted else None
        )

    def candidate(dtype: torch.dtype) -> Any:
        weight = probe.cast(w, dtype) if weighted else None
        return rms_norm(
            probe.cast(x, dtype), weight, getattr(module, eps), offset, mode, impl="torch"
        )

    return probe.same(original, candidate, exact=True)


def _run(module: nn.Module, general: bool, x: torch.Tensor, weight: torch.Tensor | None) -> Any:
    """The class's own forward on a small x."""
    real = module._parameters.get("weight")
    width = real.shape[0] if real is not None and real.dim() == 1 else -1
    tensors = dict.fromkeys(module._parameters)
    if weight is not None:
        tensors["weight"] = weight  # type: ignore[assignment]
    twin = probe.twin(module, {width: _WIDTH}, tensors, general)
    return original_of(probe.plain_class(module).forward)(twin, x)  # type: ignore[attr-defined]


def _takes_the_weights_dtype(module: nn.Module, general: bool) -> bool:
    """T5's classes return the weight's dtype; with half-precision weights their input may be fp32."""
    draw = probe.Draw()
    y = _run(module, general, draw.rows(_WIDTH), draw(_WIDTH).to(torch.bfloat16))
    return y.dtype == torch.bfloat16


def eps_name(module: nn.Module) -> str | None:
    """The attribute that holds a norm's eps."""
    return next((name for name in _EPS if name in vars(module)), None)
