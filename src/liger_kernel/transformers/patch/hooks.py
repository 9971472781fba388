"""Which forwards run under the hooks that rebuild activations (`rematerialise`), and whose hooks those are in."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger_kernel import _env
from liger_kernel.transformers.patch.apply import Ledger, original_of
from liger_kernel.transformers.patch.rematerialise import (
    cast,
    hooks,
    hooks_allowed,
    offer,
    ours,
    top_hooks,
)

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def places(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model whose forwards get the hooks, by name: they contain all its layers, and nothing wraps the
    model's own forward, which belongs to the head's seam and to other libraries."""
    for name, child in model.named_children():
        if isinstance(child, _LISTS):
            yield from ((f"{name}.{inner}", place) for inner, place in places(child))
        elif any(True for _ in child.children()):
            yield name, child


def layers(part: nn.Module) -> Iterator[nn.Module]:
    """The members of a part's outermost lists: what a checkpoint is put around."""
    for child in part.children():
        if isinstance(child, _LISTS):
            yield from child.children()
        else:
            yield from layers(child)


def wrapped_forward(
    forward: Any, name: str | None, report: Any, before: Callable[[Any], None] | None = None
) -> Any:
    """`forward(self, ...)` of a module under the hooks, after `before(self)`; the bytes not kept go to
    `report.rebuilt[name]`. name None: a layer, whose part's hooks are ours unless a checkpoint is between them."""

    @functools.wraps(forward)
    def liger_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        if before is not None:
            before(self)
        outer = _outer() if torch.is_grad_enabled() else _CLOSED
        if outer is _CLOSED or (outer is None and name is None):
            return forward(self, *args, **kwargs)
        if name is not None:
            _see_adapters(report.ledger, self)
        with hooks(outer) as run:
            try:
                return forward(self, *args, **kwargs)
            finally:
                if name is not None:
                    report.rebuilt[name] = run.bytes

    liger_forward.__liger_seam__ = "rematerialise"  # type: ignore[attr-defined]
    return liger_forward


_CLOSED: Any = object()


def _outer() -> Any:
    """Whose hooks ours would be in: None for nobody's, those of a checkpoint; `_CLOSED` if ours are there already, or
    somebody else's, which is said once.
    """
    if not hooks_allowed():
        return _CLOSED
    top = top_hooks()
    if top is None:
        return None
    module = getattr(top[0], "__module__", "")
    if module == "torch.utils.checkpoint":
        return top
    if not ours(top[0]):
        who = getattr(top[0], "__qualname__", type(top[0]).__qualname__)
        _env.warn_once(
            f"liger_kernel: activations are kept, not rematerialised: the forward runs within the saved-tensor hooks "
            f"of {module}.{who}, and hooks do not nest. patch(model, rematerialise=False) silences this."
        )
    return _CLOSED


# Adapters


def _see_adapters(ledger: Ledger, user: Any) -> None:
    """PEFT casts the input of every adapted linear layer, often to fp32: let a cast keep what it was cast from."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None:
        layer, name = tuners.BaseTunerLayer, "_cast_input_dtype"
        ledger.share(layer, name, _casting(original_of(getattr(layer, name))), user)


@functools.cache
def _casting(original: Any) -> Any:
    @functools.wraps(original)
    def _cast_input_dtype(self: Any, x: Any, dtype: torch.dtype) -> Any:
        y = original(self, x, dtype)
        if x is not None and y.element_size() > x.element_size():
            offer(y, cast, (x,), {"dtype": y.dtype, "device": y.device})
        return y

    _cast_input_dtype.__liger_seam__ = "rematerialise"  # type: ignore[attr-defined]
    return _cast_input_dtype
