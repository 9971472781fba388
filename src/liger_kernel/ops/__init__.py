"""Operators: one file each. The contract's names are found here too and loaded when first used."""

import importlib
from typing import Any

# module -> the names it offers here
_NAMES = {
    "cross_entropy": "LigerCrossEntropyFunction cross_entropy_backward cross_entropy_forward",
    "fused_linear_cross_entropy": (
        "LigerFusedLinearCrossEntropyFunction fused_linear_cross_entropy_backward "
        "fused_linear_cross_entropy_forward"
    ),
    "fused_linear_scaled_cross_entropy": "LigerFusedLinearScaledCrossEntropyFunction",
    "geglu": "LigerGELUMulFunction geglu_backward geglu_forward",
    "jsd": "LigerJSDFunction jsd_backward jsd_forward",
    "kl_div": "LigerKLDivLossFunction",
    "grpo_loss": "GrpoLossFunction",
    "rms_norm": "LigerRMSNormFunction rms_norm_backward rms_norm_forward",
    "rope": "LigerRopeFunction rope_backward rope_forward",
    "swiglu": (
        "LigerFusedGateUpSiLUMulFunction LigerSiLUMulFunction swiglu_backward swiglu_forward"
    ),
    "tvd": "LigerTVDLossFunction",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
