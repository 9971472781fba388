"""Trainers over TRL's: `LigerORPOTrainer`. TRL is imported when it is first asked for."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "LigerORPOTrainer":
        from liger_kernel.transformers.trainer import orpo_trainer

        return orpo_trainer.LigerORPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
