"""Layers for Hugging Face's `kernels`: what `use_kernels=True` puts into a model.

    from liger_kernel.transformers import hub

    hub.register()
    model = AutoModelForCausalLM.from_pretrained(name, use_kernels=True)      # or kernels.kernelize(model, mode=...)

`kernels` replaces the forward of modules whose class carries a label, and knows nothing but the label. Classes of one
label differ (OLMo 2 and Llama round a norm at different places), so a layer here decides at its first call, by the
probe that `liger_kernel.patch` has for the module's class, and leaves to the class what it does not reproduce.

    RMSNorm, RMSNormZeroCentered, RMSNormGated   norms of transformers' models
    rotary_pos_emb                               their rotary function, in training too
    SwiGLUMLP, GeGLUMLP                          gated MLPs
    SiluAndMul                                   silu(gate) * up of a packed projection

No class of transformers carries the last three: `kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")`.
`liger_kernel.patch` does all of this and the head with its loss, for any model and without labels.
"""

import functools
import importlib
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import _env
from liger_kernel.ops.swiglu import swiglu_packed
from liger_kernel.transformers.patch import probe, seams
from liger_kernel.transformers.patch.gated import GatedSeam
from liger_kernel.transformers.patch.gated_norm import GatedNormSeam
from liger_kernel.transformers.patch.norm import NormSeam

__all__ = ["LAYERS", "Repository", "mapping", "register"]

_NORM, _GATED_NORM, _MLP = NormSeam(), GatedNormSeam(), GatedSeam()


# `kernels` binds `forward` to a module of another class, and allows a layer no other members than these.


class _Layer(nn.Module):
    can_torch_compile = True
    has_backward = True


class LigerRMSNorm(_Layer):
    """RMSNorm, in the class's own rounding."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _first_call(self, _NORM, LigerRMSNorm, hidden_states)


class LigerRMSNormGated(_Layer):
    """RMSNorm with a gate."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _first_call(self, _GATED_NORM, LigerRMSNormGated, hidden_states, gate)


class LigerGatedMLP(_Layer):
    """down(act(gate(x)) * up(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return _first_call(self, _MLP, LigerGatedMLP, x)


class LigerRotary(_Layer):
    """A function that rotates q and k, which `kernels` has made a module."""

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        return _first_rotary_call(self, q, k, cos, sin, unsqueeze_dim)


class LigerSiluAndMul(_Layer):
    """`[*, 2F]`, gate first -> silu(gate) * up, `[*, F]`."""

    def forward(self, x: Tensor) -> Tensor:
        return swiglu_packed(x)


LAYERS: dict[str, type[nn.Module]] = {
    "RMSNorm": LigerRMSNorm,
    "RMSNormZeroCentered": LigerRMSNorm,
    "RMSNormGated": LigerRMSNormGated,
    "rotary_pos_emb": LigerRotary,
    "SwiGLUMLP": LigerGatedMLP,
    "GeGLUMLP": LigerGatedMLP,
    "SiluAndMul": LigerSiluAndMul,
}


@dataclass(frozen=True)
class Repository:
    """What a kernel mapping holds for a label: `load` returns the layer. Nothing is downloaded."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        """The layer of this label."""
        return LAYERS[self.layer_name]

    def __str__(self) -> str:
        return f"liger_kernel, layer {self.layer_name}"


def mapping(*devices: str) -> dict[str, dict[Any, Any]]:
    """label -> device -> `Repository`, for `kernels.register_kernel_mapping` or `use_kernel_mapping`.

    Args:
        devices: device types as `kernels` calls them; by default the CPU and, if it runs Triton, the accelerator.
    """
    names = devices or _devices()
    return {label: {name: Repository(label) for name in names} for label in LAYERS}


def register(*devices: str) -> None:
    """Make these layers the choice of `kernels` and of `use_kernels=True`, for models kernelized from now on.

    Args:
        devices: as in `mapping`.
    Raises:
        ImportError: `kernels` is not installed.
    """
    if not _env.has_module("kernels"):
        raise ImportError(
            "liger_kernel.transformers.hub needs the package kernels, which is not installed: pip install kernels, in "
            "a version that your transformers accepts."
        )
    table = mapping(*devices)
    importlib.import_module("kernels").register_kernel_mapping(table)
    # transformers registers its defaults anew for every model: ours must be among them
    integration = importlib.import_module("transformers.integrations.hub_kernels")
    defaults = getattr(integration, "get_kernel_mapping_transformers", dict)()
    for label, repositories in table.items():
        defaults.setdefault(label, {}).update(repositories)


def _devices() -> list[str]:
    kind = _env.infer_device()
    runs = kind != "cpu" and _env.triton_runs_on(kind)
    return ["cpu", "rocm" if _env.is_hip() else kind] if runs else ["cpu"]


# What a module's forward becomes at its first call


@torch.compiler.disable()
def _first_call(module: nn.Module, seam: Any, layer: type[nn.Module], *args: Any) -> Any:
    """With the seam's function, or the class's own where the seam does not fit."""
    function: Any = probe.plain_class(module).forward
    if seam.match(module):
        _, recipe = seams.decide(seam, module)
        if recipe is not None:
            function = seam.forward(recipe)
            function.__liger_seam__ = seam.name
    _bind(module, layer, function)
    return function(module, *args)


@torch.compiler.disable()
def _first_rotary_call(module: nn.Module, *args: Any) -> Any:
    """As `_first_call`; the function as it was written is the forward of the module's class."""
    written: Any = type(module).forward
    try:
        _, replacement = seams.ROPE.probe(MethodType(written, module))
    except probe.Refused:
        function = written
    else:

        @functools.wraps(written)
        def function(_: nn.Module, *args: Any, **named: Any) -> Any:
            return replacement(*args, **named)

    _bind(module, LigerRotary, function)
    return function(module, *args)


def _bind(module: nn.Module, layer: type[nn.Module], function: Any) -> None:
    """Further calls go there directly, also below accelerate's hooks, which keep what they found in `_old_forward`."""
    for name in ("forward", "_old_forward"):
        if getattr(vars(module).get(name), "__func__", None) is layer.forward:
            setattr(module, name, MethodType(function, module))
