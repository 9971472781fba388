"""Triton when it is installed, a stand-in when it is not; and the one place that launches
kernels.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from liger_kernel import _env

try:
    import triton
    import triton.language as tl

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

    class _Absent:
        """Stands for `triton` and `tl`: decorators and annotations work, launching says what is
        missing.
        """

        def __getattr__(self, name: str) -> "_Absent":
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

        def __getitem__(self, grid: Any) -> Any:
            raise ModuleNotFoundError(
                "This kernel needs triton, which is not installed: pip install triton."
            )

    triton: Any = _Absent()
    tl: Any = _Absent()

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "AVAILABLE",
    "UNFUSED",
    "Launch",
    "block_of",
    "cdiv",
    "launch",
    "planned",
    "takes_ptx",
    "tl",
    "triton",
]

# A compile option for differences of products that may cancel (a norm of one column, a softmax that one source takes):
# fused into a multiply-add, only one of the two products is rounded, and its rounding error is what remains.
UNFUSED = {"enable_fp_fusion": False}

# Older Tritons (below 3.4) call a compiled kernel in other ways.
_DIRECT = AVAILABLE and hasattr(triton, "knobs")
_compiled: dict[Any, Any] = {}
_STREAM = 3  # where a compiled kernel takes the stream's handle, behind the grid

# `CudaLauncher` of Triton 3.6: a call of it takes half a microsecond in Python, for scratch that most kernels have not.
_LAUNCHER_IS_KNOWN = AVAILABLE and triton.__version__.startswith("3.6.")
_FLAGS = ("launch_cooperative_grid", "launch_pdl")
_SCRATCH = ("global_scratch_size", "profile_scratch_size")


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any
) -> Any:
    """Run `kernel` over `grid` on `device` and its current stream; nothing to do for an empty grid.

    args are the kernel's first parameters, meta names the rest and the compile options. Triton's own call works out
    the specialisation of every argument each time; here a kernel compiled for arguments of the same kind is found by a
    short key and called directly. Returns the compiled kernel if it can be called so, else None.
    """
    if 0 in grid:
        return None
    if not (_DIRECT and _env.has_raw_streams(device)):
        with _env.on_device(device):
            kernel[grid](*args, **meta)
        return None
    kinds, values = _read(args)
    key = (id(kernel), device.index, *kinds, *meta.values())
    compiled = _compiled.get(key)
    with _env.on_device(device):
        if compiled is None:
            compiled = _compiled[key] = kernel[grid](*args, **meta)
        elif _hooked():
            compiled[_three(grid)](*args, *_rest(kernel, len(args), meta))
        else:
            compiled.run(
                *_three(grid), _env.raw_stream(device.index), compiled.function, compiled.packed_metadata,
                None, None, None, *values, *_rest(kernel, len(args), meta),
            )  # fmt: skip
    return compiled


class Launch:
    """A kernel, its grid and every argument that is no tensor: all of a call that follows from sizes.

        @planned
        def _forward(n_rows, n_cols, ...) -> Launch: ...

        _forward(n_rows, n_cols, ...)(y, x, weight)

    The kernel takes its tensors first, then the numbers, then what meta names. Tensors of the dtypes seen before, each
    of them aligned to 16 bytes, go to the compiled kernel at once; others through `launch`.
    """

    __slots__ = ("_given", "_index", "_known")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], device: torch.device, *numbers: Any, **meta: Any
    ):
        self._given = kernel, grid, device, numbers, meta
        self._index = device.index
        self._known: Any = [(0, "none yet")], None, [0]  # (place, dtype), what is run, arguments

    def __call__(self, *tensors: Tensor | None) -> None:
        kinds, run, arguments = self._known
        arguments = arguments.copy()
        for tensor, (place, dtype) in zip(tensors, kinds):  # noqa: B905, strict= takes .2 us
            if tensor is None:
                if dtype is not None:
                    break
            else:
                arguments[place] = pointer = tensor.data_ptr()
                if tensor.dtype is not dtype or pointer & 15:
                    break
        else:
            arguments[_STREAM] = stream = _env.raw_stream(self._index)
            if stream is not None and not _hooked():
                run(*arguments)
                return
        self._prepare(tensors)

    def _prepare(self, tensors: tuple[Tensor | None, ...]) -> None:
        kernel, grid, device, numbers, meta = self._given
        compiled = launch(kernel, grid, device, *tensors, *numbers, **meta)
        pointers = [0 if t is None else t.data_ptr() for t in tensors]
        if compiled is None or any(pointer & 15 for pointer in pointers):
            return
        run, added = _innermost(compiled.run)
        before = [*_three(grid), None, compiled.function, *added, compiled.packed_metadata]
        before += [None, None, None]
        rest = [*numbers, *_rest(kernel, len(tensors) + len(numbers), meta)]
        kinds = [(i, None if t is None else t.dtype) for i, t in enumerate(tensors, len(before))]
        self._known = kinds, run, [*before, *pointers, *rest]


def _innermost(run: Any) -> tuple[Any, tuple[Any, ...]]:
    """What a launcher calls in the end, and what it adds behind the function: its flags, and no scratch. Itself and
    nothing where it is not known to do just that.
    """
    known = _LAUNCHER_IS_KNOWN and all(hasattr(run, name) for name in ("launch", *_FLAGS))
    if not known or any(getattr(run, size, None) != 0 for size in _SCRATCH):
        return run, ()
    return run.launch, (*(getattr(run, flag) for flag in _FLAGS), None, None)


_plans: list[Any] = []


def planned(function: F) -> F:
    """Decorates a function of sizes, dtypes and flags that returns a `Launch` and what else follows from them: the last
    thousand answers are kept. Batches of ever new lengths take the time that they would without it.
    """
    kept = functools.lru_cache(maxsize=1024)(function)
    _plans.append(kept)
    return kept  # type: ignore[return-value]


def forget_plans() -> None:
    """Work them out anew: schedules have changed, or a test makes a device another one."""
    for kept in _plans:
        kept.cache_clear()


def _read(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """What Triton specialises these on (dtype and alignment, what is known of an integer), and their plain values."""
    kinds: list[Any] = []
    values: list[Any] = []
    for arg in args:
        value, kind = arg, type(arg)
        if kind is int:
            kinds += (arg & 15 == 0, arg == 1, -0x80000000 <= arg < 0x80000000)
        elif isinstance(arg, Tensor):
            value = arg.data_ptr()
            kinds += (arg.dtype, value & 15 == 0)
        elif hasattr(arg, "block_shape"):  # a descriptor of tiles for TMA
            kinds.append((arg.base.dtype, *arg.block_shape))
        else:
            kinds.append(kind)
        values.append(value)
    return kinds, values


def _three(grid: tuple[int, ...]) -> tuple[int, ...]:
    return (*grid, 1, 1)[:3]


def _rest(kernel: Any, given: int, meta: dict[str, Any]) -> list[Any]:
    """The arguments that meta names, in the kernel's order."""
    return [meta[name] for name in kernel.arg_names[given:]]


def _hooked() -> bool:
    """Whether somebody, a profiler say, wants to hear of launches: Triton's own call then tells them."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Each is None, a function or, in newer versions, a chain of them that may be empty.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def takes_ptx(device: torch.device) -> bool:
    """Whether kernels for this device may hold instructions of NVIDIA's."""
    return _env.device_info(device).arch.startswith("sm_") and not _env.interpreting()


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


def block_of(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()
