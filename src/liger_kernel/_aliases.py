"""Module paths other projects import, and where their names really live: one table, no stub files.

Each line of `TABLE` makes one module, relative to `liger_kernel`: importable, found by `find_spec`,
and open to monkey-patching like any other. To add a path, add a line. The modules are made on first
import by a finder that is asked last, so a real file of the same name would win.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOT = __package__ or "liger_kernel"

# path -> {module: names}
TABLE: dict[str, dict[str, str]] = {
    "ops.grpo_loss": {
        "ops.selective_log_softmax": "fused_selective_log_softmax",
        "transformers.grpo_loss": "GrpoLossFunction",
    },
    "transformers.cross_entropy": {
        "transformers.loss": "LigerCrossEntropyLoss",
        "ops.cross_entropy": "CrossEntropyOutput LigerCrossEntropyFunction",
    },
    "transformers.fused_linear_cross_entropy": {
        "transformers.loss": "LigerFusedLinearCrossEntropyLoss",
        "ops.cross_entropy": "CrossEntropyOutput",
        "ops.fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
    },
    "transformers.geglu": {
        "transformers.mlp": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
        "ops.geglu": "LigerGELUMulFunction",
    },
    "transformers.jsd": {
        "transformers.divergence": "LigerJSD",
        "ops.jsd": "LigerJSDFunction",
    },
    "transformers.kl_div": {
        "transformers.divergence": "LigerKLDIVLoss",
        "ops.kl_div": "LigerKLDivLossFunction",
    },
    "transformers.rms_norm": {
        "transformers.norm": (
            "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 "
            "LigerRMSNormForGemma4 LigerRMSNormForGlm4 LigerRMSNormForMuseGlimmer "
            "LigerRMSNormForMuseGlimmerTextCentered LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next"
        ),
        "ops.rms_norm": "LigerRMSNormFunction",
    },
    "transformers.swiglu": {
        "transformers.mlp": (
            "LigerBlockSparseTop2MLP LigerFalconH1SwiGLUMLP LigerHunyuanV1SwiGLUMLP "
            "LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer"
        ),
        "ops.swiglu": "LigerSiLUMulFunction",
    },
    "transformers.tvd": {
        "transformers.divergence": "LigerTVDLoss",
        "ops.tvd": "LigerTVDLossFunction",
    },
    "transformers.trainer_integration": {"transformers.monkey_patch": "_apply_liger_kernel"},
}


class _AliasFinder(MetaPathFinder, Loader):
    """Finds and makes the modules of `TABLE`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        known = fullname.removeprefix(f"{ROOT}.") in TABLE and fullname.startswith(f"{ROOT}.")
        return ModuleSpec(fullname, self, origin=f"{ROOT}._aliases") if known else None

    def exec_module(self, module: ModuleType) -> None:
        sources = TABLE[module.__name__.removeprefix(f"{ROOT}.")]
        module.__doc__ = f"Names that live in {', '.join(f'{ROOT}.{s}' for s in sources)}."
        exported: list[str] = []
        for source, names in sources.items():
            real = importlib.import_module(f"{ROOT}.{source}")
            for name in names.split():
                setattr(module, name, getattr(real, name))
                exported.append(name)
        module.__dict__["__all__"] = exported


def install() -> None:
    """Put the finder behind Python's own, once."""
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(_AliasFinder())
