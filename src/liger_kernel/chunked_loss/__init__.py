"""Losses on hidden states and a head for preference tuning, reinforcement learning and distillation.

Each is a few lines of arithmetic on log-probabilities; the vocabulary head engine makes those and
the gradients without ever holding the logits. Every name is loaded when it is first used.
"""

import importlib
from typing import Any

# module -> the names it offers here
_TABLE = {
    "cosine_similarity_loss": "LigerFusedLinearCosineSimilarityLoss",
    "cpo_loss": "LigerFusedLinearCPOLoss",
    "dpo_loss": "LigerFusedLinearDPOLoss",
    "grpo_loss": "LigerFusedLinearGRPOLoss",
    "jsd_loss": "LigerFusedLinearJSDLoss",
    "kto_loss": "LigerFusedLinearKTOLoss",
    "orpo_loss": "LigerFusedLinearORPOLoss",
    "simpo_loss": "LigerFusedLinearSimPOLoss",
}
_HOME = {name: module for module, name in _TABLE.items()}
_FILES = [
    "functional",
    "fused_linear_distillation",
    "fused_linear_ppo",
    "fused_linear_preference",
    "fused_linear_unpaired_preference",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _TABLE or name in _FILES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_TABLE, *_FILES})
