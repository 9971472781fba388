"""A run of `liger-kernel train` or of an example that takes no time: a config, a checkpoint, a text of random words."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
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


def checkpoint(folder: Path) -> None:
    """A tiny model and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY)).save_pretrained(folder)
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def example(name: str, arguments: list[str]) -> list[float]:
    """The losses of a program under examples/."""
    spec: Any = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(arguments)
