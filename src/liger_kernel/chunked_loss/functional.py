"""The losses of this package as functions: `liger_fused_linear_dpo(hidden, weight, target, ...)`.

Each is the `apply` of the loss's Function class, whose arguments it takes. The classes are here too;
all of them are loaded when first used.
"""

import importlib
from typing import Any

# function -> the module and the class whose `apply` it is
_TABLE = {
    "liger_fused_linear_cosine": (
        "cosine_similarity_loss:LigerFusedLinearCosineSimilarityFunction"
    ),
    "liger_fused_linear_cpo": "cpo_loss:LigerFusedLinearCPOFunction",
    "liger_fused_linear_dpo": "dpo_loss:LigerFusedLinearDPOFunction",
    "liger_fused_linear_grpo": "grpo_loss:LigerFusedLinearGRPOFunction",
    "liger_fused_linear_jsd": "jsd_loss:LigerFusedLinearJSDFunction",
    "liger_fused_linear_kto": "kto_loss:LigerFusedLinearKTOFunction",
    "liger_fused_linear_orpo": "orpo_loss:LigerFusedLinearORPOFunction",
    "liger_fused_linear_simpo": "simpo_loss:LigerFusedLinearSimPOFunction",
}


_HOME = {cls: module for module, cls in (place.split(":") for place in _TABLE.values())}


def __getattr__(name: str) -> Any:
    if name in _TABLE:
        return __getattr__(_TABLE[name].partition(":")[2]).apply
    if name in _HOME:
        return getattr(importlib.import_module(f"{__package__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_TABLE, *_HOME})
