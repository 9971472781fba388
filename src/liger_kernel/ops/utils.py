"""Small things other projects import from here. Our own ops use `_op`, `_triton` and `_env`."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from liger_kernel import _env
from liger_kernel._env import infer_device, is_hip
from liger_kernel.ops._triton import AVAILABLE, block_of, tl

__all__ = [
    "amp_custom_bwd",
    "amp_custom_fwd",
    "calculate_settings",
    "compare_version",
    "device_context",
    "ensure_contiguous",
    "get_amp_custom_fwd_bwd",
    "infer_device",
    "is_hip",
    "torch_to_triton_dtype",
]

_MAX_BLOCK = 65536

torch_to_triton_dtype = (
    {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
    }
    if AVAILABLE
    else {}
)


def calculate_settings(n: int) -> tuple[int, int]:
    """(block, warps) of a program that holds a whole row of n values.

    Raises:
        RuntimeError: n does not fit into one block of 65536.
    """
    block = block_of(n)
    if block > _MAX_BLOCK:
        raise RuntimeError(f"A row of {n} values is too wide for one block of {_MAX_BLOCK}.")
    most = 16 if is_hip() else 32
    warps = 4 if block < 2048 else 8 if block < 8192 else 16 if block < 32768 else most
    return block, warps


def compare_version(package: str, operator: Callable[[Any, Any], bool], target: str) -> bool:
    """`operator(version of the importable package, target)`; False if it cannot be imported."""
    try:
        found = importlib.import_module(package).__version__
    except ImportError:
        return False
    return operator(TorchVersion(found), target)


def ensure_contiguous(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the tensors among the arguments arrive contiguous."""

    def dense(value: Any) -> Any:
        return value.contiguous() if isinstance(value, Tensor) else value

    @functools.wraps(fn)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(ctx, *map(dense, args), **{name: dense(value) for name, value in kwargs.items()})

    return wrapper


def device_context(device: torch.device) -> Any:
    """A context in which `device` is current."""
    return _env.on_device(device)


def get_amp_custom_fwd_bwd() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`torch.amp.custom_fwd` and `custom_bwd` for this machine's device type."""
    kind = infer_device()
    return (
        functools.partial(torch.amp.custom_fwd, device_type=kind),
        functools.partial(torch.amp.custom_bwd, device_type=kind),
    )


def amp_custom_fwd(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.amp.custom_fwd` for this machine's device type."""
    return get_amp_custom_fwd_bwd()[0](fn)


def amp_custom_bwd(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.amp.custom_bwd` for this machine's device type."""
    return get_amp_custom_fwd_bwd()[1](fn)
