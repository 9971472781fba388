"""What a verification changes about a model for a while, and how it finds its way back."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_kernel import _env
from liger_kernel.ops._op import is_dtensor

_HALF = (torch.bfloat16, torch.float16)
_FUSED = {  # attributes of a config whose kernels know 16 bits alone -> what has a wide form
    "_attn_implementation_internal": "sdpa",
    "_experts_implementation_internal": "eager",
}


def why_not(model: nn.Module) -> str | None:
    """None if loss and gradients of this model can be compared, else the reason."""
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        return "none of its parameters requires a gradient"
    if any(is_dtensor(p) or p.numel() == 0 for p in parameters):
        return "its parameters are sharded: verify it in one process, before that"
    narrow = {p.dtype for p in parameters} - {*_HALF, torch.float32, torch.float64}
    if narrow:
        names = ", ".join(sorted(map(str, narrow)))
        return f"its weights are quantised ({names}), without a wider form to judge by"
    return None


@contextlib.contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """Afterwards the training mode of every module, all buffers and the random state are what they were."""
    modules = list(model.modules())
    modes = [(module, module.training) for module in modules]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    kind = _env.infer_device()
    devices = [] if kind == "cpu" else range(_env.device_count(kind))
    # For a CPU, which torch does not take for a type of devices, its default does.
    named: Any = {} if kind == "cpu" else {"device_type": kind}
    with torch.random.fork_rng(devices, **named):
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, values in buffers:
                module._buffers[name] = buffer.copy_(values)


# Exact arithmetic


def coarsest(model: nn.Module, device: torch.device) -> torch.dtype:
    """The coarsest dtype that a step computes in: of the weights, or autocast's."""
    found = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if torch.is_autocast_enabled(device.type):
        found.add(torch.get_autocast_dtype(device.type))
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def exact_for(dtype: torch.dtype) -> torch.dtype:
    """What a result in `dtype` is judged against: fp32 for 16 bits, else fp64."""
    return torch.float32 if dtype in _HALF else torch.float64


@contextlib.contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Within the block autocast is off, and a norm, a softmax or a loss of fp64 tensors stays in fp64."""
    with torch.autocast(device.type, enabled=False), _Unrounded():
        yield


@contextlib.contextmanager
def widened(module: nn.Module, exact: torch.dtype, device: torch.device) -> Iterator[None]:
    """Within the block the parameters hold the same numbers in `exact`, and nothing is rounded to less on the way.

    Buffers in fp32 stay: the tables of rotary embeddings are made from one, and are not in question.
    """
    tensors = itertools.chain(module.parameters(), module.buffers())
    narrow = [(t, t.data) for t in tensors if t.dtype in _HALF or _is_weight(t, torch.float32)]
    configs = {id(c): c for m in module.modules() if (c := getattr(m, "config", None)) is not None}
    chosen = [(c, name, getattr(c, name, None)) for c in configs.values() for name in _FUSED]
    try:
        for tensor, data in narrow:
            tensor.data = data.to(exact)
        for config, name, value in chosen:
            if _is_fused(value):
                setattr(config, name, _FUSED[name])
        with exactly(device):
            yield
    finally:
        for tensor, data in narrow:
            tensor.data = data
        for config, name, value in chosen:
            if _is_fused(value):
                setattr(config, name, value)


def wide(x: Any, exact: torch.dtype) -> Any:
    """A real tensor in `exact`; everything else as it is."""
    return x.to(exact) if isinstance(x, Tensor) and x.is_floating_point() else x


def _is_weight(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and isinstance(tensor, nn.Parameter)


def _is_fused(implementation: Any) -> bool:
    name = str(implementation)
    return "flash" in name or "mm" in name


class _Unrounded(TorchFunctionMode):
    """Casts of fp64 tensors to fp32 do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
