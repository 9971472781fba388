"""What the patcher does not look at although it is a norm, a gated MLP, experts or a rotary function.

The patcher's report counts what a seam has looked at. Shares of that would hide what no seam looks at, so these places
are found here by other means (names of classes, shapes of linear layers, names of functions) and reported as left.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.report import LEFT, Report
from liger_kernel.transformers.patch.rotary import NAMES as ROPE_NAMES

_NORM = re.compile(r"Norm(Gated|1P)?$")
_OTHER_NORMS = re.compile(r"(Batch|Group|Instance|Weight|_Weight)Norm|^_")
_ROTARY = re.compile(r"apply_\w*(rot|rope)")


def add_unseen(model: nn.Module, report: Report) -> None:
    """Add a row for each place that `report` should have and has not."""
    seen = {row.target for row in report.rows}
    for module in model.modules():
        cls = probe.plain_class(module)
        if cls.__name__ not in seen:
            seam = _seam(cls, module)
            if seam is not None:
                takes = ", ".join(probe.arguments(cls))
                report.add(
                    seam, cls.__name__, LEFT, f"no seam is made for its form; it takes ({takes})"
                )
    for space in {probe.plain_class(module).__module__ for module in model.modules()}:
        for name in _other_rotary_functions(space):
            report.add("rope", f"{space.rpartition('.')[2]}.{name}", LEFT, "no seam is made for it")


def _seam(cls: type, module: nn.Module) -> str | None:
    name = cls.__name__
    if _NORM.search(name) and not _OTHER_NORMS.search(name) and not module._modules:
        return "rms_norm" if "rms" in name.lower() else "layer_norm"
    if name.endswith("Experts"):
        return "experts"
    own = module._parameters and "mlp" not in name.lower()  # a mixer of states
    return "gated_mlp" if _is_gated(module) and not own else None


def _is_gated(module: nn.Module) -> bool:
    """Two equal layers to another width and one back; or one to twice that width."""
    shapes = [
        (layer.in_features, layer.out_features)
        for layer in module.children()
        if isinstance(layer, nn.Linear)
    ]
    if len(shapes) == 3:
        first, second, last = shapes
        return first == second and last == first[::-1] and first[0] != first[1]
    if len(shapes) == 2:
        (a, b), (c, d) = shapes
        return a == d and b == 2 * c and a != c
    return False


def _other_rotary_functions(space: str) -> Iterator[str]:
    """Rotary functions and methods of a modelling file that are not the known ones, nor call them or serve them."""
    held = vars(sys.modules[space])
    known = [held[name] for name in ROPE_NAMES if inspect.isfunction(held.get(name))]
    serving = {called for function in known for called in _called(function)}
    functions = {name: value for name, value in held.items() if inspect.isfunction(value)}
    for cls in held.values():
        if isinstance(cls, type) and cls.__module__ == space:
            functions |= {
                n: getattr(cls, n) for n in vars(cls) if inspect.isfunction(getattr(cls, n))
            }
    for name, function in functions.items():
        rotary = _ROTARY.search(name) and name not in ROPE_NAMES and function.__module__ == space
        if rotary and name not in serving and _called(function).isdisjoint(ROPE_NAMES):
            yield name


def _called(function: Any) -> set[str]:
    """Names that a function's code looks up, in its comprehensions too."""
    todo, names = [inspect.unwrap(function).__code__], set()
    while todo:
        code = todo.pop()
        names.update(code.co_names)
        todo += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return names
