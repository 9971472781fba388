"""Triton's cache manager by the name other projects set. (Not Triton itself: that is `triton`.)"""

from liger_kernel.triton.monkey_patch import apply_liger_triton_cache_manager

__all__ = ["apply_liger_triton_cache_manager"]
