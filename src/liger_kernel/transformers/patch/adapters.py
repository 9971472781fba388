"""Adapters that a model gets after it was patched: they are found at its next forward."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from liger_kernel.transformers.patch import seams
from liger_kernel.transformers.patch.apply import seam_of
from liger_kernel.transformers.patch.report import ALREADY, Report

FLAG, SEAM = "lora", "adapters"
_WATCHES = "__liger_watches__"
Look = Callable[[Any], None]


def watches(forward: Any) -> bool:
    """Whether a forward of ours looks at its model before it runs."""
    return seam_of(forward) is not None and getattr(forward, _WATCHES, False)


def watching(forward: Any, look: Look | None) -> Any:
    """A forward of ours that was given `look`, marked if that is one."""
    if look is not None:
        setattr(forward, _WATCHES, True)
    return forward


def wrapped_forward(forward: Any, look: Look) -> Any:
    """`forward(self, ...)` of a part of a model, after `look(self)`. A traced step is not looked at."""

    @functools.wraps(forward)
    def liger_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            look(self)
        return forward(self, *args, **kwargs)

    liger_forward.__liger_seam__ = SEAM  # type: ignore[attr-defined]
    return watching(liger_forward, look)


class Watch:
    """Looks at models whenever they are called; patches those whose adapters are not the ones it knows.

    What it did is in `report`, and taken back with it. Nothing here keeps a model alive that nobody else holds.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._known: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._late: weakref.WeakKeyDictionary[Any, list[Report]] = weakref.WeakKeyDictionary()
        report.ledger.later(self._undo)

    def on(self, model: Any) -> Look:
        """`look` from any part of a model whose adapters of today have been seen to."""
        self._known[model] = _configs(model)
        there = weakref.ref(model)

        def look(part: Any) -> None:
            model = there()
            if model is not None:
                self.look(model)

        return look

    def look(self, model: Any) -> None:
        """Patch what is new. PEFT leaves its configurations on the model: the same ones, the same adapters."""
        configs = _configs(model)
        known = self._known.get(model, ())
        if len(configs) == len(known) and all(map(_is, configs, known)):
            return
        self._known[model] = configs
        late = Report(type(model).__name__)
        self._late.setdefault(model, []).append(late)
        sites, _ = seams.of_instance(model)
        seams.patch_modules(sites, {FLAG: True}, late, bind=True)
        for row in late.rows:
            if row.status != ALREADY:
                for _ in range(row.count):
                    self._report.add(row.seam, row.target, row.status, row.detail)

    def _undo(self) -> None:
        for late in self._late.values():
            for report in late:
                report.undo()


def _configs(model: Any) -> tuple[Any, ...]:
    found = vars(model).get("peft_config")
    return tuple(found.values()) if isinstance(found, dict) else ()


def _is(a: Any, b: Any) -> bool:
    return a is b
