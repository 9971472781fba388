"""A cache manager for compiled kernels that several processes may write to at once."""

from typing import Any

from liger_kernel import _env

try:
    from triton.runtime.cache import FileCacheManager
except ImportError:
    FileCacheManager: Any = object


class LigerTritonFileCacheManager(FileCacheManager):
    """Triton's own file cache. Since 3.2, our oldest, its `put` writes to a folder of its own and
    renames, so no reader sees half a file; the class keeps the name that jobs have configured."""


def apply_liger_triton_cache_manager() -> None:
    """Make Triton use `LigerTritonFileCacheManager`, by its variable `TRITON_CACHE_MANAGER`."""
    _env.export(
        "TRITON_CACHE_MANAGER",
        f"{LigerTritonFileCacheManager.__module__}:{LigerTritonFileCacheManager.__qualname__}",
    )
