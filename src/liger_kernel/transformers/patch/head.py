"""Seam: output head and loss.

The model's `forward` is wrapped, never copied: a call that has labels, and either trains or was
told `skip_logits`, arms the output head, whose call then returns a `LogitsPromise` (see
`promise.py`). Outside such calls head and logits are ordinary. The head becomes an instance of a
generated subclass of its own class, because Python looks `__call__` up on the type; parameters,
state dict and pickle are those of the original class.
"""

import copy
import copyreg
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_kernel.ops.head import module as layers
from liger_kernel.transformers.model import output_classes
from liger_kernel.transformers.patch.apply import Ledger
from liger_kernel.transformers.patch.promise import LogitsPromise, PromisingHead
from liger_kernel.transformers.patch.request import Request, tensor_parallel_forward

# The head


def find_head(model: nn.Module) -> tuple[Any, Any]:
    """(the model's output head, the layer inside it that makes the logits); None for what is not there.

    Asked at every call: PEFT, FSDP and `resize_token_embeddings` replace it.
    """
    outer = _output_embeddings(model)
    if (
        outer is None
    ):  # models that do not say: a head of the usual name, or the one of the only part that has one
        parts = (_output_embeddings(part) for part in model.children())
        found = [getattr(model, "lm_head", None), *parts]
        heads = [head for head in found if head is not None]
        outer = heads[0] if len(heads) == 1 else None
    return outer, layers.find(outer)


def _output_embeddings(model: nn.Module) -> Any:
    getter = getattr(model, "get_output_embeddings", None)
    return None if getter is None else getter()


def why_not(outer: Any, head: Any) -> str | None:
    """None if the head can promise its logits now, else the reason: adapters come, go and are merged."""
    if outer is None:
        return "it has no output head"
    if head is None:
        cls = type(outer)
        return f"its output head, {cls.__module__}.{cls.__qualname__}, is not a linear layer"
    return None if tensor_parallel_forward(head) else layers.why_not(head)


@functools.cache
def promising(cls: type) -> type:
    """A subclass of a head's class whose call may return a promise; it pickles as `cls`."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        state = {k: v for k, v in vars(self).items() if not k.startswith("_liger")}
        return copyreg._reconstructor, (cls, object, None), state  # type: ignore[attr-defined]

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        kind: Any = type(self)
        twin = memo[id(self)] = kind.__new__(kind)
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin

    body = {
        "__module__": __name__, "__reduce_ex__": __reduce_ex__, "__deepcopy__": __deepcopy__, "_liger_class": cls,
    }  # fmt: skip
    return type(cls.__name__, (PromisingHead, cls), body)


# The model's forward


def takes_labels(forward: Any) -> bool:
    """Whether a forward has an argument named labels."""
    return "labels" in inspect.signature(forward).parameters


def wrapped_forward(forward: Any, before: Callable[[Any], None] | None = None) -> Any:
    """`forward(self, ...)` of a model class, with an armed head where the call allows it, after `before(self)`."""
    names = [name for name in inspect.signature(forward).parameters if name != "self"]
    labels_at = names.index("labels")
    output_classes.expect(forward)

    @functools.wraps(forward)
    def liger_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None and not torch.compiler.is_compiling():
            before(self)
        skip = kwargs.pop("skip_logits", None)
        accuracy = bool(kwargs.pop("return_token_accuracy", False))
        predictions = bool(kwargs.pop("return_predicted_tokens", False))
        scaling = bool(kwargs.pop("use_token_scaling", False))
        labels = kwargs.get("labels")
        if len(args) > labels_at:
            labels = args[labels_at]
        elif labels is None and kwargs.get("shift_labels") is not None:
            labels = kwargs["labels"] = kwargs["shift_labels"]
        if labels is None:
            if skip:
                raise ValueError(
                    "skip_logits=True needs labels: without them the logits are the only output."
                )
            return forward(self, *args, **kwargs)
        keep_logits = not (self.training if skip is None else skip)
        if keep_logits and not (accuracy or predictions or scaling):
            return forward(self, *args, **kwargs)
        outer, head = find_head(self)
        ready = isinstance(head, PromisingHead) and why_not(outer, head) is None
        if not ready and not prepare(head):
            return forward(self, *args, **kwargs)
        request = Request(outer, head, accuracy, predictions, scaling)
        head._liger_request = request
        try:
            outputs = forward(self, *args, **kwargs)
            return _settled(outputs, request, keep_logits)
        finally:
            head._liger_request = None

    liger_forward.__liger_seam__ = "head"  # type: ignore[attr-defined]
    return liger_forward


def _settled(outputs: Any, request: Request, keep_logits: bool) -> Any:
    """The model's outputs without promises: None in the place of skipped logits, and the extra fields filled."""
    if isinstance(outputs, tuple):
        keep_logits = keep_logits or isinstance(outputs[0], LogitsPromise)  # no loss came out
        return tuple(_real(value, keep_logits) for value in outputs)
    if not dataclasses.is_dataclass(outputs) or not isinstance(outputs, dict):
        return _real(outputs, keep_logits=True)
    keep_logits = keep_logits or outputs.get("loss") is None
    fields = {name: _real(value, keep_logits) for name, value in outputs.items()}
    return output_classes.extend(
        outputs,
        fields,
        token_accuracy=request.token_accuracy,
        predicted_tokens=request.predicted_tokens,
    )


def _real(value: Any, keep_logits: bool) -> Any:
    if not isinstance(value, LogitsPromise):
        return value
    return value.tensor() if keep_logits else None


@torch.compiler.disable()
def prepare(head: Any, ledger: Ledger | None = None) -> bool:
    """Give a head its class (noted in `ledger`); False if it cannot have one.

    Not traceable: a compiled model breaks its graph here once, the next trace finds the class.
    """
    if why_not(head, head) is not None:
        return False
    if not isinstance(head, PromisingHead):
        ledger = ledger or Ledger()
        ledger.become(head, promising(type(head)))
        if "_old_forward" in vars(head):  # accelerate's hooks call the forward that they found
            ledger.put(head, "_old_forward", type(head).forward.__get__(head), "head")
    return True
