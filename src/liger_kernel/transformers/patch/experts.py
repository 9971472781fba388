"""Seam: routed experts.   sum over k of weight[t, k] * down(gate(x[t]); expert index[t, k])

Modules with the weights of all experts in two tensors, as transformers 5 has them. The replaced `forward` takes the
place of transformers' choice among `eager`, `grouped_mm` and other implementations. Weights may be stored either way
round, gate and up be halves or interleaved, with biases or without; clamps and factors are read from the module at
each call. Experts beyond those that have weights return what they get (LongCat's). Experts whose tokens come sorted, as
many for each, are two batched products (Llama 4's), where only the gate is replaced. What the probe refuses, with the
reason in the report: experts without a gate, norms inside, other gates.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops._op import is_dtensor
from liger_kernel.ops.fused_moe import ACTIVATIONS, fused_moe
from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.apply import original_of
from liger_kernel.transformers.patch.gated import FORMS
from liger_kernel.transformers.patch.rematerialise import rebuildable

_WEIGHTS = {"gate_up_proj", "down_proj"}
_BIASES = {"gate_up_proj_bias", "down_proj_bias"}
_ACT_NAMES = ("act_fn", "activation_fn", "activation", "act")
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
_EXPERTS, _HIDDEN, _INNER, _TOP_K, _DRAWS = 3, 12, 16, 2, 32


@dataclass(frozen=True)
class Recipe:
    """How to compute routed experts from a module's tensors and numbers."""

    cls: type
    activation: str
    interleaved: bool
    transposed: bool
    limit: str | None  # attribute names
    alpha: str | None
    shift: float
    act_name: str | None
    act_type: type | None

    def __call__(
        self, module: Any, x: Tensor, index: Tensor, weights: Tensor, **options: Any
    ) -> Tensor:
        """The experts' output; `options` go to the op."""
        gate_up, down = module.gate_up_proj, module.down_proj
        if self.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        n_experts = len(down)  # the indices of the others belong to no expert
        biases = (getattr(module, name, None) for name in ("gate_up_proj_bias", "down_proj_bias"))
        y = fused_moe(
            x, gate_up[:n_experts], down, index, weights, *biases,
            activation=self.activation, interleaved=self.interleaved, shift=self.shift,
            limit=None if self.limit is None else getattr(module, self.limit),
            alpha=1.0 if self.alpha is None else getattr(module, self.alpha), **options,
        )  # fmt: skip
        if len(gate_up) == n_experts:
            return y
        return y + x * weights.where(index >= n_experts, 0.0).sum(-1, keepdim=True).to(x.dtype)

    def holds(self, module: Any) -> bool:
        """Whether a module still is what was probed, with weights that are plain tensors."""
        same = self.act_name is None or type(getattr(module, self.act_name)) is self.act_type
        weights = (module.gate_up_proj, module.down_proj)
        return same and all(w.is_floating_point() and not is_dtensor(w) for w in weights)


@dataclass(frozen=True)
class Batched:
    """How to compute experts whose tokens come sorted, as many for each; weights are stored `[E, in, out]`."""

    cls: type
    activation: str
    act_name: str | None
    act_type: type | None

    def __call__(self, module: Any, x: Tensor, **options: Any) -> Tensor:
        """The experts' output; `options` go to the op."""
        act = rebuildable(functools.partial(FORMS[self.activation][True], **options))
        sorted_x = x.reshape(len(module.down_proj), -1, x.shape[-1])
        y = torch.bmm(act(torch.bmm(sorted_x, module.gate_up_proj)), module.down_proj)
        return y.reshape(x.shape)

    holds = Recipe.holds


class ExpertsSeam:
    """Modules that hold the weights of all experts."""

    name = "experts"
    flags = ("experts",)

    def match(self, module: nn.Module) -> bool:
        """Weights of three dimensions."""
        return getattr(module._parameters.get("down_proj"), "ndim", 0) == 3

    def probe(self, module: nn.Module, general: bool = False) -> tuple[str, Recipe | Batched]:
        """(description, recipe); `Refused` if no gate reproduces the class."""
        cls = probe.plain_class(module)
        names = probe.arguments(cls)
        if len(names) not in (1, 3):
            raise probe.Refused(f"its forward takes ({', '.join(names)})")
        held = {name for name, p in module._parameters.items() if p is not None}
        if held not in (_WEIGHTS, _WEIGHTS | _BIASES):
            raise probe.Refused(f"its parameters are {', '.join(sorted(held))}")
        others = [
            n for n, child in module.named_children() if any(True for _ in child.parameters())
        ]
        if others:
            raise probe.Refused(f"it has further layers: {', '.join(others)}")
        with probe.bench():
            for recipe in _candidates(module) if len(names) == 3 else _batched(module):
                if _fits(module, recipe, general):
                    return _description(recipe, held), recipe
        raise probe.Refused("its values are not those of gated experts we know")

    @functools.cache  # noqa: B019 - the seams live as long as the process
    def forward(self, recipe: Recipe | Batched) -> Any:
        """The function that replaces `forward`; an instance that has changed since keeps the original."""
        original = original_of(recipe.cls.forward)  # type: ignore[attr-defined]
        names = probe.arguments(recipe.cls)

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **named: Any) -> Any:
            if not recipe.holds(self):
                return original(self, *args, **named)
            given = {**dict(zip(names, args, strict=False)), **named}
            return recipe(self, *(given[name] for name in names))

        return forward


def _candidates(module: nn.Module) -> list[Recipe]:
    """Every gate that the numbers a module holds leave open, the usual ones first."""
    weights: Any = module._parameters
    gate_up, down = weights["gate_up_proj"].shape, weights["down_proj"].shape
    transposed = gate_up[1] == down[2]
    if gate_up[1 + transposed] != 2 * down[2 - transposed]:
        raise probe.Refused(f"its weights have shapes {list(gate_up)} and {list(down)}")
    limit, alpha = (
        next((n for n in names if isinstance(getattr(module, n, None), float)), None)
        for names in (_LIMITS, _ALPHAS)
    )
    act = _activation(module)
    gates = [(None, None, 0.0), (limit, None, 0.0), (limit, alpha, 1.0)]
    cls = probe.plain_class(module)
    return [
        Recipe(cls, form, interleaved, transposed, clamp, factor, shift, *act)
        for clamp, factor, shift in dict.fromkeys(gates)
        for interleaved in (False, True)
        for form in ACTIVATIONS
    ]


def _batched(module: nn.Module) -> list[Batched]:
    cls, act = probe.plain_class(module), _activation(module)
    return [Batched(cls, form, *act) for form in FORMS]


def _activation(module: nn.Module) -> tuple[str | None, type | None]:
    """The attribute that holds the activation, and its type."""
    name = next((n for n in _ACT_NAMES if callable(getattr(module, n, None))), None)
    return name, None if name is None else type(getattr(module, name))


def _description(recipe: Recipe | Batched, held: set[str]) -> str:
    if isinstance(recipe, Batched):
        return f"{recipe.activation}, batched"
    words = [
        recipe.activation,
        "clamped" if recipe.limit else "",
        "interleaved" if recipe.interleaved else "",
        "transposed" if recipe.transposed else "",
        "biases" if held & _BIASES else "",
    ]
    return ", ".join(word for word in words if word)


def _fits(module: nn.Module, recipe: Recipe | Batched, general: bool) -> bool:
    """Equal values in fp32 and bf16, equal gradients in fp32; one expert gets no token."""
    draw = probe.Draw()
    x = torch.cat([draw.rows(_HIDDEN)[0] for _ in range(_DRAWS)])  # many: bf16 errors are compared
    batched = isinstance(recipe, Batched)
    weights: Any = module._parameters
    unweighted = len(weights["gate_up_proj"]) - len(weights["down_proj"])
    if batched:
        x = x[: len(x) // _EXPERTS * _EXPERTS]
    index = torch.tensor([[0, _EXPERTS if unweighted else 1], [1, 0]], device="cpu")
    index = index.repeat(len(x) // 2, 1)
    inputs = (x,) if batched else (x, draw(len(x), _TOP_K).sigmoid())
    shapes = {"gate_up_proj": (2 * _INNER, _HIDDEN), "down_proj": (_HIDDEN, _INNER)}
    tensors = {n: draw(_EXPERTS, *shape) * shape[1] ** -0.5 for n, shape in shapes.items()}
    if unweighted:
        tensors["gate_up_proj"] = draw(_EXPERTS + 1, *shapes["gate_up_proj"]) * _HIDDEN**-0.5
    if batched or recipe.transposed:
        tensors = {name: w.transpose(1, 2).contiguous() for name, w in tensors.items()}
    if weights.get("gate_up_proj_bias") is not None:
        tensors["gate_up_proj_bias"] = draw(_EXPERTS, 2 * _INNER)
        tensors["down_proj_bias"] = draw(_EXPERTS, _HIDDEN)
    sizes = _sizes(module, recipe)
    eager = inspect.unwrap(original_of(recipe.cls.forward))  # type: ignore[attr-defined]
    candidate = functools.partial(recipe, impl="torch")

    def call(function: Any, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        own = {name: probe.cast(tensor, dtype) for name, tensor in tensors.items()}
        new = probe.twin(module, sizes, dict(own), general)
        new._modules.update(module._modules)
        given = [probe.cast(tensor, dtype).requires_grad_() for tensor in inputs]
        routing = [index, *given[1:]] if given[1:] else []
        return function(new, given[0], *routing), [*given, *new._parameters.values()]  # type: ignore[list-item]

    def gradients(function: Any) -> list[Tensor]:
        with torch.enable_grad():
            y, leaves = call(function, torch.float32)
            return list(torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(1)))

    if not probe.same(
        lambda dtype: call(eager, dtype)[0], lambda dtype: call(candidate, dtype)[0], exact=False
    ):
        return False
    return all(
        bool(((a - b).abs() <= 1e-5 * a.abs().max()).all())
        for a, b in zip(gradients(eager), gradients(candidate), strict=True)
    )


def _sizes(module: nn.Module, recipe: Recipe | Batched) -> dict[int, int]:
    """The module's sizes -> those of the probe; the number of experts wins where sizes coincide."""
    weights: Any = module._parameters
    n_experts, *rest = weights["down_proj"].shape
    inner, hidden = rest if isinstance(recipe, Batched) or recipe.transposed else rest[::-1]
    sizes = {2 * inner: 2 * _INNER, inner: _INNER, hidden: _HIDDEN, n_experts: _EXPERTS}
    if (total := len(weights["gate_up_proj"])) != n_experts:
        sizes[total] = _EXPERTS + 1
    return sizes
