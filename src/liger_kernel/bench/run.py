"""`liger-kernel bench`: measure the rows of benchmarks/rows on this machine.

Every row runs eager PyTorch, torch.compile and ours in one process (`harness`), then other libraries
in processes of their own (`peer`), and is held against what the card attains in the same run
(`roofline`). Its records are written before the next row begins, so a run that was cut goes on with
`--resume`. On a CPU every row runs at its tiny shape: that shows that the bench works and says
nothing about an accelerator.
"""

import contextlib
import importlib.metadata
import json
import math
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from typing import IO, Any

import torch

import liger_kernel
from liger_kernel import _env
from liger_kernel.bench import arguments, harness, peer, report, roofline
from liger_kernel.bench.arguments import Row
from liger_kernel.bench.harness import Builder, Measured
from liger_kernel.bench.report import Record
from liger_kernel.bench.row import Bench, load_table, measure_row
from liger_kernel.bench.work import Make

_LEFT = 3  # exit code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit codes stand in its help."""
    begin = time.perf_counter()
    parser, args = arguments.parse(argv)
    device = _env.default_device()
    name = _env.device_info(device).name
    try:
        table = load_table(args.table)
        rows = arguments.select(
            table.TABLE, args.rows, args.quick, device.type == "cpu", table.SIZES if args.sizes else None
        )  # fmt: skip
        peers = [peer.parse(text, table.PEERS) for text in args.peer]
        versions = _versions(peers)
        baseline = report.read(args.against) if args.against else []
        report.same_device(baseline, name)
        done = report.resumed(args.out, name, versions) if args.resume else []
    except (ValueError, OSError) as error:
        parser.error(str(error))
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(args.out, "a" if args.resume else "w")) if args.out else None
        run = Run(device, args.seconds, name, versions, out, done)
        ops = dict.fromkeys(bench.op for bench, _, _ in rows)
        run.sessions = [
            stack.enter_context(peer.Session(p, args.table, args.seconds, ops)) for p in peers
        ]
        deadline = math.inf if args.limit is None else begin + args.limit
        left = run.all(rows[args.shard or slice(None)], args.providers, deadline)
    print(report.headline(name, versions, run.bandwidth.copy, run.bandwidth.read))
    print(report.table(run.records))
    if args.sizes:
        print(report.against_eager(run.records))
    return _verdict(run.records, baseline, left, args.against)


def _verdict(records: list[Record], baseline: list[Record], left: int, against: Any) -> int:
    """The exit code; what it rests on is printed."""
    worse = report.regressions(baseline, records)
    for line in [*worse, *(report.uncompared(baseline, records) if against else ())]:
        print(line)
    if left:
        print(f"rows left: {left}; --resume goes on with them.")
    broken = any(r["status"] == "failed" and report.is_ours(r) for r in records)
    return _LEFT if left else int(broken or bool(worse))


class Run:
    """One run on one device: its measured ceilings and its records.

    `done` are the records of the run that this one goes on with: what they hold is not measured again.
    """

    def __init__(
        self, device: torch.device, seconds: float, name: str, versions: dict[str, str],
        out: IO[str] | None = None, done: Iterable[Record] = (),
    ) -> None:  # fmt: skip
        self.bandwidth = roofline.bandwidth(device)
        self.sessions: list[peer.Session] = []
        self.records = list(done)
        self._device, self._seconds, self._out = device, seconds, out
        self._machine = {"device": name, "versions": versions}
        self._done = {(r["row"], r["provider"]) for r in self.records}
        self._floors: dict[str, dict[str, float]] = {}
        self._host: dict[tuple[str, str], dict[str, float]] = {}
        self._rates: dict[tuple[int, int, int], roofline.Rate] = {}
        for r in self.records:
            if r["status"] == "ok":
                self._floors.setdefault(r["row"], {})[r["mode"]] = r["floor_ms"]
                if r["host_us"] is not None:
                    self._host.setdefault((r["op"], r["provider"]), {})[r["mode"]] = r["host_us"]

    def all(
        self, rows: Sequence[Row], only: Sequence[str] | None, deadline: float = math.inf
    ) -> int:
        """Measure what is missing, row by row; returns how many rows are left, at the deadline or after a fault.

        `only` names providers, or first words of their names.
        """
        missing = [row for row in rows if any(self._missing(row, only))]
        longest = 0.0
        for i, row in enumerate(missing):
            begin = time.perf_counter()
            if i and begin + longest > deadline:
                return len(missing) - i
            self._measure(row, only, f"[{i + 1}/{len(missing)}]")
            if not harness.tidy(self._device):
                print(f"a fault in {_name(row)} has left the device unusable here", file=sys.stderr)
                return len(missing) - i - 1
            longest = max(longest, time.perf_counter() - begin)
        return 0

    def _missing(
        self, row: Row, only: Sequence[str] | None
    ) -> tuple[dict[str, Builder], list[peer.Session]]:
        """Providers and peers that have no record of the row yet."""
        bench, name = row[0], _name(row)
        builders = {
            provider: build
            for provider, build in bench.providers().items()
            if (only is None or {provider, provider.split()[0]} & set(only))
            and (name, provider) not in self._done
        }
        sessions = [
            session
            for session in self.sessions
            if bench.op in session.one.peer.calls and (name, session.one.name) not in self._done
        ]
        return builders, sessions

    def _measure(self, row: Row, only: Sequence[str] | None, progress: str) -> None:
        bench, _, sizes = row
        name = _name(row)
        builders, sessions = self._missing(row, only)
        if builders:
            print(f"{progress} {name}", file=sys.stderr, flush=True)
            self._add(row, self._own(bench, name, sizes, builders))
        if name not in self._floors or not harness.tidy(self._device):
            return  # the row failed here
        for session in sessions:
            print(f"{progress} {name} {session.one.name}", file=sys.stderr, flush=True)
            self._add(row, {session.one.name: session.measure(bench.op, sizes)})

    def _own(
        self, bench: Bench, name: str, sizes: tuple[int, ...], builders: dict[str, Builder]
    ) -> dict[str, Measured]:
        known = {provider for op, provider in self._host if op == bench.op}
        device, seconds = self._device, self._seconds
        try:
            if name not in self._floors:
                self._floors[name] = self._floor(bench, sizes)
            return measure_row(bench, sizes, bench.reference(), builders, device, seconds, known)
        except Exception as error:  # the other rows still run; the exit code tells
            return {provider: Measured(reason=harness.one_line(error)) for provider in builders}

    def _floor(self, bench: Bench, sizes: tuple[int, ...]) -> dict[str, float]:
        inputs = bench.inputs(Make(self._device), *sizes)
        cost = bench.cost(bench.ops(), **inputs)
        shape = bench.products(**inputs) if bench.products else None
        del inputs
        if shape is not None and shape not in self._rates:
            harness.free(self._device)
            steady = min(1.0, self._seconds)
            self._rates[shape] = roofline.products(self._device, *shape, seconds=steady)
        rate = None if shape is None else self._rates[shape].sustained
        return {m: roofline.floor_ms(cost, m, self.bandwidth.copy, rate) for m in bench.modes}

    def _add(self, row: Row, measured: dict[str, Measured]) -> None:
        """Note and write a row's records, all at once: a run may be cut at any time."""
        bench, _, sizes = row
        new: list[Record] = []
        for provider, found in measured.items():
            start = {"row": _name(row), "op": bench.op, "sizes": list(sizes), "provider": provider}
            if found.reason is not None:
                records = [{"mode": None, "status": "failed", "reason": found.reason}]
            else:
                host = self._host.setdefault((bench.op, provider), found.host_us)
                records = [self._figures(row, found, host, mode) for mode in bench.modes]
            new += [start | record | self._machine for record in records]
        self.records += new
        if self._out is not None:
            self._out.write("".join(json.dumps(record) + "\n" for record in new))
            self._out.flush()

    def _figures(self, row: Row, found: Measured, host: dict[str, float], mode: str) -> Record:
        wall, kernel = found.wall[mode], found.kernel.get(mode)
        clock = "wall" if kernel is None else row[0].clock
        judged = wall if kernel is None or clock == "wall" else kernel
        floor, peak = self._floors[_name(row)][mode], found.peak.get(mode)
        return {
            "mode": mode,
            "status": "ok",
            "error": found.error,
            "overwrites": found.overwrites,
            "clock": "cpu" if self._device.type == "cpu" else clock,
            "ms": judged.median,
            "iqr_ms": judged.iqr,
            "samples": judged.n,
            "wall_ms": wall.median,
            "kernel_ms": None if kernel is None else kernel.median,
            "floor_ms": floor,
            "percent": 100 * floor / judged.median,
            "peak_mib": None if peak is None else peak / _env.MIB,
            "host_us": host.get(mode),
        }


def _name(row: Row) -> str:
    return f"{row[0].op}/{row[1]}"


def _versions(peers: Sequence[peer.Installed]) -> dict[str, str]:
    found: dict[str, str] = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    found[liger_kernel.__name__] = liger_kernel.__version__
    return found | {one.name: one.version() for one in peers}
