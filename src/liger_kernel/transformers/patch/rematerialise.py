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
(activation offloading) we stand aside. Inside a checkpoint ours hand on to its what they do not keep:
while a layer is computed again and goes backward, it keeps no norm's output either. What is saved must
then be the same tensors both times, so only recipes of the same run of the layer count. Under
torch.compile the partitioner decides, and nothing here runs.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from liger_kernel.ops._op import is_dtensor
from liger_kernel.ops._reuse import Kept

# whose functions are `rebuildable`
SEAMS = ("rms_norm", "layer_norm", "gated_norm", "gated_mlp", "relu_squared")

_TAG = "_liger_recipe"
_CASTS = "ToCopyBackward0"
_TO_DTENSOR = "_FromTorchTensorBackward"
_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - a module without type stubs
_top_hooks: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
WHY_NOT = None if _top_hooks is not None else "torch before 2.8 does not say whose hooks are active"


def top_hooks() -> Any:
    """(pack, unpack) of the innermost hooks, None if there are none."""
    return None if _top_hooks is None else _top_hooks(False)


def hooks_allowed() -> bool:
    """Whether nobody has forbidden hooks (`disable_saved_tensors_hooks`)."""
    return _autograd._saved_tensors_hooks_is_enabled()


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


class _Theirs:
    """What a checkpoint's hook keeps in the tensor's place."""

    __slots__ = ("packed", "unpack")

    def __init__(self, tensor: Tensor, hooks: Any) -> None:
        pack, self.unpack = hooks
        self.packed = pack(tensor)

    def get(self) -> Tensor:
        return self.unpack(self.packed)


class _Rebuilt:
    """A recipe, which view of its result was saved (None: all of it), and the DTensor around that."""

    __slots__ = ("__weakref__", "asked", "dtensor", "recipe", "view")

    def __init__(self, recipe: "_Recipe", view: Any = None, dtensor: Any = None) -> None:
        self.recipe, self.view, self.dtensor, self.asked = recipe, view, dtensor, False
        recipe.consumers.append(weakref.ref(self))

    def get(self) -> Tensor:
        recipe = self.recipe
        y = recipe.value()
        self.asked = True
        recipe.result = y if recipe.waiting() else None
        if self.view is not None:
            y = y.as_strided(*self.view)
        return y if self.dtensor is None else self.dtensor(y)


_Packed = _Same | _Theirs | _Rebuilt


class _Recipe:
    """function(*args, **options), in the autocast state of the forward."""

    __slots__ = (
        "args", "autocast", "consumers", "counted", "function", "kept", "options", "result", "versions",
    )  # fmt: skip

    def __init__(
        self, function: Callable[..., Tensor], args: Any, options: dict[str, Any], kind: str
    ) -> None:
        self.function, self.args, self.options = function, args, options
        self.versions = _versions(args)
        self.autocast = _autocast(kind)
        self.kept = self.counted = False
        self.consumers: list[weakref.ref[_Rebuilt]] = []
        self.result: Tensor | None = None  # for those that have not asked yet, once one has

    def keep(self) -> bool:
        """Hold on to the arguments as autograd would; False if one has changed since the call."""
        if not self.kept:
            if _versions(self.args) != self.versions:
                return False
            self.args = [_stand_in(a) if isinstance(a, Tensor) else a for a in self.args]
            self.kept = True
        return True

    def waiting(self) -> bool:
        """Whether some consumers have not asked. Once all have, another backward may begin."""
        alive = [found for ref in self.consumers if (found := ref()) is not None]
        if not all(c.asked for c in alive):
            return True
        for consumer in alive:
            consumer.asked = False
        return False

    def value(self) -> Tensor:
        """The result."""
        if self.result is not None:
            return self.result
        args = [a.get() if isinstance(a, _Packed) else a for a in self.args]
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

    __slots__ = ("__weakref__", "address", "recipe", "run", "version")

    def __init__(self, y: Tensor, recipe: _Recipe) -> None:
        self.recipe: _Recipe | None = recipe
        self.run = _forward.tags
        self.address, self.version = y.data_ptr(), y._version


class _Forward(threading.local):
    """The forward that runs in this thread with our hooks."""

    def __init__(self) -> None:
        self.tags: list[weakref.ref[_Tag]] = []
        self.bytes = 0
        self.alive: list[_Tag] = []  # in a checkpoint: what is found must not depend on who holds y
        self.outer: Any = None  # (pack, unpack) of the checkpoint whose layer this is


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
    if _forward.outer is not None:
        _forward.alive.append(tag)


def _whole(y: Tensor) -> bool:
    """Whether strides and offset tell which part of a fresh y a view of it is."""
    return type(y) is Tensor and y._base is None and y.is_contiguous() and not y.storage_offset()


# Hooks


def _pack(tensor: Tensor) -> _Packed:
    packed = _stand_in(tensor)
    if type(packed) is _Rebuilt and not packed.recipe.counted and _forward.outer is None:
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
        outer = _forward.outer
        return _Same(tensor) if outer is None else _Theirs(tensor, outer)
    local = tensor._local_tensor if dtensor else tensor  # type: ignore[attr-defined]
    view = (local.shape, local.stride(), local.storage_offset())
    return _Rebuilt(recipe, view, _around(tensor) if dtensor else None)


def _of_plain(base: Tensor) -> _Recipe | None:
    """The recipe of a tensor that is no view: its own, or one made for a cast."""
    tag: _Tag | None = getattr(base, _TAG, None)
    if tag is not None:
        ours = tag.run is _forward.tags and tag.version == base._version
        return tag.recipe if ours else None
    source = _before(base, _CASTS)
    if source is None or base._version or not _whole(base) or not source.recipe.keep():
        return None
    options = {"dtype": base.dtype, "device": base.device}
    recipe = _Recipe(cast, (_Rebuilt(source.recipe),), options, base.device.type)
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
    return None if tag is None or tag.recipe is None or tag.run is not _forward.tags else tag


def _around(tensor: Any) -> Callable[[Tensor], Tensor]:
    """local tensor -> a DTensor like `tensor`."""
    cls, spec = type(tensor), tensor._spec
    return lambda local: cls(local, spec, requires_grad=False)


def cast(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """x in another dtype: a recipe's function."""
    return x.to(device, dtype)


def _watching() -> bool:
    top = top_hooks()
    return top is not None and ours(top[0])


# The hooks


@contextmanager
def hooks(outer: Any = None) -> Iterator[_Forward]:
    """Our hooks, handing on to those of a checkpoint, `outer`, if there are such."""
    before = _forward.tags, _forward.bytes, _forward.alive, _forward.outer
    _forward.tags, _forward.bytes, _forward.alive, _forward.outer = [], 0, [], outer
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield _forward
    finally:
        for tag in [found for ref in _forward.tags if (found := ref()) is not None]:
            tag.recipe = None
        _forward.tags, _forward.bytes, _forward.alive, _forward.outer = before


def ours(hook: Any) -> bool:
    """Whether this pack hook is ours."""
    return hook is _pack
