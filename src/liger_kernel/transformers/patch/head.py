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
from typing import Any

import torch
from torch import nn

from liger_kernel.transformers.model import output_classes
from liger_kernel.transformers.patch.apply import Ledger
from liger_kernel.transformers.patch.promise import LogitsPromise, PromisingHead
from liger_kernel.transformers.patch.request import Request, tensor_parallel_forward

# The head


def find_head(model: nn.Module) -> tuple[Any, Any]:
    """(what `get_output_embeddings()` returns, the linear layer inside it); None for what is not there.

    Asked at every call: PEFT, FSDP and `resize_token_embeddings` replace it.
    """
    getter = getattr(model, "get_output_embeddings", None)
    outer = None if getter is None else getter()
    inner = outer
    while inner is not None and not isinstance(inner, nn.Linear):
        inner = _inside(inner)
    return outer, inner


def _inside(wrapper: Any) -> Any:
    """The module that a transparent wrapper calls, None if it is not one."""
    saved = getattr(wrapper, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict):  # PEFT: a trained copy in the place of the original
        active = [] if wrapper.disable_adapters else wrapper.active_adapters
        return saved[active[0]] if active and active[0] in saved else wrapper.original_module
    for name in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        inner = wrapper._modules.get(name) if isinstance(wrapper, nn.Module) else None
        if inner is not None:
            return inner
    return None


def why_not(outer: Any, head: Any) -> str | None:
    """None if the head can promise its logits, else the reason."""
    if outer is None:
        return "it has no output head"
    if head is None:
        cls = type(outer)
        return f"its output head, {cls.__module__}.{cls.__qualname__}, is not a plain linear layer"
    if isinstance(head, PromisingHead):
        return None
    cls = type(head)
    if cls.forward is not nn.Linear.forward:
        return f"{cls.__name__} computes its product in its own way (adapter or quantised weight)"
    replaced = "forward" in head.__dict__ and "_old_forward" not in head.__dict__
    if replaced and not tensor_parallel_forward(head):
        return f"another library replaced the forward of this {cls.__name__}"
    return None


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

    body = {"__module__": __name__, "__reduce_ex__": __reduce_ex__, "__deepcopy__": __deepcopy__}
    return type(cls.__name__, (PromisingHead, cls), body)


# The model's forward


def takes_labels(forward: Any) -> bool:
    """Whether a forward has an argument named labels."""
    return "labels" in inspect.signature(forward).parameters


def wrapped_forward(forward: Any) -> Any:
    """`forward(self, ...)` of a model class, with an armed head where the call allows it."""
    names = [name for name in inspect.signature(forward).parameters if name != "self"]
    labels_at = names.index("labels")
    output_classes.expect(forward)

    @functools.wraps(forward)
    def liger_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
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
        if not isinstance(head, PromisingHead) and not prepare(head):
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
