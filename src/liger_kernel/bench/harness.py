"""Measures one operator at one shape for several providers, after checking that each is right.

gate    outputs and gradients against plain torch in fp32, by relative Frobenius norm; a provider
        that is wrong is not timed
wall    one call between two device events, caches flushed before it, every call synchronised
kernel  the sum of that call's GPU kernels, as the device's own tracer saw them
memory  peak above the inputs during one call, gradients included
host    Python and launches of one call at a tiny shape, without waiting for the device

Providers take turns in balanced order (A B C, C B A, ...), so that clocks and heat meet all of them
alike. The autograd graph is built anew for every call. Inputs are random: products of zeros draw
less power and run faster. On a CPU `wall` is `perf_counter` with warm caches, and there is no
kernel time.
"""

import gc
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from liger_kernel import _env
from liger_kernel.bench.memory import PeakMemory
from liger_kernel.bench.work import Function, Inputs, Make, Work, rewired, work_of

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
COMPILE = "compile"
_FLUSH_BYTES = 256 * _env.MIB  # several times any L2
_WARM_SECONDS = 0.1
_HOST_BATCH_SECONDS = 0.05
_MARKER = "nextafter"  # the flush's kernel: one that no provider launches, not even for a mask
_DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

Builder = Callable[[], Function]


class Wrong(Exception):
    """A provider's result is not the reference's."""


class NoTrace(Exception):
    """The profiler did not see every call."""


@dataclass(frozen=True)
class Spread:
    """Median and interquartile range of `n` samples."""

    median: float
    iqr: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        if len(samples) == 1:
            return cls(samples[0], 0.0, 1)
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(middle, high - low, len(samples))


@dataclass
class Measured:
    """What was found about one provider: by mode, times in ms and peaks in bytes; or a reason."""

    error: float = math.nan  # worst relative error of outputs and gradients
    reason: str | None = None  # why it failed
    overwrites: list[str] = field(default_factory=list)  # caller's tensors it wrote over
    wall: dict[str, Spread] = field(default_factory=dict)
    kernel: dict[str, Spread] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)


# Gate -----------------------------------------------------------------------------------------------------------------


def results(work: Work) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    outputs = work.forward()
    if len(outputs) != len(work.upstream):
        raise Wrong(f"returns {len(outputs)} outputs instead of {len(work.upstream)}")
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    gradients = work.backward(outputs)
    return named | {f"grad of {n}": g for n, g in zip(work.grads, gradients, strict=True)}


def relative_error(found: Tensor, reference: Tensor) -> float:
    """|found - reference| / |reference| in the Frobenius norm; the plain distance if the reference is zero."""
    if found.shape != reference.shape:
        raise Wrong(f"shape {list(found.shape)} instead of {list(reference.shape)}")
    if not found.is_floating_point():  # exact, as fp64 is for these
        found, reference = found.double(), reference.double()
    distance = torch.linalg.vector_norm(torch.sub(found, reference))
    return (distance / (torch.linalg.vector_norm(reference) or 1.0)).item()


def check(found: Mapping[str, Tensor], reference: Mapping[str, Tensor], limit: float) -> float:
    """The worst relative error; `Wrong` if it is above `limit`."""
    if found.keys() != reference.keys():
        raise Wrong(f"returns {', '.join(found)} instead of {', '.join(reference)}")
    errors = {name: relative_error(value, reference[name]) for name, value in found.items()}
    for name, error in errors.items():
        if not error <= limit:  # NaN fails too
            raise Wrong(f"{name} is off by {error:.1e} of its norm, allowed {limit:.0e}")
    return max(errors.values())


def admit(
    base: Work, function: Function, reference: Mapping[str, Tensor], slack: float = 1.0
) -> tuple[Work, Measured]:
    """`function` made ready for timing on the tensors of `base`, or `Wrong` if its results are: off by more than
    `slack` times what ours may be off.
    """
    work = rewired(base, function)
    dtypes = [t.dtype for t in base.inputs.values() if t.is_floating_point()]
    limit = slack * TOLERANCE[dtypes[0]] if dtypes else 0.0  # integers are exact
    error = check(results(work), reference, limit)
    changed = [
        (name, mine, original)
        for (name, mine), (_, original) in zip(work.tensors(), base.tensors(), strict=True)
        if not torch.equal(mine, original)
    ]
    found = Measured(error=error, overwrites=[name for name, _, _ in changed])
    if not changed:
        return Work(function, base.inputs, base.grads, base.upstream), found
    work.restore = [(mine, original) for _, mine, original in changed]
    return work, found


# Clocks ---------------------------------------------------------------------------------------------------------------


class Timer:
    """Times single calls on `device` with cold caches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.accelerator = device.type != "cpu"
        size = _FLUSH_BYTES // 4 if self.accelerator else 0
        self._scratch = torch.zeros(size, dtype=torch.float32, device=device)

    def wall(self, work: Work, mode: str) -> float:
        """Milliseconds from the first to the last kernel of one call, gaps between them included."""
        prepared = work.prepare(mode)
        if not self.accelerator:
            begin = time.perf_counter()
            work.run(mode, prepared)
            return (time.perf_counter() - begin) * 1e3
        start, end = _env.event(self.device), _env.event(self.device)
        self._flush()
        start.record()
        work.run(mode, prepared)
        end.record()
        _env.synchronize(self.device)
        return start.elapsed_time(end)

    def _flush(self, size: int | None = None) -> None:
        """Read and write as much as drives everything else out of the caches; a size marks the end of a call."""
        some = self._scratch[:size]
        some.nextafter_(some)

    def kernels(self, shots: Sequence[tuple[Work, str]]) -> list[float]:
        """Milliseconds of GPU kernels, copies and fills in each of these calls."""
        activity = getattr(ProfilerActivity, self.device.type.upper())
        with profile(activities=[activity], acc_events=True) as profiler:
            for work, mode in shots:
                prepared = work.prepare(mode)
                self._flush()
                work.run(mode, prepared)
                self._flush(1)
                _env.synchronize(self.device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return split_trace(events, len(shots))


def split_trace(events: Sequence[Mapping[str, Any]], shots: int) -> list[float]:
    """Device milliseconds between each opening and closing marker; the rest is preparation."""
    device = sorted((e for e in events if e.get("cat") in _DEVICE_WORK), key=lambda e: e["ts"])
    sums, inside = [], False
    for event in device:
        if _MARKER in event["name"]:
            inside = not inside
            if inside:
                sums.append(0.0)
        elif inside:
            sums[-1] += event["dur"] / 1e3
    if len(sums) != shots or inside:
        raise NoTrace(f"{len(sums)} of {shots} calls are complete in the profiler's trace")
    return sums


def balanced(names: Sequence[str], rounds: int) -> Iterator[str]:
    """A B C C B A A B C ...: every name `rounds` times."""
    for turn in range(rounds):
        yield from names if turn % 2 == 0 else reversed(names)


def host_us(work: Work, mode: str, device: torch.device) -> float:
    """Microseconds of host time per call, median of five batches that do not wait for the device.

    `mode` is forward or forward + backward: backward alone cannot be repeated.
    """

    def batch(calls: int) -> float:
        _env.synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            work.run(mode, None)  # restoring inputs would count
        return (time.perf_counter() - begin) / calls

    batch(3)
    calls = min(max(1, int(_HOST_BATCH_SECONDS / batch(3))), 100)  # 100: launch queues are finite
    seconds = statistics.median(batch(calls) for _ in range(5))
    _env.synchronize(device)
    return seconds * 1e6


# Measuring ------------------------------------------------------------------------------------------------------------


def compiled(function: Function) -> Function:
    """`torch.compile` of it for static shapes, with nothing left over from earlier rows."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def gate(
    reference: Function, providers: Mapping[str, Builder], inputs: Inputs,
    grads: tuple[str, ...], make: Make, slack: float = 1.0,
) -> tuple[dict[str, Work], dict[str, Measured]]:  # fmt: skip
    """Build every provider and keep those that agree with `reference` computed in fp32.

    A provider may fail in any way (not installed, out of memory, wrong): `Measured.reason` says how.
    """
    base = work_of(reference, inputs, grads, make)
    truth = results(rewired(base, reference, torch.float32))
    works: dict[str, Work] = {}
    found: dict[str, Measured] = {}
    device = next(iter(inputs.values())).device
    for name, build in providers.items():
        free(device)
        try:
            works[name], found[name] = admit(base, build(), truth, slack)
        except Exception as error:
            found[name] = Measured(reason=one_line(error))
    return works, found


def one_line(error: Exception) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def measure(
    reference: Function, providers: Mapping[str, Builder], inputs: Inputs, grads: tuple[str, ...],
    modes: Sequence[str], device: torch.device, seconds: float, make: Make, slack: float = 1.0,
) -> dict[str, Measured]:  # fmt: skip
    """Gate, time and weigh every provider on these inputs; the timed calls take about `seconds`.

    `providers` maps a name to a builder of the callable, which is called with `inputs` as keywords
    and returns a tensor or a tuple of tensors. `grads` names the inputs whose gradients are taken.
    """
    works, found = gate(reference, providers, inputs, grads, make, slack)
    free(device)
    timer = Timer(device)
    for mode in modes if works else ():
        budget = seconds / len(modes) / (2 if timer.accelerator else 1)
        round_seconds = sum(_warm(timer, work, mode, budget) for work in works.values())
        rounds = min(max(4, int(budget / round_seconds)), 100)
        order = list(balanced(list(works), rounds))
        walls = [timer.wall(works[name], mode) for name in order]
        for name, spread in _spreads(order, walls):
            found[name].wall[mode] = spread
        if timer.accelerator:
            order = list(balanced(list(works), min(rounds, 30)))
            try:
                kernels = timer.kernels([(works[name], mode) for name in order])
            except NoTrace as error:  # some drivers have no tracer
                warnings.warn(f"no kernel times, wall times only: {error}", stacklevel=2)
                continue
            for name, spread in _spreads(order, kernels):
                found[name].kernel[mode] = spread
    del timer  # its scratch is not part of anybody's peak
    for name, work in works.items():
        if device.type != "cpu" or name != COMPILE:  # the CPU meter would see it uncompiled
            found[name].peak = {mode: peak(work, mode, device) for mode in modes}
    return found


def peak(work: Work, mode: str, device: torch.device) -> int:
    """Bytes above the inputs at the worst moment of one call, its outputs and gradients included."""
    free(device)
    prepared = work.prepare(mode)
    with PeakMemory(device) as meter:
        result = work.run(mode, prepared)
    del result
    return meter.bytes


def free(device: torch.device) -> None:
    """Give cached memory back, so that no provider starts with another's fragments."""
    if device.type != "cpu":
        gc.collect()
        _env.memory_module(device).empty_cache()


def tidy(device: torch.device) -> bool:
    """Give memory back to other processes; False if a kernel's fault has left the device unusable in this one."""
    try:
        free(device)
        _env.synchronize(device)
    except RuntimeError:
        return False
    return True


def _warm(timer: Timer, work: Work, mode: str, budget: float) -> float:
    """Call until clocks and caches are warm; seconds one shot takes, all around it included."""
    begin, calls = time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - begin < min(_WARM_SECONDS, budget):
        timer.wall(work, mode)
        calls += 1
    return (time.perf_counter() - begin) / calls


def _spreads(order: Sequence[str], samples: Sequence[float]) -> Iterator[tuple[str, Spread]]:
    for name in dict.fromkeys(order):
        yield name, Spread.of([x for other, x in zip(order, samples, strict=True) if other == name])
