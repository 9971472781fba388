"""Outputs that are rebuilt in backward instead of being kept.

A norm's output and the product act(gate) * up are saved only because the linear layer after them needs
its input in backward, and both can be computed again from tensors that autograd keeps anyway: the
norm's input, gate and up. So do copies of them in another dtype (autocast's, an adapter's).

    y = rebuildable(rms_norm)(x, w)     hangs a recipe (function, arguments) on y
    pack                                a saved tensor that is y, a view of y or a cast of y: keep the recipe
    unpack                              the first consumer in backward rebuilds y, the last one lets go of it

Any consumer works: the hook sees what is saved, not who saves it. Everything else that is saved in
the same forward passes through as it was, and its version is checked as autograd would have done
(which leaves that to whoever installs hooks). A recipe lives on what stands for the saved tensors
and, until the forward ends, on y; nothing else refers to it.

Hooks do not nest: the innermost pair sees every tensor alone. So within somebody else's hooks
(activation offloading, a checkpoint around the model) we stand aside, and theirs inside ours
(checkpointed layers) hide ours. Under torch.compile the partitioner decides, and nothing here runs.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from liger_kernel import _env
from liger_kernel.ops._op import is_dtensor
from liger_kernel.ops._reuse import Kept
from liger_kernel.transformers.patch.apply import Ledger, original_of

# whose functions are `rebuildable`
SEAMS = ("rms_norm", "layer_norm", "gated_norm", "gated_mlp", "relu_squared")

_TAG = "_liger_recipe"
_CASTS = "ToCopyBackward0"
_TO_DTENSOR = "_FromTorchTensorBackward"
_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - a module without type stubs
_top_hooks: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
WHY_NOT = None if _top_hooks is not None else "torch before 2.8 does not say whose hooks are active"

# What stands for a saved tensor


class _Same(Kept):
    """The tensor itself, detached: an output that its own node saves must not refer back to that node."""

    __slots__ = ("version",)

    def __init__(self, tensor: Tensor) -> None:
        # A leaf stays the object it is: ZeRO-3 gives parameters other memory between forward and backward.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version

    def get(self) -> Tensor:
        found = self.tensor._version
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {found}; expected version "
                f"{self.version} instead."
            )
        return self.tensor


class _Rebuilt:
    """A recipe, which view of its result was saved (None: all of it), and the DTensor around that."""

    __slots__ = ("dtensor", "recipe", "view", "waits")

    def __init__(self, recipe: "_Recipe", view: Any = None, dtensor: Any = None) -> None:
        self.recipe, self.view, self.dtensor, self.waits = recipe, view, dtensor, True
        recipe.waiting += 1

    def get(self) -> Tensor:
        recipe = self.recipe
        y = recipe.value()
        if self.waits:
            self.waits = False
            recipe.waiting -= 1
        recipe.result = y if recipe.waiting else None
        if self.view is not None:
            y = y.as_strided(*self.view)
        return y if self.dtensor is None else self.dtensor(y)


_Packed = _Same | _Rebuilt


class _Recipe:
    """function(*args, **options), in the autocast state of the forward."""

    __slots__ = (
        "args", "autocast", "counted", "function", "kept", "options", "result", "versions", "waiting",
    )  # fmt: skip

    def __init__(
        self, function: Callable[..., Tensor], args: Any, options: dict[str, Any], kind: str
    ) -> None:
        self.function, self.args, self.options = function, args, options
        self.versions = _versions(args)
        self.autocast = _autocast(kind)
        self.kept = self.counted = False
        self.waiting = 0  # consumers that have not asked yet
        self.result: Tensor | None = None  # for them, once one has

    def keep(self) -> bool:
        """Hold on to the arguments as autograd would; False if one has changed since the call."""
        if not self.kept:
            if _versions(self.args) != self.versions:
                return False
            self.args = [_stand_in(a) if isinstance(a, Tensor) else a for a in self.args]
            self.kept = True
        return True

    def value(self) -> Tensor:
        """The result."""
        if self.result is not None:
            return self.result
        args = [a.get() if isinstance(a, (_Same, _Rebuilt)) else a for a in self.args]
        with torch.no_grad():
            if self.autocast == _autocast(self.autocast[0]):
                return self.function(*args, **self.options)
            with torch.autocast(*self.autocast):
                return self.function(*args, **self.options)


def _autocast(kind: str) -> tuple[Any, ...]:
    """(device type, dtype, enabled), what `torch.autocast` takes."""
    enabled = torch.is_autocast_enabled(kind)
    return kind, torch.get_autocast_dtype(kind) if enabled else None, enabled


def _versions(args: Any) -> list[int]:
    return [a._version for a in args if isinstance(a, Tensor)]


# Recipes on tensors


class _Tag:
    """Hangs on y; refers to the recipe until the forward ends."""

    __slots__ = ("__weakref__", "address", "recipe", "version")

    def __init__(self, y: Tensor, recipe: _Recipe) -> None:
        self.recipe: _Recipe | None = recipe
        self.address, self.version = y.data_ptr(), y._version


class _Forward(threading.local):
    """The forward that runs in this thread with our hooks."""

    def __init__(self) -> None:
        self.tags: list[weakref.ref[_Tag]] = []
        self.bytes = 0


_forward = _Forward()


def rebuildable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, whose results can be rebuilt: deterministic, and no more tensors in its positional
    arguments than its backward keeps anyway (vectors are copied)."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Tensor:
        y = function(*args, **options)
        offer(y, function, args, options)
        return y

    return call


def offer(y: Tensor, function: Callable[..., Tensor], args: Any, options: dict[str, Any]) -> None:
    """Hang a recipe on y = function(*args, **options), if our hooks would see it saved."""
    if torch.compiler.is_compiling() or not _watching() or not y.requires_grad or not _whole(y):
        return
    # Vectors are copied now: FSDP may reshard a norm's weight before the norm's consumers run.
    args = [a.detach().clone() if isinstance(a, Tensor) and a.dim() < 2 else a for a in args]
    _hang(y, _Recipe(function, args, options, y.device.type))
    y.grad_fn.metadata[_TAG] = _forward.tags[-1]  # type: ignore[union-attr]


def _hang(y: Tensor, recipe: _Recipe) -> None:
    tag = _Tag(y, recipe)
    setattr(y, _TAG, tag)
    _forward.tags.append(weakref.ref(tag))


def _whole(y: Tensor) -> bool:
    """Whether strides and offset tell which part of a fresh y a view of it is."""
    return type(y) is Tensor and y._base is None and y.is_contiguous() and not y.storage_offset()


# Hooks


def _pack(tensor: Tensor) -> _Packed:
    packed = _stand_in(tensor)
    if type(packed) is _Rebuilt and not packed.recipe.counted:
        packed.recipe.counted = True
        local = tensor if packed.dtensor is None else tensor._local_tensor  # type: ignore[attr-defined]
        _forward.bytes += local.untyped_storage().nbytes()
    return packed


def _unpack(packed: _Packed) -> Tensor:
    return packed.get()


def _stand_in(tensor: Tensor) -> _Packed:
    base = tensor._base
    if base is None:
        base = tensor
    dtensor = is_dtensor(tensor)
    recipe = _of_dtensor(base) if dtensor else _of_plain(base)
    if recipe is None or tensor.dtype != base.dtype or not recipe.keep():
        return _Same(tensor)
    local = tensor._local_tensor if dtensor else tensor  # type: ignore[attr-defined]
    view = (local.shape, local.stride(), local.storage_offset())
    return _Rebuilt(recipe, view, _around(tensor) if dtensor else None)


def _of_plain(base: Tensor) -> _Recipe | None:
    """The recipe of a tensor that is no view: its own, or one made for a cast."""
    tag: _Tag | None = getattr(base, _TAG, None)
    if tag is not None:
        return tag.recipe if tag.version == base._version else None
    source = _before(base, _CASTS)
    if source is None or base._version or not _whole(base) or not source.recipe.keep():
        return None
    options = {"dtype": base.dtype, "device": base.device}
    recipe = _Recipe(_cast, (_Rebuilt(source.recipe),), options, base.device.type)
    _hang(base, recipe)
    return recipe


def _of_dtensor(base: Any) -> _Recipe | None:
    """The recipe of the plain tensor that a DTensor was made from."""
    source = _before(base, _TO_DTENSOR)
    local = base._local_tensor
    if source is None or source.address != local.data_ptr() or source.version != local._version:
        return None
    return source.recipe


def _before(base: Tensor, name: str) -> Any:
    """The tag of y where base = f(y) and the graph calls f `name`."""
    node = base.grad_fn
    if node is None or node.name() != name:
        return None
    node = node.next_functions[0][0]
    metadata: Any = None if node is None else node.metadata
    found = None if metadata is None else metadata.get(_TAG)
    tag = None if found is None else found()
    return None if tag is None or tag.recipe is None else tag


def _around(tensor: Any) -> Callable[[Tensor], Tensor]:
    """local tensor -> a DTensor like `tensor`."""
    cls, spec = type(tensor), tensor._spec
    return lambda local: cls(local, spec, requires_grad=False)


def _cast(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return x.to(device, dtype)


def _watching() -> bool:
    top = None if _top_hooks is None else _top_hooks(False)
    return top is not None and top[0] is _pack


# Forwards


def places(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model whose forwards get the hooks, by name: they contain all its layers, and nothing wraps the
    model's own forward, which belongs to the head's seam and to other libraries."""
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield from ((f"{name}.{inner}", place) for inner, place in places(child))
        elif any(True for _ in child.children()):
            yield name, child


def wrapped_forward(
    forward: Any, name: str, report: Any, before: Callable[[Any], None] | None = None
) -> Any:
    """`forward(self, ...)` of a module under the hooks, after `before(self)`; the bytes not kept go to
    `report.rebuilt[name]`."""

    @functools.wraps(forward)
    def liger_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        if before is not None:
            before(self)
        if not torch.is_grad_enabled() or not _free():
            return forward(self, *args, **kwargs)
        _see_adapters(report.ledger, self)
        with _hooks(name, report.rebuilt):
            return forward(self, *args, **kwargs)

    liger_forward.__liger_seam__ = "rematerialise"  # type: ignore[attr-defined]
    return liger_forward


@contextmanager
def _hooks(name: str, rebuilt: dict[str, int]) -> Iterator[None]:
    _forward.bytes = 0
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        rebuilt[name] = _forward.bytes
        for tag in [found for ref in _forward.tags if (found := ref()) is not None]:
            tag.recipe = None
        _forward.tags.clear()


def _free() -> bool:
    """Whether the hooks can be ours. If they are somebody else's, and not a checkpoint's, say so once."""
    if not _autograd._saved_tensors_hooks_is_enabled():
        return False
    top = _top_hooks(False)
    if top is None:
        return True
    module = getattr(top[0], "__module__", "")
    if top[0] is not _pack and module != "torch.utils.checkpoint":
        who = getattr(top[0], "__qualname__", type(top[0]).__qualname__)
        _env.warn_once(
            f"liger_kernel: activations are kept, not rematerialised: the forward runs within the saved-tensor hooks "
            f"of {module}.{who}, and hooks do not nest. patch(model, rematerialise=False) silences this."
        )
    return False


# Adapters


def _see_adapters(ledger: Ledger, user: Any) -> None:
    """PEFT casts the input of every adapted linear layer, often to fp32: let a cast keep what it was cast from."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None:
        layer, name = tuners.BaseTunerLayer, "_cast_input_dtype"
        ledger.share(layer, name, _casting(original_of(getattr(layer, name))), user)


@functools.cache
def _casting(original: Any) -> Any:
    @functools.wraps(original)
    def _cast_input_dtype(self: Any, x: Any, dtype: torch.dtype) -> Any:
        y = original(self, x, dtype)
        if x is not None and y.element_size() > x.element_size():
            offer(y, _cast, (x,), {"dtype": y.dtype, "device": y.device})
        return y

    _cast_input_dtype.__liger_seam__ = "rematerialise"  # type: ignore[attr-defined]
    return _cast_input_dtype
