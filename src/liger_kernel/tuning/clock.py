"""How long a call takes on a GPU: a captured graph of calls on inputs that take turns, replayed.

Launches cost the host nothing then, and no input is in a cache when its turn comes. The graph is captured anew for each
schedule. All of it has to happen `aside`, on one stream that is not the default one: that cannot be captured, and
autograd returns to the stream on which it first met a tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from liger_kernel import _env
from liger_kernel.bench.work import BACKWARD, FORWARD, Work

_SAMPLE_MS = 10.0
_MOST_REPLAYS = 200


class Clock:
    """`clock()` -> milliseconds of one call of `mode` on these works, under the schedules in force."""

    def __init__(self, works: Sequence[Work], mode: str, device: torch.device) -> None:
        self._works, self._mode, self._device = works, mode, device

    def __call__(self) -> float:
        accelerator = _env.memory_module(self._device)
        calls = [_call(work, self._mode) for work in self._works]
        for call in calls:
            call()
        _env.synchronize(self._device)
        graph = accelerator.CUDAGraph()
        graph.capture_begin()
        try:
            kept = [call() for call in calls]  # alive together: each writes memory of its own
        finally:
            graph.capture_end()
        ms = self._replay(graph, 1)
        ms = self._replay(graph, int(min(max(_SAMPLE_MS / ms, 3), _MOST_REPLAYS)))
        del graph, calls, kept
        accelerator.empty_cache()  # a graph's memory serves no other graph
        return ms / len(self._works)

    def _replay(self, graph: Any, times: int) -> float:
        """Milliseconds of one replay."""
        start, end = _env.event(self._device), _env.event(self._device)
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        _env.synchronize(self._device)
        return start.elapsed_time(end) / times


def _call(work: Work, mode: str) -> Callable[[], Any]:
    """The timed part of a call, which may be repeated."""
    if mode == FORWARD:
        return torch.no_grad()(work.forward)
    if mode == BACKWARD:
        outputs, inputs = work.forward(), [work.inputs[name] for name in work.grads]
        return lambda: torch.autograd.grad(outputs, inputs, work.upstream, retain_graph=True)
    return lambda: work.backward(work.forward())


def aside(device: torch.device) -> Any:
    """A context in which a new stream of `device` is the current one."""
    accelerator = _env.memory_module(device)
    return accelerator.stream(accelerator.Stream(device))


def can_run(device: torch.device) -> bool:
    """Whether the device can capture graphs of kernels."""
    return device.type != "cpu" and hasattr(_env.memory_module(device), "CUDAGraph")
