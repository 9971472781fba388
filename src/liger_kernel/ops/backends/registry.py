"""The registry of vendor implementations other projects look into. This package has none: every op
chooses between its Triton kernels and plain PyTorch per call."""

from typing import Any

IMPL_REGISTRY: dict[str, Any] = {}
LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"
