"""Seam: LoRA.   layer(x) + scaling * B(A(x)), what PEFT's adapters make of a linear layer

PEFT casts x to the adapter's dtype, fp32 by default, keeps that copy for backward, and adds in fp32 what is rounded
again. Here `low_rank_update` reads x as it is, keeps nothing of its size, and rounds once; the gradients that x has
from the layer and from the adapter meet in one kernel.

The layer below is called as the module it is: quantised, sharded, hooked. Adapters are known by their attributes and by
the probe, so every class fits that PEFT derives from a linear layer and that computes the formula. A call that is not
the formula (merged, disabled, one adapter a sequence, DoRA and other variants, a bias, hooks, several at once) or that
the kernels cannot take is the original's. PEFT is never imported here.
"""

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.low_rank_update import OP, low_rank_down, low_rank_up, low_rank_update
from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.apply import original_of

_WIDTH, _OUT, _RANK = 16, 24, 4
_NAME, _SCALING = "probe", 0.75  # of the adapter of a probe
_PARTS = ("base_layer", "lora_A", "lora_B", "lora_dropout")
_OTHERS_BUSINESS = ("adapter_names", "alora_offsets")  # arguments of a call


class LoraSeam:
    """Linear layers with low-rank adapters."""

    name = "lora"
    flags = ("lora",)

    def match(self, module: nn.Module) -> bool:
        """A tuner's layer with pairs of linear layers."""
        tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
        if tuners is None or not isinstance(module, tuners.BaseTunerLayer):
            return False
        parts = module._modules
        if not all(isinstance(parts.get(name), nn.Module) for name in _PARTS):
            return False
        downs: Any = parts["lora_A"]
        return len(downs) > 0 and all(isinstance(down, nn.Linear) for down in downs.values())

    def probe(self, module: nn.Module, general: bool = False) -> tuple[str, Any]:
        """(description, recipe); `Refused` if the class computes something else."""
        draw, cls = probe.Draw(), probe.plain_class(module)
        x, weights = draw.rows(_WIDTH), (draw(_OUT, _WIDTH), draw(_RANK, _WIDTH), draw(_OUT, _RANK))
        original = original_of(cls.forward)  # type: ignore[attr-defined]

        def model(dtype: torch.dtype) -> Any:
            return original(_twin(module, dtype, weights), probe.cast(x, dtype))

        def candidate(dtype: torch.dtype) -> Any:
            twin: Any = _twin(module, dtype, weights)
            small = probe.cast(x, dtype)
            A, B = twin.lora_A[_NAME].weight, twin.lora_B[_NAME].weight
            return low_rank_update(twin.base_layer(small), small, A, B, _SCALING, impl="torch")

        with probe.bench():
            if probe.same(model, candidate, exact=False):
                return "layer(x) + scaling * B(A(x))", cls
        raise probe.Refused("its values are not those of a low-rank update")

    @functools.cache  # noqa: B019 - the seams live as long as the process
    def forward(self, recipe: Any) -> Any:
        """The function that replaces `forward`."""
        original = original_of(recipe.forward)

        @functools.wraps(original)
        def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = _factors(self, x, kwargs)
            if found is None:
                return original(self, x, *args, **kwargs)
            A, B, scale, dropout = found
            x, h = low_rank_down(x, A, dropout)
            return low_rank_up(self.base_layer(x, *args, **kwargs), h, B, scale)

        return forward


def _factors(
    layer: Any, x: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, float, float] | None:
    """A, B, scale and dropout of a call that is the formula and that the kernels can take, else None."""
    if layer.disable_adapters or layer.merged or any(name in kwargs for name in _OTHERS_BUSINESS):
        return None
    downs = layer.lora_A
    active = [name for name in layer.active_adapters if name in downs]
    if len(active) != 1:  # PEFT keeps the sum of several in fp32
        return None
    name = active[0]
    if name in getattr(layer, "lora_variant", ()) or getattr(layer, "use_dora", {}).get(name):
        return None
    down, up, scale = downs[name], layer.lora_B[name], layer.scaling[name]
    dropout = _share(layer.lora_dropout[name])
    plain = _is_plain(down) and _is_plain(up) and isinstance(scale, (int, float))
    if not plain or dropout is None:
        return None
    A, B = down.weight, up.weight
    return (A, B, scale, dropout) if OP.uses_kernels((x, x, A, B, scale)) else None


def _is_plain(layer: Any) -> bool:
    """Whether calling it is the product with its weight, and nobody listens."""
    return type(layer) is nn.Linear and layer.bias is None and not _overheard(layer)


def _share(dropout: Any) -> float | None:
    """How much of x it drops at this moment, None for what is not dropout."""
    if type(dropout) not in (nn.Identity, nn.Dropout) or _overheard(dropout):
        return None
    share = dropout.p if dropout.training and type(dropout) is nn.Dropout else 0.0
    return share if share < 1.0 else None


def _overheard(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        or module._backward_pre_hooks or "forward" in module.__dict__
    )  # fmt: skip


def _twin(module: nn.Module, dtype: torch.dtype, weights: tuple[Tensor, ...]) -> nn.Module:
    """A layer of the same class, small: one adapter, in fp32 as PEFT makes them, over a layer in `dtype`."""
    base, down, up = weights
    cls: Any = probe.plain_class(module)
    twin: nn.Module = cls.__new__(cls)
    nn.Module.__init__(twin)
    linear = probe.linear(probe.cast(base, dtype))
    real = module._modules["base_layer"]
    for name, child in module._modules.items():  # some hold the layer below under a second name
        twin.add_module(name, linear if child is real else nn.ModuleDict())
    pair = {"lora_A": probe.linear(down), "lora_B": probe.linear(up), "lora_dropout": nn.Identity()}
    for name, child in pair.items():
        twin.add_module(name, nn.ModuleDict({_NAME: child}))
    twin.__dict__.update(probe.plain_attributes(module))
    twin.__dict__.update(
        _active_adapter=[_NAME], _disable_adapters=False, merged_adapters=[], scaling={_NAME: _SCALING},
        lora_variant={}, use_dora={_NAME: False}, cast_input_dtype_enabled=True,
    )  # fmt: skip
    return twin
