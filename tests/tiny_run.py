"""A run of `liger-kernel train` that takes no time: a config, a text of random words, and what is asked of it."""

import json
import random
from pathlib import Path
from typing import Any

TINY = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ASKED: dict[str, Any] = {
    "model": None, "text": None, "steps": 3, "batch": 2, "seq": 16, "dtype": "fp32", "device": "cpu",
    "optimizer": "adamw", "lr": None, "seed": 0,
}  # fmt: skip


def write(folder: Path, words: int) -> None:
    """tiny.json, the config, and text.txt of so many words."""
    (folder / "tiny.json").write_text(json.dumps(TINY))
    known = ["norm", "rope", "gate", "head", "loss", "token", "chunk", "row"]
    (folder / "text.txt").write_text(" ".join(random.Random(0).choices(known, k=words)))
