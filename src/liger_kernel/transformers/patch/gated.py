"""Seam: gated MLP.   down(act(gate(x)) * up(x))

The linear layers are called as modules, so adapters, quantised and sharded layers keep working; only a
plain `down` joins the activation and the product, which are then never kept (`ops.gated_linear`). gate
and up are two layers, or the halves of one. The activation is whatever the module holds, and so is one
layer between product and down (T5's dropout, BitNet's norm). What the probe refuses, with the reason in
the report: clamps, other dropout, factors it does not know, a product in fp32.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernel.ops.gated_linear import through
from liger_kernel.ops.geglu import geglu, geglu_packed
from liger_kernel.ops.reglu import reglu, reglu_packed
from liger_kernel.ops.swiglu import swiglu, swiglu_packed
from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.apply import original_of
from liger_kernel.transformers.patch.rematerialise import rebuildable

# attribute names of gate, up, down, or of gate_up, down
_ROLES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
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
_HIDDEN, _INNER, _DRAWS = 12, 16, 8

# description -> (on gate and up, on the packed product)
FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "silu": (swiglu, swiglu_packed),
    "gelu, tanh": (
        functools.partial(geglu, approximate="tanh"),
        functools.partial(geglu_packed, approximate="tanh"),
    ),
    "gelu": (
        functools.partial(geglu, approximate="none"),
        functools.partial(geglu_packed, approximate="none"),
    ),
    "relu": (reglu, reglu_packed),
}
_HINTS = {"clamp": "it clamps", "dropout": "it has dropout", "float": "it computes in fp32"}


@dataclass(frozen=True)
class Recipe:
    """How to compute a gated MLP from its modules."""

    cls: type
    roles: tuple[str, ...]
    form: str
    factors: bool
    act_name: str | None = None
    act_type: type | None = None
    between: str | None = None  # what is called on the product
    up_first: bool = False  # the order of the halves

    @property
    def packed(self) -> bool:
        return len(self.roles) == 2

    @property
    def description(self) -> str:
        """The form and what is special about it."""
        special = {"packed": self.packed, "up first": self.up_first, "factors": self.factors}
        last = [f"then {self.between}"] if self.between else []
        return ", ".join([self.form, *(word for word, holds in special.items() if holds), *last])

    def operands(self) -> Callable[[Any, Any], tuple[Any, Any]]:
        """(module, x) -> gate and up, or both packed and None."""
        first = self.roles[0]
        if self.up_first:
            return lambda m, x: tuple(reversed(getattr(m, first)(x).chunk(2, -1)))
        if self.packed:
            return lambda m, x: (getattr(m, first)(x), None)
        second = self.roles[1]
        return lambda m, x: (getattr(m, first)(x), getattr(m, second)(x))

    def body(self, **options: Any) -> Callable[[Any, Any], Any]:
        """(module, x) -> the MLP's output; `options` go to the ops."""
        pair, packed = (rebuildable(functools.partial(f, **options)) for f in FORMS[self.form])
        activation = self.form.replace(", ", "_")  # as `gated_linear` calls it
        operands, down, between = self.operands(), self.roles[-1], self.between
        factors = _FACTORS if self.factors else ()

        def body(m: Any, x: Any) -> Any:
            gate, up = operands(m, x)
            scale, after = (getattr(m, name) for name in factors) if factors else (1.0, 1.0)
            layer = getattr(m, down)

            def product() -> Any:
                more = {} if scale == 1.0 else {"gate_multiplier": scale}
                return packed(gate, **more) if up is None else pair(gate, up, **more)

            if between is None:
                y = through(layer, gate, up, activation, product, scale, **options)
                return y if after == 1.0 else y * after
            y, dtype = getattr(m, between)(product()), layer.weight.dtype
            # T5 keeps this layer in fp32 in half-precision models
            return layer(y.to(dtype) if dtype.is_floating_point else y)

        return body


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
            if name not in roles
            and (isinstance(child, nn.Dropout) or any(True for _ in child.parameters()))
        ]
        if len(others) > 1:
            raise probe.Refused(f"it has further layers: {', '.join(others)}")
        name = next((n for n in _ACTIVATIONS if callable(getattr(module, n, None))), None)
        kind = None if name is None else type(getattr(module, name))
        between = others[0] if others else None
        factors = all(hasattr(module, factor) for factor in _FACTORS)
        with probe.bench():
            for form, up_first in itertools.product(("silu",) if factors else FORMS, (False, True)):
                if up_first and len(roles) == 3:
                    continue
                cls = probe.plain_class(module)
                recipe = Recipe(cls, roles, form, factors, name, kind, between, up_first)
                if _fits(module, recipe, general):
                    return recipe.description, recipe
            hint = _hint(module, name)
        raise probe.Refused(f"it is not down(act(gate) * up) with silu, gelu or relu{hint}")

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


def _hint(module: nn.Module, act_name: str | None) -> str:
    """What may be the cause: its activation, and what its code calls that the forms do not have."""
    code = inspect.unwrap(original_of(probe.plain_class(module).forward)).__code__  # type: ignore[attr-defined]
    found = [words for name, words in _HINTS.items() if name in code.co_names]
    if act_name is not None:
        act = getattr(module, act_name)
        gate, one = probe.Draw()(64), torch.ones(64, device="cpu")
        if not any(
            torch.allclose(act(gate), pair(gate, one, impl="torch")) for pair, _ in FORMS.values()
        ):
            found.insert(0, f"its activation is {type(act).__name__}")
    return f": {', '.join(found)}" if found else ""


class _Pattern(nn.Module):
    """In a probe stands for the layer between product and down: shows whether it is called, on what."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.shape[-1], dtype=x.dtype, device=x.device).sub(3)


def _fits(module: nn.Module, recipe: Recipe, general: bool) -> bool:
    draw = probe.Draw()
    first: Any = module._modules[recipe.roles[0]]
    inner = 2 * _INNER if recipe.packed else _INNER
    sizes = {first.in_features: _HIDDEN, first.out_features: inner}
    if recipe.packed:
        sizes[first.out_features // 2] = _INNER
    x = torch.cat([draw.rows(_HIDDEN) for _ in range(_DRAWS)], 1)  # few of them round in bf16
    weights = {name: draw(inner, _HIDDEN) * _HIDDEN**-0.5 for name in recipe.roles[:-1]}
    weights[recipe.roles[-1]] = draw(_HIDDEN, _INNER) * _INNER**-0.5
    forward, body = original_of(probe.plain_class(module).forward), recipe.body(impl="torch")

    def model(dtype: torch.dtype) -> nn.Module:
        new = probe.twin(module, sizes, {}, general)
        for name, child in module.named_children():
            new._modules[name] = _Pattern() if name == recipe.between else probe.bare(child)
        if (
            dtype == torch.bfloat16
            and recipe.form == "gelu, tanh"
            and recipe.act_name in new._modules
        ):
            # Some write it out (gelu_new) and round at every step: equal in fp32 only, and coarser than torch's.
            new._modules[recipe.act_name] = nn.GELU(approximate="tanh")
        for name, weight in weights.items():
            new._modules[name] = probe.linear(probe.cast(weight, dtype))
        return new

    return probe.same(
        lambda dtype: forward(model(dtype), probe.cast(x, dtype)),
        lambda dtype: body(model(dtype), probe.cast(x, dtype)),
        exact=True,
    )
