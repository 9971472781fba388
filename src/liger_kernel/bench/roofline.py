"""What this card attains, measured in the same run: the ceiling every row is held against.

memory    a copy between two large buffers (bytes read + bytes written), and a pure read
products  the three matrix products of a linear cross entropy, logits = h W^T, dh = d W,
          dW = d^T h: in bursts (the card rests between them) and sustained (the card runs into
          its power limit, as in training); rows are held against the sustained rate
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_kernel import _env
from liger_kernel.bench.work import BOTH, FORWARD, Make
from liger_kernel.ops._op import Cost

_BUFFER = 2 << 30


@dataclass(frozen=True)
class Bandwidth:
    """GB/s (1e9 bytes a second)."""

    copy: float
    read: float


@dataclass(frozen=True)
class Rate:
    """TFLOP/s of the three products."""

    burst: float
    sustained: float


def bandwidth(device: torch.device) -> Bandwidth:
    """Measure copy and read bandwidth with buffers far larger than any cache."""
    size = _BUFFER if device.type != "cpu" else 16 * _env.MIB
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copy = statistics.median(_seconds(lambda: target.copy_(source), device) for _ in range(10))
    read = statistics.median(_seconds(source.sum, device) for _ in range(10))
    return Bandwidth(copy=2 * size / copy / 1e9, read=size / read / 1e9)


def products(device: torch.device, n: int, h: int, v: int, seconds: float = 1.0) -> Rate:
    """Measure the three bf16 products of `n` tokens, `h` features and `v` classes on random operands."""
    make = Make(device)
    hidden, weight = make(n, h), make(v, h).mul_(0.02)
    logits, dh, dw = hidden @ weight.t(), torch.empty_like(hidden), torch.empty_like(weight)

    def three() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=dh)
        torch.mm(logits.t(), hidden, out=dw)

    _seconds(three, device)
    burst = []
    for _ in range(5):
        time.sleep(seconds / 5)
        burst.append(_seconds(three, device))
    steady, deadline = [], time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(steady) < 4:
        steady.append(_seconds(three, device))
    flops = 6e-12 * n * h * v
    late = steady[len(steady) // 2 :]
    return Rate(flops / statistics.median(burst), flops / statistics.median(late))


def floor_ms(cost: Cost, mode: str, copy: float, tflops: float | None) -> float:
    """The least milliseconds this card needs: bytes at `copy` GB/s or products, the longer of both.

    `Cost.flops` counts forward and backward together, because the vocabulary losses do both at once.
    """
    moved = cost.forward_bytes if mode == FORWARD else cost.backward_bytes
    moved += cost.forward_bytes if mode == BOTH else 0
    memory = moved / (copy * 1e9) * 1e3
    if mode != BOTH or tflops is None:
        return memory
    return max(memory, cost.flops / (tflops * 1e12) * 1e3)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    start, end = _env.event(device), _env.event(device)
    start.record()
    call()
    end.record()
    _env.synchronize(device)
    return start.elapsed_time(end) / 1e3
