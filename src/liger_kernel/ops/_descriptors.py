"""Tensor descriptors: tiles of matrices through the tensor memory accelerator of Hopper and later."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton, or one before 3.4
    TensorDescriptor: Any = None

__all__ = ["TensorDescriptor", "aligned", "pays"]

_MEMORY = 200 << 10  # bytes of shared memory that the pipelines of the largest tiles take


def pays(device: torch.device) -> bool:
    """Whether the device has the accelerator, and the shared memory to feed its matrix units through it."""
    info = _env.device_info(device)
    return info.capability >= 90 and info.shared_memory >= _MEMORY


def aligned(x: Tensor) -> bool:
    """Whether descriptors can describe x: one adjacent dimension, 16-byte base and other strides."""
    wide = [s for s in x.stride() if s != 1]
    unit = 16 // x.element_size()
    whole = all(s % unit == 0 for s in wide) and x.data_ptr() % 16 == 0
    return whole and len(wide) == x.dim() - 1 and x.numel() > 0
