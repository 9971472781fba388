"""Seam: squared ReLU.   max(x, 0)^2, the activation of Nemotron's, Arcee's and other MLPs without a gate

The activation is a module of its own there (Hugging Face's "relu2"). Candidates are leaves without state
that are named after a ReLU; the probe decides. It lives outside the modelling files, so it is swapped in
models, not in the classes of a model type.
"""

import functools
from typing import Any

import torch
from torch import nn

from liger_kernel.ops.relu_squared import relu_squared
from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.apply import original_of
from liger_kernel.transformers.patch.rematerialise import rebuildable

_WIDTH = 16
_relu_squared = rebuildable(relu_squared)


class ReLUSquaredSeam:
    """Activation modules."""

    name = "relu_squared"
    flags = ("relu_squared",)

    def match(self, module: nn.Module) -> bool:
        """A leaf without parameters and buffers, not one of torch's own, with a forward of one argument."""
        cls = probe.plain_class(module)
        if "relu" not in cls.__name__.lower() or cls.__module__.startswith("torch.nn"):
            return False
        held = module._modules or module._buffers or module._parameters
        return not held and len(probe.arguments(cls)) == 1

    def probe(self, module: nn.Module, general: bool = False) -> tuple[str, Any]:
        """(description, recipe); `Refused` if the class computes something else."""
        draw = probe.Draw()
        x, cls = draw.rows(_WIDTH), probe.plain_class(module)
        original = original_of(cls.forward)  # type: ignore[attr-defined]

        def model(dtype: torch.dtype) -> Any:
            return original(probe.twin(module, {}, {}, general), probe.cast(x, dtype))

        def candidate(dtype: torch.dtype) -> Any:
            return relu_squared(probe.cast(x, dtype), impl="torch")

        with probe.bench():
            if probe.same(model, candidate, exact=True):
                return "max(x, 0)^2", cls
        raise probe.Refused("its values are not those of a squared ReLU")

    @functools.cache  # noqa: B019 - the seams live as long as the process
    def forward(self, recipe: Any) -> Any:
        """The function that replaces `forward`."""
        original = original_of(recipe.forward)
        argument = probe.arguments(recipe)[0]

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **named: Any) -> Any:
            return _relu_squared(args[0] if args else named[argument])

        return forward
