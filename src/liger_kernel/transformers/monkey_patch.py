"""The contract's entry points of the patcher, under the names frameworks import.

`apply_liger_kernel_to_<model type>` exists for the types of `patch/registry.py` and, made on
demand, for every other type that the installed transformers knows. The two generic entries are what
Trainer and others call for any model: they never raise, so that an unknown model or flag does not
stop a training run.
"""

import inspect
import logging
from typing import Any

from liger_kernel import _env
from liger_kernel.transformers.patch import registry
from liger_kernel.transformers.patch.flags import DEFAULTS, UNNAMED, warn_unknown
from liger_kernel.transformers.patch.model import unwrapped
from liger_kernel.transformers.patch.report import Report

logger = logging.getLogger(__name__)

if not _env.has_module("transformers"):
    raise ImportError(
        "liger_kernel.transformers.monkey_patch needs transformers: pip install transformers."
    )

MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Any] = dict(registry.MODEL_TYPES)
globals().update(registry.FUNCTIONS)

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "MODEL_TYPE_TO_APPLY_LIGER_FN",
    "_apply_liger_kernel",
    "_apply_liger_kernel_to_instance",
    *registry.FUNCTIONS,
]


def _apply_liger_kernel(model_type: str, **flags: Any) -> Report | None:
    """Patch the classes of a model type; None and a log line for a type nobody knows.

    Args:
        model_type: `config.model_type`.
        flags: as in `liger_kernel.patch`. None means off; a flag the type does not have is dropped;
            an unknown one warns once.
    """
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type) or (
        registry.function_for(model_type) if model_type else None
    )
    if function is None:
        logger.info(
            "No model type %r in this version of transformers: nothing patched.", model_type
        )
        return None
    return _called(function, _accepted(function, flags), model_type)


def _apply_liger_kernel_to_instance(model: Any, **flags: Any) -> Report | None:
    """Patch one loaded model, also inside PEFT; None and a log line if it has no model type.

    Args:
        model: a `PreTrainedModel`; calling this again changes nothing more.
        flags: as in `_apply_liger_kernel`.
    """
    model_type = getattr(getattr(unwrapped(model), "config", None), "model_type", None)
    if not model_type:
        logger.info("%s has no config.model_type: nothing patched.", type(model).__name__)
        return None
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type) or registry.function_for(model_type)
    if function is None:  # remote code: its structure decides
        function = registry.make(model_type, registry.ANY, model_type)
    return _called(function, {**_accepted(function, flags), "model": model}, model_type)


def _accepted(function: Any, flags: dict[str, Any]) -> dict[str, bool]:
    """The flags that a function takes, as bools."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in flags:
        if name not in DEFAULTS:
            warn_unknown(name)
    return {
        name: bool(value)
        for name, value in flags.items()
        if name in parameters or name in UNNAMED or (takes_all and name in DEFAULTS)
    }


def _called(function: Any, arguments: dict[str, Any], model_type: str) -> Report | None:
    """The report. A failure is logged with its trace; `patch_*` have put everything back by then."""
    try:
        report = function(**arguments)
    except Exception:
        logger.warning(
            "Patching %s failed; the model is left as it was.", model_type, exc_info=True
        )
        return None
    logger.info("%s", report)
    return report


def __getattr__(name: str) -> Any:
    model_type = name.removeprefix(registry.PREFIX)
    function = registry.function_for(model_type) if model_type != name else None
    if function is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = function
    return function
