"""Which entry of a table is right and fastest at one size."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.bench import harness
from liger_kernel.bench.work import FORWARD, Make, Work, rewired, work_of
from liger_kernel.ops._schedules import Entry, Table
from liger_kernel.tuning.subjects import Subject

GAIN = 0.01  # of the time: less is noise, and the built-in entry stays
_FINALISTS, _ROUNDS = 4, 4
_ROTATED = 256 * _env.MIB  # bytes of inputs that take turns, several times any cache


@dataclass
class Found:
    """What a search has found: the entry, its milliseconds and the built-in one's (inf: it does not run here)."""

    entry: Entry
    ms: float
    built_in_ms: float
    tried: int
    failed: dict[Entry, str] = field(default_factory=dict)


def search(
    table: Table, key: int, check: Callable[[], object], clock: Callable[[], float], deadline: float = math.inf,
    max_warps: int = 32,
) -> Found | None:  # fmt: skip
    """Try every candidate that a program of `max_warps` can run; None if the deadline (`time.monotonic`) comes first.

    Under each entry `check` raises if the op's results are wrong and `clock` returns milliseconds. The fastest few and
    the built-in entry are then timed in turns. RuntimeError if no entry works, with the built-in one's reason.
    """
    built_in = table.entries[key]
    others = [e for e in table.candidates(key) if e != built_in and _warps(table, e) <= max_warps]
    times: dict[Entry, float] = {}
    failed: dict[Entry, str] = {}
    for entry in (built_in, *others):
        if time.monotonic() > deadline:
            return None
        with table.using(entry):
            try:
                check()
                times[entry] = clock()
            except (
                Exception
            ) as error:  # does not compile, does not fit, is wrong: not an entry for this card
                failed[entry] = harness.one_line(error)
    if not times:
        raise RuntimeError(f"{table.name} at {key}: no schedule works; {failed[built_in]}")
    finalists = sorted(times, key=times.__getitem__)[:_FINALISTS]
    if built_in in times and built_in not in finalists:
        finalists.append(built_in)
    samples: dict[Entry, list[float]] = {entry: [] for entry in finalists}
    for entry in [
        *finalists,
        *reversed(finalists),
    ] * _ROUNDS:  # clocks and heat meet all of them alike
        with table.using(entry):
            samples[entry].append(clock())
    medians = {entry: statistics.median(some) for entry, some in samples.items()}
    before = medians.get(built_in, math.inf)
    best = min(medians, key=medians.__getitem__)
    if medians[best] > (1 - GAIN) * before:
        best = built_in
    return Found(best, medians[best], before, len(times) + len(failed), failed)


def _warps(table: Table, entry: Entry) -> int:
    return dict(zip(table.fields, entry, strict=True)).get("warps", 1)


class Trial:
    """A subject's op on rows of one width, its results held against fp32."""

    def __init__(
        self, subject: Subject, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        make = Make(device, dtype)
        inputs = subject.inputs(make, subject.rows(width), width)
        self._work = work_of(subject.reference, inputs, subject.grads, make)
        self._truth = harness.results(rewired(self._work, subject.reference, torch.float32))
        self._work.function = subject.function
        self._mode, self._limit = subject.mode, harness.TOLERANCE[dtype]

    def check(self) -> float:
        """The worst relative error; `harness.Wrong` if it is too large."""
        found = results(self._work, self._mode)
        return harness.check(found, {name: self._truth[name] for name in found}, self._limit)

    def rotation(self) -> list[Work]:
        """Works on copies of the inputs, so many that none is in a cache when its turn comes."""
        each = sum(t.numel() * t.element_size() for _, t in self._work.tensors())
        copies = max(math.ceil(_ROTATED / each), 2) - 1
        return [self._work, *(rewired(self._work, self._work.function) for _ in range(copies))]


def results(work: Work, mode: str) -> dict[str, Tensor]:
    """What the timed call computes, by name."""
    if mode != FORWARD:
        return harness.results(work)
    with torch.no_grad():
        return {f"output {i}": y for i, y in enumerate(work.forward())}
