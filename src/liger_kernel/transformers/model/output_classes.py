"""Output classes of patched models: Hugging Face's, plus `token_accuracy` and `predicted_tokens`.

They are made from whatever class a model returns, on first use, and can be imported here by name:
`LigerCausalLMOutputWithPast` extends `CausalLMOutputWithPast`.
"""

import dataclasses
import inspect
import sys
import typing
from typing import Any

import torch
from torch import Tensor

_made: dict[type, type] = {}


def extended(cls: type) -> type:
    """The dataclass `Liger<cls>`: a subclass of `cls` with the two extra fields."""
    found = _made.get(cls)
    return _make(cls) if found is None else found


def extend(outputs: Any, fields: dict[str, Any], **extra: Any) -> Any:
    """`outputs` with other `fields` and the extra ones, as the extended class.

    A class cannot be made while torch.compile traces: one that `expect` has not seen before stays as
    it is there, without the extra fields.
    """
    cls = type(outputs)
    if cls not in _made and torch.compiler.is_compiling():
        return cls(**fields)
    return extended(cls)(**fields, **extra)


def expect(forward: Any) -> None:
    """Make the classes that a forward says it returns."""
    said = inspect.signature(forward).return_annotation
    for cls in typing.get_args(said) or (said,):
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and issubclass(cls, dict):
            extended(cls)


def _make(cls: type) -> type:
    names = {field.name for field in dataclasses.fields(cls)}
    if "token_accuracy" in names:
        _made[cls] = cls
        return cls
    name = f"Liger{cls.__name__}"
    extra = [
        (field, Tensor | None, dataclasses.field(default=None))
        for field in ("token_accuracy", "predicted_tokens")
    ]
    doc = f"{cls.__name__} with `token_accuracy` and `predicted_tokens`, filled when a call asks for them."
    body = {"__module__": __name__, "__doc__": doc}
    made = dataclasses.make_dataclass(name, extra, bases=(cls,), namespace=body)
    _made[cls] = made
    return made


def __getattr__(name: str) -> Any:
    for made in _made.values():
        if made.__name__ == name:
            return made
    plain = name.removeprefix("Liger")
    if plain != name and not name.startswith("__"):
        import transformers.modeling_outputs  # noqa: F401 - the common ones; others come with their models

        for path, module in list(sys.modules.items()):
            if ".modeling_" in path and isinstance(vars(module).get(plain), type):
                return extended(vars(module)[plain])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
