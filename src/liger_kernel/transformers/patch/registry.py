"""The contract's `apply_liger_kernel_to_*` functions, made from a table of their flags.

A model type needs no line here to be patched: `patch(model)` and the generic entries go by structure. A line fixes what
frameworks read off a function: names, order and defaults of its flags. To add one, add it to `TABLE`.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from liger_kernel.transformers.patch.flags import DEFAULTS, UNNAMED, hint
from liger_kernel.transformers.patch.model import patch_instance, patch_type
from liger_kernel.transformers.patch.report import Report

PREFIX = "apply_liger_kernel_to_"

_SWIGLU = "rope -cross_entropy fused_linear_cross_entropy rms_norm swiglu"
_GEGLU = "rope -cross_entropy fused_linear_cross_entropy rms_norm geglu"
_VISION = "rope -cross_entropy fused_linear_cross_entropy layer_norm rms_norm"
_WHOLE = "-cross_entropy fused_linear_cross_entropy"
_NO_ROPE = f"-{_SWIGLU}"


@dataclass(frozen=True)
class Family:
    """One function: flags in order, `-` for those off by default, `**` if it takes every other flag too."""

    flags: str
    model_types: tuple[str, ...] = ()  # if they are not just the function's own name


TABLE: dict[str, Family] = {
    "granite": Family("rope cross_entropy -fused_linear_cross_entropy rms_norm swiglu"),
    "llama": Family(_SWIGLU),
    "smollm3": Family(_SWIGLU),
    "llava": Family(f"{_WHOLE} model **"),
    "llama4": Family(f"{_SWIGLU} model layer_norm", ("llama4_text", "llama4")),
    "mllama": Family(f"{_VISION} swiglu", ("mllama", "mllama_text_model")),
    "ministral": Family(_SWIGLU),
    "mistral": Family(_SWIGLU),
    "nemotron": Family(f"relu_squared {_WHOLE} model **"),
    "mixtral": Family(_SWIGLU),
    "muse_glimmer": Family(f"{_VISION} swiglu"),
    "pixtral": Family("rope rms_norm swiglu"),
    "gemma": Family(_GEGLU),
    "gemma2": Family(_GEGLU),
    "gemma3_text": Family(_GEGLU),
    "gemma3": Family(f"{_VISION} geglu"),
    "gemma4_text": Family(f"-{_GEGLU}"),
    "gemma4": Family("-rope -cross_entropy fused_linear_cross_entropy -layer_norm rms_norm geglu"),
    "paligemma": Family(f"{_VISION} geglu"),
    "qwen2": Family(_SWIGLU),
    "qwen3": Family(_SWIGLU),
    "qwen3_moe": Family(_SWIGLU),
    "gpt_oss": Family("rope -cross_entropy fused_linear_cross_entropy rms_norm -swiglu"),
    "qwen2_vl": Family(
        "rope -cross_entropy fused_linear_cross_entropy rms_norm layer_norm swiglu",
        ("qwen2_vl", "qwen2_vl_text"),
    ),
    "qwen2_5_vl": Family(_SWIGLU, ("qwen2_5_vl", "qwen2_5_vl_text")),
    "qwen3_vl": Family(
        "rope -cross_entropy fused_linear_cross_entropy rms_norm -swiglu",
        ("qwen3_vl", "qwen3_vl_text"),
    ),
    "qwen3_vl_moe": Family(_SWIGLU, ("qwen3_vl_moe", "qwen3_vl_moe_text")),
    "phi3": Family(_SWIGLU),
    "olmo2": Family(_SWIGLU),
    "olmo3": Family(_SWIGLU),
    "glm4": Family(_NO_ROPE),
    "glm4v": Family(_NO_ROPE),
    "glm4v_moe": Family(_NO_ROPE),
    "internvl": Family(f"{_WHOLE} rms_norm layer_norm model **"),
    "smolvlm": Family(f"{_WHOLE} rms_norm layer_norm model **"),
    "falcon_h1": Family(_SWIGLU),
    "qwen3_next": Family(_NO_ROPE),
    "qwen3_5": Family(_NO_ROPE, ("qwen3_5", "qwen3_5_text")),
    "qwen3_5_moe": Family(_NO_ROPE, ("qwen3_5_moe", "qwen3_5_moe_text")),
    "hunyuan_v1_dense": Family(_SWIGLU),
    "hunyuan_v1_moe": Family(_SWIGLU),
    "deepseek_v2": Family(_NO_ROPE),
    "deepseek_v3": Family(_NO_ROPE),
    "deepseek_v4": Family("-rope -cross_entropy fused_linear_cross_entropy rms_norm -swiglu"),
    "exaone4": Family(_SWIGLU),
}
# The flags of every other model type.
ANY = Family(
    "rope -cross_entropy fused_linear_cross_entropy rms_norm swiglu geglu layer_norm relu_squared experts"
)


def make(name: str, family: Family, model_type: str) -> Any:
    """The function `apply_liger_kernel_to_<name>`, with a signature that tells the truth."""
    full_name = PREFIX + name
    signature = _signature(family)
    listed = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_all = len(listed) < len(signature.parameters)
    known = DEFAULTS if takes_all else [*(p.name for p in listed), *UNNAMED]

    def apply(*args: Any, **flags: Any) -> Report:
        for flag in flags:
            if flag not in known and flag != "model":
                raise TypeError(
                    f"{full_name}() got an unexpected keyword argument {flag!r}.{hint(flag, known)}"
                )
        unnamed = {flag: flags.pop(flag) for flag in UNNAMED if flag in flags}
        bound = signature.bind(*args, **flags)
        bound.apply_defaults()
        chosen = {**bound.arguments, **bound.arguments.get("flags", {}), **unnamed}
        model = chosen.pop("model")
        rest = DEFAULTS if takes_all else {}
        complete = {flag: bool(chosen.get(flag, rest.get(flag, False))) for flag in DEFAULTS}
        complete["rematerialise"] = bool(chosen.get("rematerialise"))  # as the contract: off
        complete["lora"] = bool(chosen.get("lora", True))
        if "experts" not in chosen:  # the contract's flags know experts as part of the MLP
            complete["experts"] = complete["swiglu"] or complete["geglu"]
        return (
            patch_type(model_type, complete)
            if model is None
            else patch_instance(model, complete, bind=True)
        )

    apply.__name__ = apply.__qualname__ = full_name
    apply.__module__ = "liger_kernel.transformers.monkey_patch"
    apply.__doc__ = f"""Patch {name}: one model if `model` is given, else its classes, now and for models to come.

    Args:
        {", ".join(p.name for p in listed if p.name != "model")}: what to swap, see `liger_kernel.patch`.
        experts, lora, rematerialise: by keyword, not in the signature; the first follows swiglu or geglu, lora is on,
            rematerialise off.
        model: a loaded model. Without one the classes of the modelling file are changed in place.
    Returns:
        A `Report`, printable and with `undo()`.
    Raises:
        TypeError: an unknown flag, with the nearest known one.
    """
    apply.__signature__ = signature  # type: ignore[attr-defined]
    return apply


def _signature(family: Family) -> inspect.Signature:
    """Flags in the order of the table; `model` last unless it stands elsewhere."""
    words = family.flags.split()
    if "model" not in words:
        words.append("model")
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for word in words:
        if word == "**":
            parameters.append(
                inspect.Parameter("flags", inspect.Parameter.VAR_KEYWORD, annotation=bool)
            )
        elif word == "model":
            parameters.append(inspect.Parameter("model", either, default=None, annotation=Any))
        else:
            flag, default = word.removeprefix("-"), not word.startswith("-")
            parameters.append(inspect.Parameter(flag, either, default=default, annotation=bool))
    return inspect.Signature(parameters, return_annotation=Report)


FUNCTIONS: dict[str, Any] = {
    PREFIX + name: make(name, family, (family.model_types or (name,))[0])
    for name, family in TABLE.items()
}
MODEL_TYPES: dict[str, Any] = {
    model_type: FUNCTIONS[PREFIX + name]
    for name, family in TABLE.items()
    for model_type in family.model_types or (name,)
}


def function_for(model_type: str) -> Any:
    """The function of a model type: from the table, else a general one; None for a type transformers does not know."""
    if model_type in MODEL_TYPES:
        return MODEL_TYPES[model_type]
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return make(model_type, ANY, model_type) if model_type in CONFIG_MAPPING else None
