"""Peak memory of a piece of code, in bytes above what was allocated when it began.

    with PeakMemory(device) as meter:
        loss = step()
    meter.bytes

On an accelerator the caching allocator counts (it rounds each tensor up to 512 bytes). On a CPU
nothing does, so a dispatch mode watches every operator: a storage counts from the operator that
first returns it until it is freed. That is exact to the byte for tensors made by operators; scratch
space inside a C++ operator, and memory of numpy and of Triton's interpreter, stay unseen. Operators
written in Python (this package's launchers, custom ops) are looked into. Code from `torch.compile`
runs uncompiled under the mode.
"""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel import _env

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class PeakMemory:
    """Context manager; `.bytes` is the peak above the level at entry, readable inside and after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: Storages | None = None
        self._level = 0
        self._peak = 0

    def __enter__(self) -> "PeakMemory":
        if self._device.type == "cpu":
            self._storages = Storages().__enter__()
            return self
        _env.synchronize(self._device)
        memory = _env.memory_module(self._device)
        memory.reset_peak_memory_stats(self._device)
        self._level = memory.memory_allocated(self._device)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._storages is not None:
            self._storages.__exit__(*exception)
        self._peak = self.bytes
        self._device = torch.device("meta")  # later allocations are not ours

    @property
    def bytes(self) -> int:
        """Peak so far, in bytes above the level at entry."""
        if self._device.type == "meta":
            return self._peak
        if self._storages is not None:
            return self._storages.peak
        _env.synchronize(self._device)
        return _env.memory_module(self._device).max_memory_allocated(self._device) - self._level


class Storages(TorchDispatchMode):
    """Counts the bytes of storages that operators create while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._sizes: dict[weakref.ref, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = {id(s) for s in _storages_of((args, kwargs))}
        result = self.run(func, args, kwargs)
        for storage in _storages_of(result):
            known = weakref.ref(storage, self._freed)
            if known in self._sizes or id(storage) not in before:
                self._count(known, storage.nbytes())
        return result

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator's result, with every storage in sight."""
        if func.namespace in {"aten", "prim", "prims"}:
            return func(*args, **kwargs)
        # A mode is off inside its handler; past the dispatcher it can be on and see inside.
        with self:
            return func.redispatch(_CPU_KEYS, *args, **kwargs)

    def _count(self, key: weakref.ref, size: int) -> None:
        self.alive += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        if self.alive > self.peak and _env.interpreting():
            gc.collect(1)  # the interpreter's frames hold kernel arguments in reference cycles
        self.peak = max(self.peak, self.alive)

    def _freed(self, key: weakref.ref) -> None:
        self.alive -= self._sizes.pop(key, 0)


def _storages_of(tree: Any) -> list[torch.UntypedStorage]:
    leaves = tree_leaves(tree)
    found = [
        x.untyped_storage() for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided
    ]
    return found + [x for x in leaves if isinstance(x, torch.UntypedStorage)]  # set_(storage)
