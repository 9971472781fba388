"""The model classes that compute a loss over a vocabulary, from transformers' own table of names."""

import inspect
import re
from typing import Any

_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def names(pattern: str = "") -> list[str]:
    """The names of the classes, in alphabetical order, without importing them.

    Args:
        pattern: a regular expression that is searched in a name, whatever its case.
    """
    import transformers

    found = [name for name in dir(transformers) if name.endswith(_ENDINGS)]
    torchs = [name for name in sorted(found) if not name.startswith(("Flax", "TF"))]
    return [name for name in torchs if re.search(pattern, name, re.IGNORECASE)]


def load(name: str) -> tuple[Any, str]:
    """(the class, "" or why it is no model with a loss over a vocabulary)."""
    import transformers

    cls: Any = getattr(transformers, name)
    if getattr(cls, "config_class", None) is None:
        return cls, "no model class of its own"
    if cls.__name__ != name:
        return cls, f"another name of {cls.__name__}"
    if "labels" not in inspect.signature(cls.forward).parameters:
        return cls, "its forward takes no labels"
    return cls, ""
