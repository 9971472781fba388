"""Layers and functions with the constructors and names Hugging Face models use, and the patcher.

Every name is loaded when it is first used. The layers need torch alone; the `apply_*` functions
and `AutoLigerKernelForCausalLM` need transformers and say so when it is missing.
"""

import importlib
from typing import Any

from liger_kernel import _aliases, _env

# module -> the names it offers here
_LAYERS = {
    "activation": "LigerDyT LigerPolyNorm LigerReLUSquared LigerSoftmax LigerSparsemax",
    "attention": "LigerMultiTokenAttention",
    "divergence": (
        "LigerFusedCETVDLoss LigerFusedLinearJSD LigerFusedLinearKLDivLoss LigerJSD LigerKLDIVLoss "
        "LigerTVDLoss"
    ),
    "experts": "LigerExperts",
    "loss": (
        "LigerCrossEntropyLoss LigerFusedLinearCrossEntropyLoss LigerVocabParallelCrossEntropy"
    ),
    "mhc": "LigerMHC",
    "mlp": (
        "LigerBlockSparseTop2MLP LigerFalconH1MLP LigerFalconH1SwiGLUMLP LigerGEGLUMLP LigerMLP "
        "LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer "
        "LigerTiledGEGLUMLP LigerTiledSwiGLUMLP"
    ),
    "norm": (
        "LigerFusedAddRMSNorm LigerGatedRMSNorm LigerLayerNorm LigerModulatedRMSNorm LigerRMSNorm "
        "LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered"
    ),
    "rope": (
        "liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb liger_rotary_pos_emb"
    ),
}
_HOME = {name: module for module, names in _LAYERS.items() for name in names.split()}
_AUTO_MODEL = "AutoLigerKernelForCausalLM"
_FILES = [
    "auto_model",
    "embedding",
    "fsdp",
    "functional",
    "group_norm",
    "grpo_loss",
    "hub",
    "model",
    "moe",
    "monkey_patch",
    "patch",
    "trainer",
]
_SUBMODULES = {*_FILES, *_LAYERS} | {
    path.removeprefix("transformers.")
    for path in _aliases.TABLE
    if path.startswith("transformers.") and path.count(".") == 1
}


def is_transformers_available() -> bool:
    """Whether Hugging Face transformers is installed."""
    return _env.has_module("transformers")


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _exported()
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == _AUTO_MODEL or _is_patcher(name):
        return _patcher(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_exported(), *_SUBMODULES})


def _is_patcher(name: str) -> bool:
    return name.removeprefix("_").startswith("apply_liger_kernel")


def _patcher(name: str) -> Any:
    """A name of the patcher, from the module that defines it."""
    if not is_transformers_available():
        raise ImportError(
            f"liger_kernel.transformers.{name} needs transformers, which is not installed: "
            "pip install transformers."
        )
    home = "auto_model" if name == _AUTO_MODEL else "monkey_patch"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def _exported() -> list[str]:
    """What `from liger_kernel.transformers import *` brings."""
    names = ["is_transformers_available", *_HOME]
    if is_transformers_available():
        patcher = importlib.import_module(f"{__name__}.monkey_patch")
        names += [_AUTO_MODEL, *(name for name in patcher.__all__ if _is_patcher(name))]
    return names
