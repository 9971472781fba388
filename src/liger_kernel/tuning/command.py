"""`liger-kernel tune`: arguments, progress, the file."""

import argparse
import difflib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from liger_kernel import _env, _packages
from liger_kernel.ops import _schedules, _triton
from liger_kernel.ops._schedules import Entry, Record
from liger_kernel.train import UsageError
from liger_kernel.tuning.clock import Clock, aside, can_run
from liger_kernel.tuning.search import Found, Trial, search
from liger_kernel.tuning.subjects import SUBJECTS, Subject

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SECONDS = 900


@dataclass(frozen=True)
class Job:
    """One key of a table, measured at one width."""

    subject: Subject
    key: int
    width: int
    dtype: torch.dtype

    @property
    def name(self) -> tuple[str, int, int]:
        """What a file knows it by."""
        return self.subject.table.name, self.key, self.dtype.itemsize

    def __str__(self) -> str:
        table = self.subject.table
        return f"{table.name:28} {self.subject.rows(self.width)}x{self.width}"


def main(argv: Sequence[str]) -> int:
    """Run the command: 0 done or out of time, 1 no GPU or no schedule that works, 2 bad arguments."""
    args = _parser().parse_args(argv)
    device = _env.default_device()
    info = _env.device_info(device)
    card = _schedules.card_of(device)
    path = args.out or _schedules.path_of(card)
    if path is None:
        raise UsageError(
            "LIGER_KERNEL_SCHEDULES is off, so there is no place to write to: name one with --out."
        )
    jobs = plan(args.tables, args.widths, _DTYPES[args.dtype])
    if args.dry_run:
        print(_describe(jobs, path))
        return 0
    if not _triton.AVAILABLE or not can_run(device):
        print(
            f"liger-kernel tune needs a GPU with Triton and CUDA graphs; this device is {info.name}. "
            "--dry-run says what would be tried."
        )
        return 1
    return Run(path, card, device, args.again).measure(jobs, args.seconds)


def plan(names: Sequence[str], widths: Sequence[int], dtype: torch.dtype) -> list[Job]:
    """One job for each key that the widths lead to (the last of those that share a key), by default a table's own."""
    tables = {s.table.name: s for s in SUBJECTS}
    ops = {name.partition(".")[0] for name in tables}
    for name in names:
        if name not in tables and name not in ops:
            near = difflib.get_close_matches(name, [*ops, *tables], 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(tables)}."
            raise UsageError(f"unknown table {name!r}. {hint}")
    jobs = {}
    for name, subject in tables.items():
        if names and not {name, name.partition(".")[0]} & set(names):
            continue
        for width in widths or subject.widths:
            size = subject.size(width, dtype.itemsize)
            if size <= subject.table.widest:  # beyond, there are other kernels
                job = Job(subject, subject.table.key(size), width, dtype)
                jobs[job.name] = job
    if not jobs:
        raise UsageError("no schedule is looked up for rows of these widths.")
    return list(jobs.values())


class Run:
    """A run on one card: reads what the file holds, measures the rest, writes after every key."""

    def __init__(self, path: Path, card: str, device: torch.device, again: bool) -> None:
        self._path, self._card, self._device = path, card, device
        self._again = again
        self._versions = {"torch": torch.__version__, "triton": _packages.version_of("triton")}
        self._records = {(r["table"], r["key"], r["bytes"]): r for r in self._read()}

    def measure(self, jobs: Sequence[Job], seconds: int) -> int:
        """Measure what the file lacks, until time is over; the exit code."""
        todo = [job for job in jobs if self._again or not self._is_known(job)]
        if len(todo) < len(jobs):
            known = f"{len(jobs) - len(todo)} of {len(jobs)} are in {self._path} already"
            print(f"{known} (--again measures anew)")
        deadline, broken = time.monotonic() + seconds, 0
        for done, job in enumerate(todo):
            try:
                found = self._find(job, deadline)
            except RuntimeError as error:  # no memory, or no entry works: other keys may do
                print(f"{job}  failed: {error}", flush=True)
                broken += 1
                continue
            if found is None:
                left = f"{len(todo) - done} of {len(todo)} keys are left"
                print(f"{seconds} s are over, {left}: run it again to go on")
                break
            self._keep(job, found)
            print(line(job, found), flush=True)
        print(f"{len(self._records)} schedules for {self._card} in {self._path}{self._hint()}")
        return int(broken > 0)

    def _read(self) -> list[Record]:
        try:
            return _schedules.read(self._path, self._card)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot add to {self._path}: {error}. Remove it, or name another file with --out."
            ) from None

    def _is_known(self, job: Job) -> bool:
        """A width that was asked for is measured itself; a table's own does not take the place of one."""
        record = self._records.get(job.name)
        if record is None or record.get("versions") != self._versions:
            return False
        return job.width in (record.get("width"), *job.subject.widths)

    def _find(self, job: Job, deadline: float) -> Found | None:
        if time.monotonic() > deadline:
            return None
        warps = _env.device_info(self._device).max_warps
        with aside(self._device):
            trial = Trial(job.subject, job.width, job.dtype, self._device)
            clock = Clock(trial.rotation(), job.subject.mode, self._device)
            return search(job.subject.table, job.key, trial.check, clock, deadline, warps)

    def _keep(self, job: Job, found: Found) -> None:
        name, key, itemsize = job.name
        ran = math.isfinite(found.built_in_ms)
        self._records[job.name] = {
            "table": name,
            "key": key,
            "bytes": itemsize,
            "schedule": dict(zip(job.subject.table.fields, found.entry, strict=True)),
            "width": job.width,
            "ms": round(found.ms, 5),
            "built_in_ms": round(found.built_in_ms, 5) if ran else None,
            "versions": self._versions,
        }
        try:
            _schedules.write(self._path, self._card, list(self._records.values()))
        except OSError as error:
            raise UsageError(f"cannot write {self._path}: {error.strerror}") from None

    def _hint(self) -> str:
        if self._path == _schedules.path_of(self._card):
            return ", in force from the next process on"
        return f"; in force where LIGER_KERNEL_SCHEDULES names a folder that has it as {self._card}.json"


def line(job: Job, found: Found) -> str:
    """What a search has changed, on one line."""
    table = job.subject.table
    built_in = table.entries[job.key]
    tried = f"({found.tried} tried)"
    if found.failed:
        reason = next(iter(found.failed.values()))
        tried = f"({found.tried} tried, {len(found.failed)} failed: {reason:.60})"
    if found.entry == built_in:
        return f"{job}  {_shown(table.fields, built_in)}  {found.ms:.4f} ms, kept  {tried}"
    gain = 100 * (1 - found.ms / found.built_in_ms)
    return (
        f"{job}  {_shown(table.fields, built_in)}  {found.built_in_ms:.4f} ms -> "
        f"{_shown(table.fields, found.entry)}  {found.ms:.4f} ms, {gain:.1f} % less  {tried}"
    )


def _shown(fields: Iterable[str], entry: Entry) -> str:
    return " ".join(f"{name}={value}" for name, value in zip(fields, entry, strict=True))


def _describe(jobs: Sequence[Job], path: Path) -> str:
    lines, total = [], 0
    for job in jobs:
        table = job.subject.table
        count = len(table.candidates(job.key))
        total += count
        built_in = _shown(table.fields, table.entries[job.key])
        lines.append(f"{job}  {count} candidates, built in: {built_in}")
    return "\n".join([*lines, f"{total} candidates; what is best would be written to {path}"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "liger-kernel tune",
        description="Measure launch schedules on this GPU and write down the fastest, for later processes to use.",
    )
    add = parser.add_argument
    add(
        "tables",
        nargs="*",
        metavar="TABLE",
        help="e.g. rms_norm.backward, or rms_norm for all of its own (all)",
    )
    add(
        "--widths",
        nargs="+",
        type=_positive,
        default=(),
        metavar="N",
        help="columns of a row (a width for every key)",
    )
    add(
        "--dtype",
        choices=_DTYPES,
        default="bf16",
        help="default bf16; schedules count for dtypes of its size",
    )
    add(
        "--seconds",
        type=_positive,
        default=_SECONDS,
        help=f"stop after this time ({_SECONDS}); run again to go on",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write there (this card's file in LIGER_KERNEL_SCHEDULES)",
    )
    add("--again", action="store_true", help="measure what the file holds already, too")
    add("--dry-run", action="store_true", help="only say what would be tried")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value
