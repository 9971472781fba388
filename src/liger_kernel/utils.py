"""Questions about the machine and the installed packages that other projects ask here."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

from liger_kernel import _env, _packages
from liger_kernel._env import infer_comm_backend, infer_device

__all__ = [
    "PEFT_AVAILABLE",
    "get_total_gpu_memory",
    "infer_comm_backend",
    "infer_device",
    "infer_device_arch",
    "is_npu_available",
    "is_peft_available",
    "transformers_version_dispatch",
]


def is_peft_available() -> bool:
    """Whether `peft` is installed."""
    return _env.has_module("peft")


PEFT_AVAILABLE = is_peft_available()


def is_npu_available() -> bool:
    """Whether an Ascend NPU can be used."""
    return infer_device() == "npu"


@functools.cache
def infer_device_arch(device_id: int = 0) -> str:
    """The architecture of accelerator `device_id` by its common name, such as "hopper" or "cdna3".

    A code such as "sm_88" where the architecture has no name here, the device type where it cannot
    be asked.
    """
    kind = infer_device()
    if kind == "cpu":
        return kind
    try:
        return _env.arch_family(torch.device(kind, device_id))
    except (AssertionError, AttributeError, RuntimeError):
        return kind


def get_total_gpu_memory() -> int:
    """Memory of the current accelerator in whole GiB; the host's where there is none."""
    return _env.device_info(_env.default_device()).total_memory >> 30


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable[..., Any],
    after_fn: Callable[..., Any],
    before_args: tuple[Any, ...] = (),
    after_args: tuple[Any, ...] = (),
    before_kwargs: dict[str, Any] | None = None,
    after_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call `before_fn` if the installed transformers is older than `required_version`, else
    `after_fn`.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    found = _packages.version_of("transformers")
    if found is None:
        raise ModuleNotFoundError("transformers is not installed: pip install transformers.")
    if TorchVersion(found) < required_version:
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))
