"""Fused Triton kernels for training language models, and one line that puts them under a model.

    import liger_kernel
    report = liger_kernel.patch(model)      # any Hugging Face model; report.undo() takes it back
    liger_kernel.verify(model, batches)     # does it still compute what it did?
    liger_kernel.functional.rms_norm(x, w)  # or the functions themselves

Importing this patches nothing, sets no environment variable and touches no accelerator. Everything
but the choice of implementation is loaded when it is first used.
"""

# pyright: reportUnsupportedDunderAll=false
# (names of __all__ that `_LAZY` provides)

import importlib
import warnings
from typing import Any

from liger_kernel import _aliases, _packages
from liger_kernel._env import get_impl, set_impl

__version__ = _packages.package_version()

# The older spellings are the same objects.
get_backend, set_backend = get_impl, set_impl

__all__ = [
    "available_backends",
    "available_impls",
    "get_backend",
    "get_impl",
    "patch",
    "patched",
    "set_backend",
    "set_impl",
    "verify",
]

_LAZY = {
    "available_backends": "functional:available_impls",
    "available_impls": "functional:available_impls",
    "functional": "functional",
    "patch": "transformers.patch:patch",
    "patched": "transformers.patch:patched",
    "verify": "verification.verify:verify",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, _, attribute = _LAZY[name].partition(":")
    module = importlib.import_module(f"{__name__}.{path}")
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


_aliases.install()

if _foreign := _packages.foreign_distributions():
    warnings.warn(
        f"{', '.join(_foreign)} brings another package named liger_kernel; its files and those of "
        f"{_packages.DISTRIBUTION} {__version__} hide or overwrite each other. Uninstall both, then "
        "install one.",
        stacklevel=2,
    )
