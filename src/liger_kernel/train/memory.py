"""Peak memory of this process above what it holds when the measurement starts.

Accelerator    torch's allocator: `max_memory_allocated`, above `memory_allocated` at the start
Linux CPU      the kernel's own peak resident size, VmHWM, set back at the start through /proc/self/clear_refs
Other CPU      the resident size, sampled every 5 ms by a thread (also on Linux where clear_refs is not permitted)
"""

import gc
import threading
import time
from pathlib import Path

import torch

from liger_kernel import _env

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): set VmHWM to the present resident size
_SAMPLE_SECONDS = 0.005


class PeakMemory:
    """Starts measuring when it is made; `peak()` is the bytes above that moment, at any time later."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._device = device
        self._sampler: _Sampler | None = None
        if device.type != "cpu":
            _env.synchronize(device)
            _env.memory_module(device).reset_peak_memory_stats(device)
            self._start = _env.memory_module(device).memory_allocated(device)
            self.method = "peak allocated"
            return
        self._start = _resident()
        self.method = "peak resident size"
        if not _reset_kernel_peak():
            self._sampler = _Sampler(self._start)
            self.method = "sampled resident size"

    def peak(self) -> int:
        """Bytes above the start at the highest point so far."""
        if self._device.type != "cpu":
            top = _env.memory_module(self._device).max_memory_allocated(self._device)
        elif self._sampler is not None:
            top = self._sampler.top
        else:
            top = _kernel_peak() or 0
        return max(top - self._start, 0)


class _Sampler:
    """Remembers the largest resident size a thread has seen."""

    def __init__(self, start: int) -> None:
        self.top = start
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.top = max(self.top, _resident())
            time.sleep(_SAMPLE_SECONDS)


def _resident() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def _reset_kernel_peak() -> bool:
    """Whether the kernel's peak could be set back to the present size."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return _kernel_peak() is not None


def _kernel_peak() -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
