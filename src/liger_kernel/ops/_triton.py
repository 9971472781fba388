"""Triton when it is installed, a stand-in when it is not; and the one place that launches
kernels.
"""

from typing import Any

import torch

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

__all__ = ["AVAILABLE", "UNFUSED", "block_of", "cdiv", "launch", "tl", "triton"]

# A compile option for differences of products that may cancel (a norm of one column, a softmax that one source takes):
# fused into a multiply-add, only one of the two products is rounded, and its rounding error is what remains.
UNFUSED = {"enable_fp_fusion": False}


_compiled: dict[Any, Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any
) -> None:
    """Run `kernel` over `grid` on `device` and its current stream; nothing to do for an empty grid.

    args are the kernel's first parameters, meta names the rest and the compile options. Triton's own call works out
    the specialisation of every argument each time; here a kernel compiled for arguments of the same kind is found by a
    short key and called directly, in about 60 % of the time.
    """
    if 0 in grid:
        return
    if device.type == "cpu" or _env.is_hip():
        with _env.on_device(device):
            kernel[grid](*args, **meta)
        return
    key = (id(kernel), device.index, *map(_kind, args), *meta.values())
    compiled = _compiled.get(key)
    with _env.on_device(device):
        if compiled is None:
            _compiled[key] = kernel[grid](*args, **meta)
        else:
            rest = [meta[name] for name in kernel.arg_names[len(args) :]]
            compiled[(*grid, 1, 1)[:3]](*args, *rest)


def _kind(arg: Any) -> Any:
    """What Triton specialises an argument on: dtype and alignment, or what is known of an integer."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if type(arg) is int:
        return arg % 16 == 0, arg == 1, -0x80000000 <= arg < 0x80000000
    return None if arg is None else type(arg)


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


def block_of(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()
