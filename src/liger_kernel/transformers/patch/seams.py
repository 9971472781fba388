"""The list of seams, and one walk over a model (or over the classes of a model type) that tries each of them.

To add a seam for modules, write a class with `name`, `flags`, `match`, `probe` and `forward` like
those in `norm.py` and `gated.py`, and put it in `SEAMS`.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.activation import ReLUSquaredSeam
from liger_kernel.transformers.patch.apply import original_of, seam_of
from liger_kernel.transformers.patch.experts import ExpertsSeam
from liger_kernel.transformers.patch.gated import GatedSeam
from liger_kernel.transformers.patch.gated_norm import GatedNormSeam
from liger_kernel.transformers.patch.head import find_head
from liger_kernel.transformers.patch.layer_norm import LayerNormSeam
from liger_kernel.transformers.patch.lora import LoraSeam
from liger_kernel.transformers.patch.norm import NormSeam
from liger_kernel.transformers.patch.report import ALREADY, FITS, LEFT, SWAPPED, Report
from liger_kernel.transformers.patch.rotary import NAMES as ROPE_NAMES
from liger_kernel.transformers.patch.rotary import RopeSeam

SEAMS: tuple[Any, ...] = (
    NormSeam(),
    GatedSeam(),
    ReLUSquaredSeam(),
    LayerNormSeam(),
    GatedNormSeam(),
    ExpertsSeam(),
    LoraSeam(),
)
ROPE = RopeSeam()

# What a forward may take besides its input, for a class to be patched without an instance.
_FURTHER = ((), ("gate",), ("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))

_decided: dict[Any, tuple[str, Any]] = {}


def decide(seam: Any, module: nn.Module, general: bool = False) -> tuple[str, Any]:
    """(description, recipe), or (reason, None) if the probe refuses; asked once per fingerprint.

    general: the answer must hold for every instance of the class, see `probe.twin`.
    """
    key = (seam.name, general, probe.fingerprint(module))
    if key not in _decided:
        try:
            _decided[key] = seam.probe(module, general)
        except probe.Refused as reason:
            _decided[key] = (str(reason), None)
        except Exception as error:  # the original runs here, on shapes it was not written for
            what = f"its code does not run on rows of features: {type(error).__name__}: {error}"
            _decided[key] = (what.splitlines()[0][:120], None)
    return _decided[key]


Site = tuple[Any, nn.Module]  # (what to bind: the instance or its class, an instance to look at)


def patch_modules(
    sites: Iterable[Site], flags: dict[str, bool], report: Report, bind: bool
) -> None:
    """Norms, MLPs and whatever else replaces the `forward` of a module."""
    sites = list(sites)
    taken: set[int] = set()
    refused: dict[int, tuple[str, str, str]] = {}  # by one seam: another may look at the module too
    for seam in SEAMS:
        if not any(flags.get(flag) for flag in seam.flags):
            continue
        for owner, example in sites:
            if not seam.match(example):
                continue
            label = probe.plain_class(example).__name__
            detail, recipe = decide(seam, example, general=isinstance(owner, type))
            if recipe is None:
                refused.setdefault(id(example), (seam.name, label, detail))
            else:
                taken.add(id(example))
                _patch_one(seam, owner, (label, detail), recipe, report, bind)
    for example, (name, label, detail) in refused.items():
        if example not in taken:
            report.add(name, label, LEFT, detail)


def _patch_one(
    seam: Any, owner: Any, shown: tuple[str, str], recipe: Any, report: Report, bind: bool
) -> None:
    label, detail = shown
    # accelerate's hooks sit in `forward` and call `_old_forward`
    name = "_old_forward" if "_old_forward" in vars(owner) else "forward"
    if seam_of(getattr(owner, name, None)) == seam.name:
        report.add(seam.name, label, ALREADY, detail)
    elif isinstance(owner, nn.Module) and "forward" in vars(owner) and name == "forward":
        report.add(seam.name, label, LEFT, "another library replaced the forward of this instance")
    elif not bind:
        report.add(seam.name, label, FITS, detail)
    else:
        function = seam.forward(recipe)
        function.__liger_seam__ = seam.name
        report.ledger.bind(owner, name, function, seam.name)
        report.add(seam.name, label, SWAPPED, detail)


def patch_rope(spaces: Iterable[ModuleType], user: Any, report: Report, bind: bool) -> None:
    """The rotary functions of some modelling files, on behalf of `user`."""
    for space in spaces:
        for name in ROPE_NAMES:
            found = vars(space).get(name)
            if not callable(found):
                continue
            label = f"{space.__name__.rpartition('.')[2]}.{name}"
            try:
                detail, replacement = ROPE.probe(original_of(found))
            except probe.Refused as reason:
                report.add("rope", label, LEFT, str(reason))
                continue
            already = seam_of(found) == "rope"
            if bind:
                report.ledger.share(space, name, replacement, user)
            report.add("rope", label, ALREADY if already else SWAPPED if bind else FITS, detail)


# Where to look


def of_instance(model: nn.Module) -> tuple[list[Site], list[ModuleType]]:
    """Every module of a model once but its head, which has a seam of its own, and the Python modules that their classes
    live in."""
    _, head = find_head(model)
    sites: list[Site] = [(module, module) for module in model.modules() if module is not head]
    names = dict.fromkeys(probe.plain_class(module).__module__ for _, module in sites)
    return sites, [
        sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")
    ]


def note_torchs_layer_norms(spaces: list[ModuleType], report: Report) -> None:
    """`nn.LayerNorm` is torch's and every other model's too: patching classes leaves it alone and says so."""
    for space in spaces:
        if "nn.LayerNorm(" in inspect.getsource(space):
            reason = "torch's class, not this model's: patch an instance of the model"
            report.add(
                "layer_norm", f"{space.__name__.rpartition('.')[2]}: nn.LayerNorm", LEFT, reason
            )


def of_classes(spaces: list[ModuleType], configs: list[Any]) -> list[Site]:
    """The module classes that some modelling files define, each with an example without memory."""
    return [
        (cls, example)
        for space in spaces
        for cls in module_classes(space)
        for example in _examples(cls, configs)
    ]


def module_classes(space: ModuleType) -> list[type]:
    """The `nn.Module` classes that a Python module defines."""
    found = [cls for cls in vars(space).values() if isinstance(cls, type)]
    return [c for c in found if issubclass(c, nn.Module) and c.__module__ == space.__name__]


def _examples(cls: type, configs: list[Any]) -> Iterator[nn.Module]:
    """One instance of a class whose forward takes one argument, besides a gate or the routing of experts, if a config
    and small sizes make one."""
    first, *others = probe.arguments(cls) or [None]
    if first is None or tuple(others) not in _FURTHER:
        return
    parameters = inspect.signature(cls).parameters.values()
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    for config in configs:
        arguments = {name: config if "config" in name else 16 for name in required}
        try:
            with torch.device("meta"):
                yield cls(**arguments)
            return
        except Exception:  # a class of another part, or one that needs more than that
            continue
