"""`AutoLigerKernelForCausalLM`: `AutoModelForCausalLM` whose models come patched."""

import functools
from typing import Any

from liger_kernel.transformers import monkey_patch
from liger_kernel.transformers.patch.flags import DEFAULTS

# Also importable from here.
MODEL_TYPE_TO_APPLY_LIGER_FN = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
_apply_liger_kernel = monkey_patch._apply_liger_kernel


@functools.cache
def _auto_class() -> type:
    """The class, made on first use: its base is transformers'."""
    from transformers import AutoModelForCausalLM

    class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
        """`AutoModelForCausalLM` that patches what it makes; keyword arguments that are patch flags
        are ours, all others go to transformers untouched."""

        @classmethod
        def from_pretrained(
            cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any
        ) -> Any:
            """As `AutoModelForCausalLM.from_pretrained`, then `patch`."""
            flags = _taken(kwargs)
            model = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
            monkey_patch._apply_liger_kernel_to_instance(model=model, **flags)
            return model

        @classmethod
        def from_config(cls, config: Any, **kwargs: Any) -> Any:
            """As `AutoModelForCausalLM.from_config`, then `patch`."""
            flags = _taken(kwargs)
            model = super().from_config(config, **kwargs)
            monkey_patch._apply_liger_kernel_to_instance(model=model, **flags)
            return model

    AutoLigerKernelForCausalLM.__module__ = __name__
    AutoLigerKernelForCausalLM.__qualname__ = "AutoLigerKernelForCausalLM"
    return AutoLigerKernelForCausalLM


def _taken(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The patch flags, removed from `kwargs`."""
    return {name: kwargs.pop(name) for name in DEFAULTS if name in kwargs}


def __getattr__(name: str) -> Any:
    if name == "AutoLigerKernelForCausalLM":
        return _auto_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
