"""Memory that autograd alone still holds, for a backward pass to write its result over.

A backward that reads a saved tensor and returns a gradient of the same size needs no second buffer if it is the last
reader: autograd lets go of what a node saved as soon as the node has run. Nobody can tell the difference if

    the graph is not kept (`retain_graph`), nothing traces the call, and
    the tensor has no holder but the node's own slot, or none at all (a checkpoint recomputed it).

Holders are counted: Python's references to the object, C++'s to the tensor (other nodes that saved it, hooks with a
copy of the arguments), and those to its memory (views, detached copies, a storage object). Memory that torch did not
allocate (an array's, another library's) may have owners that no count shows, and is left alone. What the counts are for
a tensor that only autograd holds depends on the versions of Python and torch, so small graphs on the CPU show it, once.
If they do not tell a held tensor from a free one, nothing is ever reused.

What no count shows either: a weak reference, a post hook of the node that looks at what it saved, and work on another
stream that was only announced by `record_stream`.
"""

import sys
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernel.ops._op import first_order, once, watched

_WORTH = 1 << 20  # bytes below which counting takes longer than the memory is worth
_N = _WORTH // 4  # values of the graphs that show the counts: an fp32 tensor that is just worth it

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - a module without type stubs
_keeps_graph: Any = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
_storage_count: Any = getattr(torch._C, "_storage_Use_Count", None)
_KNOWN = None not in (_keeps_graph, _storage_count) and hasattr(Tensor, "_use_count")
_COUNTED = getattr(
    sys, "_is_gil_enabled", lambda: True
)()  # references are exact under the lock alone

Counts = tuple[int, int, int]


class Kept:
    """What saved-tensor hooks of ours keep in a tensor's place: `tensor`."""

    __slots__ = ("tensor",)
    tensor: Tensor


class _Free(NamedTuple):
    """Counts of tensors that only autograd holds: one that a node saved, one that a hook has just made, and one that a
    `Kept` holds; and of that one where the `Kept` has it."""

    saved: Counts
    made: Counts
    kept: Counts
    inside: tuple[int, int]  # memory aside


_NEVER = (-1, -1, -1)
_NONE = _Free(_NEVER, _NEVER, _NEVER, (-1, -1))


def saved(ctx: Any) -> tuple[tuple[Any, ...], list[Tensor | None]]:
    """-> `ctx.saved_tensors`, and for each of them its memory if a gradient may be written over it, else None.

    Raises:
        RuntimeError: an earlier backward of this node was given such memory, and has failed.
    """
    tensors = ctx.saved_tensors
    if not torch.compiler.is_compiling() and getattr(ctx, "spent", False):
        raise RuntimeError(
            "an earlier backward failed after it had begun to write over what this node saved: run forward again."
        )
    rooms: list[Tensor | None] = [None] * len(tensors)
    large = [i for i in range(len(tensors)) if _large(tensors[i])]
    if large and _may_write():
        free = _free()
        for i in large:
            counts = _counts(tensors[i])
            if counts in (free.saved, free.made) or (
                counts == free.kept and _is_alone(ctx._raw_saved_tensors[i], free)
            ):
                rooms[i], ctx.spent = tensors[i].detach(), True
    return tensors, rooms


def _is_alone(slot: Any, free: _Free) -> bool:
    """Whether a `Kept` is in this slot, and alone with its tensor."""
    holder = getattr(slot, "data", None)
    return isinstance(holder, Kept) and _counts(holder.tensor)[:2] == free.inside


def _large(tensor: Tensor | None) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.numel() * tensor.element_size() >= _WORTH
        and tensor.is_contiguous()
        and not torch.compiler.is_compiling()
        and tensor.untyped_storage().resizable()
    )


def _may_write() -> bool:
    if not (_KNOWN and _COUNTED) or watched() or torch._C._are_functorch_transforms_active():
        return False
    return not _keeps_graph()


def _counts(tensor: Any) -> Counts:
    storage = tensor.untyped_storage()  # one object, however often it is asked for
    memory = _storage_count(storage._cdata) + sys.getrefcount(storage)
    return tensor._use_count(), sys.getrefcount(tensor), memory


# What the counts are


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Counts]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.seen = seen
        return x + 1

    @staticmethod
    @first_order("reuse")
    def backward(ctx: Any, dy: Tensor) -> Any:
        tensors = ctx.saved_tensors
        i = 0
        ctx.seen.append(_counts(tensors[i]))
        return dy * 2, None


class _Holder(Kept):
    __slots__ = ()

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def _seen(pack: Any = None, unpack: Any = None, hold: Any = None) -> Counts:
    """Counts of its input in the backward of a node, where the input is another node's result. hold: takes the input
    and returns what to keep alive meanwhile."""
    seen: list[Counts] = []
    leaf = torch.ones(_N, device="cpu", requires_grad=True)
    if pack is None:
        held, y = _middle(leaf, hold, seen)
    else:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            held, y = _middle(leaf, hold, seen)
    (y * 2).sum().backward()
    del held
    return seen[0]


def _middle(leaf: Tensor, hold: Any, seen: list[Counts]) -> tuple[Any, Tensor]:
    x = leaf * 2
    return None if hold is None else hold(x), _Probe.apply(x, seen)


def _measured() -> _Free:
    def same(x: Tensor) -> Tensor:
        return x

    inside: list[tuple[int, int]] = []

    def get(holder: _Holder) -> Tensor:
        inside.append(_counts(holder.tensor)[:2])
        return holder.tensor

    free = _seen()
    made = _seen(lambda _: None, lambda _: torch.ones(_N, device="cpu"))
    kept = _seen(_Holder, get)
    hold = (same, Tensor.detach, lambda x: x[1:], Tensor.untyped_storage, torch.square)
    held = {_seen(hold=h) for h in hold}
    told = not {free, made, kept} & held and _seen(same, same) not in (free, made)
    return _Free(free, made, kept, inside[0]) if told else _NONE


def _apart() -> _Free:
    """`_measured` in a thread of its own, where no hooks, modes and contexts of others are."""
    found: list[_Free] = []
    thread = threading.Thread(target=lambda: found.append(_measured()))
    thread.start()
    thread.join()
    return found[0] if found else _NONE


_free = once(_apart)
