"""Seam: LayerNorm.   y = (x - mean(x)) / std(x) * weight + bias

`nn.LayerNorm` itself and every class that computes the same over the last dimension, found by shape (a leaf with
at most two vectors) and by the probe: with a weight, with both, with neither, cast to fp32 on the way or not, with
1 + weight (Nemotron's), over the channels of `[N, C, H, W]` where the instance says so (SAM's).
"""

import functools
from typing import Any

import torch
from torch import nn

from liger_kernel.ops.layer_norm import layer_norm
from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.apply import original_of
from liger_kernel.transformers.patch.norm import eps_name
from liger_kernel.transformers.patch.rematerialise import rebuildable

_CHANNELS = "channels_first"  # some attribute's value
_EPS = 1e-5  # of classes that hold none: torch's default
# Written out because their models take forward-mode derivatives, which torch's layer_norm gets wrong and ours has not.
_DUAL = frozenset({"GradiumPhononTTSFlowLayerNorm", "PocketTTSFlowLayerNorm"})
_WIDTH = 16
_norm = rebuildable(layer_norm)


class LayerNormSeam:
    """LayerNorm modules."""

    name = "layer_norm"
    flags = ("layer_norm",)

    def match(self, module: nn.Module) -> bool:
        """A leaf with an eps or a shape, nothing but a weight and a bias, and a forward of one argument."""
        cls = probe.plain_class(module)
        if cls.__module__.startswith("torch.nn") and cls is not nn.LayerNorm:
            return False
        held = {name for name, p in module._parameters.items() if p is not None}
        leaf = not module._modules and not module._buffers and held <= {"weight", "bias"}
        known = eps_name(module) is not None or "normalized_shape" in vars(module)
        return leaf and known and len(probe.arguments(cls)) == 1

    def probe(self, module: nn.Module, general: bool = False) -> tuple[str, Any]:
        """(description, recipe); `Refused` if the class computes something else."""
        cls: Any = probe.plain_class(module)
        if cls.__name__ in _DUAL:
            raise probe.Refused("its model takes forward-mode derivatives of it")
        if not _over_rows(module):
            raise probe.Refused("it normalises over several dimensions")
        settings = {k: v for k, v in probe.plain_attributes(module).items() if isinstance(v, str)}
        if general and settings:
            raise probe.Refused(f"what it does depends on its {', '.join(settings)}")
        name = eps_name(module) or "eps"
        if getattr(module, name, _EPS) is None:
            raise probe.Refused("its eps depends on the dtype")
        held = [n for n in ("weight", "bias") if module._parameters.get(n) is not None]
        channels = next((k for k, v in settings.items() if v == _CHANNELS), None)
        with probe.bench():
            for offset in (0.0, 1.0) if "weight" in held else (0.0,):
                if _fits(module, general, name, offset, channels is not None):
                    shown = [f"1 + {n}" if offset and n == "weight" else n for n in held]
                    shown += ["channels first"] if channels else []
                    return ", ".join(shown) or "no parameters", (cls, name, offset, channels)
        raise probe.Refused("its values are not those of a LayerNorm")

    @functools.cache  # noqa: B019 - the seams live as long as the process
    def forward(self, recipe: Any) -> Any:
        """The function that replaces `forward`."""
        cls, name, offset, channels = recipe
        original = original_of(cls.forward)
        argument = probe.arguments(cls)[0]
        torchs = original is nn.LayerNorm.forward

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **named: Any) -> Any:
            x = args[0] if args else named[argument]
            if not _over_rows(self) or (channels and getattr(self, channels) != _CHANNELS):
                return original(self, x)
            kind = x.device.type
            if kind != "cpu" and torch.is_autocast_enabled(kind):
                # Autocast runs torch's layer_norm in fp32, and a class of its own as it is written.
                if not torchs:
                    return original(self, x)
                x = x.float()
            weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
            if offset:
                weight = weight + offset
            eps = getattr(self, name, _EPS)
            if channels:
                return _norm(x.movedim(1, -1), weight, bias, eps).movedim(-1, 1)
            return _norm(x, weight, bias, eps)

        return forward


def _over_rows(module: Any) -> bool:
    """Whether it normalises over the last dimension alone: another instance of its class may not."""
    weight = module._parameters.get("weight")
    one = weight is None or weight.dim() == 1
    return one and len(getattr(module, "normalized_shape", (1,))) == 1


def _fits(module: nn.Module, general: bool, name: str, offset: float, channels_first: bool) -> bool:
    draw = probe.Draw()
    x = draw.rows(_WIDTH)
    if channels_first:
        x = x.unflatten(1, (2, -1)).movedim(-1, 1)
    vectors = {n: draw(_WIDTH) for n, p in module._parameters.items() if p is not None}
    sizes = {size: _WIDTH for p in module._parameters.values() if p is not None for size in p.shape}
    sizes |= dict.fromkeys(getattr(module, "normalized_shape", ()), _WIDTH)
    forward = original_of(probe.plain_class(module).forward)  # type: ignore[attr-defined]

    def cast(dtype: torch.dtype) -> dict[str, Any]:
        held = {n: probe.cast(v, dtype) for n, v in vectors.items()}
        return {**dict.fromkeys(module._parameters), **held}

    def original(dtype: torch.dtype) -> Any:
        return forward(probe.twin(module, sizes, cast(dtype), general), probe.cast(x, dtype))

    def candidate(dtype: torch.dtype) -> Any:
        held, eps = cast(dtype), getattr(module, name, _EPS)
        weight, bias = held.get("weight"), held.get("bias")
        if offset:
            weight = held["weight"] + offset
        if channels_first:
            rows = probe.cast(x, dtype).movedim(1, -1)
            return layer_norm(rows, weight, bias, eps, impl="torch").movedim(-1, 1)
        return layer_norm(probe.cast(x, dtype), weight, bias, eps, impl="torch")

    return probe.same(original, candidate, exact=False)
