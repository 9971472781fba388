"""Seam: RMSNorm with a gate.   norm(x) * weight * act(gate), or norm(x * act(gate)) * weight

Recognised by shape (a leaf with one vector, an eps and a forward of x and gate) and by the probe. What a class
keeps in attributes (activation, order, groups) is read at each call; what it does not is found by the probe.
"""

import functools
import itertools
from typing import Any

import torch
from torch import nn

from liger_kernel.ops.gated_rms_norm import gated_rms_norm
from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.apply import original_of
from liger_kernel.transformers.patch.norm import eps_name
from liger_kernel.transformers.patch.rematerialise import rebuildable

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
_ORDER, _ACT = "norm_before_gate", "activation"
_GROUPS = {
    "group_size": 8,
    "n_groups": 2,
}  # attribute -> what makes two groups of the probe's width
_WIDTH = 16
_norm = rebuildable(gated_rms_norm)


class GatedNormSeam:
    """RMSNorm modules with a gate."""

    name = "gated_norm"
    flags = ("rms_norm",)

    def match(self, module: nn.Module) -> bool:
        """A leaf with an eps, one vector, and a forward of something and a gate."""
        held = {name for name, p in module._parameters.items() if p is not None}
        leaf = not module._modules and not module._buffers and held == {"weight"}
        arguments = probe.arguments(probe.plain_class(module))
        return leaf and eps_name(module) is not None and arguments[1:] == ["gate"]

    def probe(self, module: nn.Module, general: bool = False) -> tuple[str, Any]:
        """(description, recipe); `Refused` if no combination reproduces the class."""
        held = vars(module)
        if held.get(_ACT, "silu") not in _ACTIVATIONS:
            raise probe.Refused(f"its activation is {held[_ACT]!r}")
        orders = (held[_ORDER],) if _ORDER in held else (True, False)
        acts = (_ACTIVATIONS[held[_ACT]],) if _ACT in held else ("silu", "sigmoid")
        with probe.bench():
            for order, act, mode in itertools.product(orders, acts, ("llama", "gemma")):
                # What the module holds may be otherwise in another instance of the class.
                may_be = itertools.product(
                    (True, False) if general and _ORDER in held else (order,),
                    ("silu", "sigmoid") if general and _ACT in held else (act,),
                )
                if all(_fits(module, general, *one, mode) for one in may_be):
                    detail = f"{act}, {'norm' if order else 'gate'} first, {mode} casts"
                    cls = probe.plain_class(module)
                    return detail, (cls, eps_name(module), order, act, mode)
        raise probe.Refused("its values are not those of a gated RMSNorm we know")

    @functools.cache  # noqa: B019 - the seams live as long as the process
    def forward(self, recipe: Any) -> Any:
        """The function that replaces `forward`; a call without a gate goes to the original."""
        cls, eps, order, act, mode = recipe
        original = original_of(cls.forward)
        first, second = probe.arguments(cls)

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **named: Any) -> Any:
            x = args[0] if args else named[first]
            gate = args[1] if len(args) > 1 else named.get(second)
            chosen = _ACTIVATIONS.get(getattr(self, _ACT, act))
            if gate is None or chosen is None:
                return original(self, x, gate)
            how = (getattr(self, _ORDER, order), _group_size(self, x), chosen, mode)
            return _norm(x, gate, self.weight, getattr(self, eps), *how)

        return forward


def _group_size(module: Any, x: torch.Tensor) -> int | None:
    size = getattr(module, "group_size", None)
    return size if size is not None else x.shape[-1] // getattr(module, "n_groups", 1)


def _fits(module: nn.Module, general: bool, order: bool, act: str, mode: str) -> bool:
    draw = probe.Draw()
    x, z, w = draw.rows(_WIDTH), draw(1, 8, _WIDTH) * 2.0, draw(_WIDTH)
    forward = original_of(probe.plain_class(module).forward)  # type: ignore[attr-defined]
    settings = {_ORDER: order, _ACT: act, **_GROUPS}

    def twin(dtype: torch.dtype) -> Any:
        new = probe.twin(module, {}, {"weight": probe.cast(w, dtype)}, general)
        new.__dict__.update({k: v for k, v in settings.items() if k in vars(module)})
        return new

    def candidate(dtype: torch.dtype) -> Any:
        new = twin(dtype)
        inputs = (probe.cast(x, dtype), probe.cast(z, dtype), new.weight)
        how = (order, _group_size(new, x), act, mode)
        return gated_rms_norm(*inputs, getattr(module, str(eps_name(module))), *how, impl="torch")

    return probe.same(
        lambda dtype: forward(twin(dtype), probe.cast(x, dtype), probe.cast(z, dtype)),
        candidate,
        exact=True,
    )
