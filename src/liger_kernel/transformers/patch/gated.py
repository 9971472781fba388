"""Seam: gated MLP.   down(act(gate(x)) * up(x))

Only the elementwise part is replaced: the linear layers are called as modules, so adapters, quantised
and sharded layers keep working. gate and up are two layers, or the halves of one. The activation is
whatever the module holds. What the probe refuses, with the reason in the report: chunks in the other
order, dropout, clamps, factors it does not know, a product in fp32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernel.ops.geglu import geglu, geglu_packed
from liger_kernel.ops.swiglu import swiglu, swiglu_packed
from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.apply import original_of
from liger_kernel.transformers.patch.rematerialise import rebuildable

# attribute names of gate, up, down, or of gate_up, down
_ROLES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate", "up", "down"),
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("Wi", "Wo"),
    ("fc1", "fc2"),
)
_ACTIVATIONS = ("act_fn", "activation_fn", "activation", "act", "hidden_act")
_FACTORS = (
    "gate_multiplier",
    "down_multiplier",
)  # Falcon-H1: act(gate(x) * a) * up(x), down(...) * b
_HIDDEN, _INNER = 12, 16

# description -> (on gate and up, on the packed product)
_FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "silu": (swiglu, swiglu_packed),
    "gelu, tanh": (
        functools.partial(geglu, approximate="tanh"),
        functools.partial(geglu_packed, approximate="tanh"),
    ),
    "gelu": (
        functools.partial(geglu, approximate="none"),
        functools.partial(geglu_packed, approximate="none"),
    ),
}


@dataclass(frozen=True)
class Recipe:
    """How to compute a gated MLP from its modules."""

    cls: type
    roles: tuple[str, ...]
    form: str
    factors: bool
    act_name: str | None = None
    act_type: type | None = None

    @property
    def packed(self) -> bool:
        return len(self.roles) == 2

    def body(self, **options: Any) -> Callable[[Any, Any], Any]:
        """(module, x) -> the MLP's output; `options` go to the op."""
        act = rebuildable(functools.partial(_FORMS[self.form][self.packed], **options))
        if self.packed:
            gate_up, down = self.roles
            return lambda m, x: getattr(m, down)(act(getattr(m, gate_up)(x)))
        gate, up, down = self.roles
        if not self.factors:
            return lambda m, x: getattr(m, down)(act(getattr(m, gate)(x), getattr(m, up)(x)))
        a, b = _FACTORS

        def scaled(m: Any, x: Any) -> Any:
            y = act(getattr(m, gate)(x), getattr(m, up)(x), gate_multiplier=getattr(m, a))
            return getattr(m, down)(y) * getattr(m, b)

        return scaled


class GatedSeam:
    """Gated MLP modules."""

    name = "gated_mlp"
    flags = ("swiglu", "geglu")

    def match(self, module: nn.Module) -> bool:
        """Linear layers under known names, no parameters of its own, one argument."""
        own = any(p is not None for p in module._parameters.values())
        return (
            not own
            and bool(_roles(module))
            and len(probe.arguments(probe.plain_class(module))) == 1
        )

    def probe(self, module: nn.Module, general: bool = False) -> tuple[str, Recipe]:
        """(description, recipe); `Refused` if no activation reproduces the class."""
        roles = _roles(module)
        others = [
            name
            for name, child in module.named_children()
            if name not in roles and any(True for _ in child.parameters())
        ]
        if others:
            raise probe.Refused(f"it has further layers: {', '.join(others)}")
        name = next((n for n in _ACTIVATIONS if callable(getattr(module, n, None))), None)
        kind = None if name is None else type(getattr(module, name))
        factors = all(hasattr(module, factor) for factor in _FACTORS)
        with probe.bench():
            for form in ("silu",) if factors else _FORMS:
                recipe = Recipe(probe.plain_class(module), roles, form, factors, name, kind)
                if _fits(module, recipe, general):
                    packed = ", packed" if recipe.packed else ""
                    return f"{form}{packed}{', factors' if factors else ''}", recipe
        raise probe.Refused("it is not down(act(gate) * up) with silu or gelu")

    @functools.cache  # noqa: B019 - the seams live as long as the process
    def forward(self, recipe: Recipe) -> Any:
        """The function that replaces `forward`; an instance with another activation keeps the original."""
        original = original_of(recipe.cls.forward)  # type: ignore[attr-defined]
        argument = probe.arguments(recipe.cls)[0]
        body, act_name, act_type = recipe.body(), recipe.act_name, recipe.act_type

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **named: Any) -> Any:
            x = args[0] if args else named[argument]
            if act_name is not None and type(getattr(self, act_name)) is not act_type:
                return original(self, x)
            return body(self, x)

        return forward


def _roles(module: nn.Module) -> tuple[str, ...]:
    """Attribute names of (gate, up, down) or (gate_up, down); empty if there are none."""
    for names in _ROLES:
        layers: list[Any] = [module._modules.get(name) for name in names]
        if any(layer is None or not hasattr(layer, "in_features") for layer in layers):
            continue
        if len(names) == 3 or layers[0].out_features == 2 * layers[1].in_features:
            return names
    return ()


def _fits(module: nn.Module, recipe: Recipe, general: bool) -> bool:
    draw = probe.Draw()
    first: Any = module._modules[recipe.roles[0]]
    inner = 2 * _INNER if recipe.packed else _INNER
    sizes = {first.in_features: _HIDDEN, first.out_features: inner}
    if recipe.packed:
        sizes[first.out_features // 2] = _INNER
    x = draw.rows(_HIDDEN)
    weights = {name: draw(inner, _HIDDEN) * _HIDDEN**-0.5 for name in recipe.roles[:-1]}
    weights[recipe.roles[-1]] = draw(_HIDDEN, _INNER) * _INNER**-0.5
    forward, body = original_of(probe.plain_class(module).forward), recipe.body(impl="torch")

    def model(dtype: torch.dtype) -> nn.Module:
        new = probe.twin(module, sizes, {}, general)
        for name, child in module.named_children():
            dropout = general and isinstance(child, nn.Dropout)
            new._modules[name] = nn.Dropout(0.5) if dropout else probe.bare(child)
        for name, weight in weights.items():
            new._modules[name] = probe.linear(probe.cast(weight, dtype))
        return new

    return probe.same(
        lambda dtype: forward(model(dtype), probe.cast(x, dtype)),
        lambda dtype: body(model(dtype), probe.cast(x, dtype)),
        exact=True,
    )
