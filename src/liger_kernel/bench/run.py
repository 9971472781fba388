"""`liger-kernel bench`: measure the rows of benchmarks/rows on this machine.

Every row runs eager PyTorch, torch.compile and ours in one process (`harness`), other libraries in
processes of their own (`peer`), and is held against what the card attains in the same run
(`roofline`). On a CPU every row runs at its tiny shape: that shows that the bench works and says
nothing about an accelerator.
"""

import argparse
import contextlib
import difflib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from liger_kernel import _env
from liger_kernel.bench import harness, peer, report, roofline
from liger_kernel.bench.harness import Measured
from liger_kernel.bench.report import Record
from liger_kernel.bench.row import Bench, load_table, measure_row
from liger_kernel.bench.work import Make

_TABLE = Path(__file__).parents[3] / "benchmarks" / "table.py"
Row = tuple[Bench, str, tuple[int, ...]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: 0 done, 1 ours is wrong or worse than `--against`, 2 bad arguments."""
    parser = _parser()
    args = parser.parse_args(argv)
    device = _env.default_device()
    name = _env.device_info(device).name
    try:
        table = load_table(args.table)
        rows = select(table.TABLE, args.rows, args.quick, tiny=device.type == "cpu")
        peers = [peer.parse(text, table.PEERS) for text in args.peer]
        baseline = report.read(args.against) if args.against else []
        report.same_device(baseline, name)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    with open(args.out, "w") if args.out else contextlib.nullcontext() as out:
        run = Run(device, args.seconds, name, _versions(peers), out)
        for bench, label, sizes in rows:
            print(f"{bench.op}/{label}", file=sys.stderr, flush=True)
            run.measure(bench, label, sizes, args.providers)
        for one in peers:
            run.measure_peer(one, rows, args.table)
    speeds = run.bandwidth
    print(report.headline(name, run.versions, speeds.copy, speeds.read))
    print(report.table(run.records))
    worse = report.regressions(baseline, run.records)
    for line in worse:
        print(line)
    broken = any(r["status"] == "failed" and report.is_ours(r) for r in run.records)
    return int(broken or bool(worse))


class Run:
    """One run on one device: its measured ceilings and its records."""

    def __init__(
        self, device: torch.device, seconds: float, name: str, versions: dict[str, str], out: Any = None
    ) -> None:  # fmt: skip
        self.bandwidth = roofline.bandwidth(device)
        self.versions = versions
        self.records: list[Record] = []
        self._device, self._seconds, self._name, self._out = device, seconds, name, out
        self._floors: dict[str, dict[str, float]] = {}
        self._rates: dict[tuple[int, int, int], roofline.Rate] = {}

    def measure(
        self, bench: Bench, label: str, sizes: tuple[int, ...], only: Sequence[str] | None = None
    ) -> None:
        """Measure one row; `only` names providers, or first words of their names."""
        row, builders = f"{bench.op}/{label}", bench.providers()
        if only is not None:
            builders = {n: b for n, b in builders.items() if {n, n.split()[0]} & set(only)}
        try:
            self._floors[row] = self._floor(bench, sizes)
            found = measure_row(
                bench, sizes, bench.reference(), builders, self._device, self._seconds
            )
        except Exception as error:  # the other rows still run; the exit code tells
            found = {"ours": Measured(reason=f"{type(error).__name__}: {error}")}
        for provider, one in found.items():
            self._add(bench, row, provider, one)

    def measure_peer(self, one: peer.Installed, rows: Sequence[Row], table: Path) -> None:
        """Measure the rows for another library; rows without a floor (they failed) are left out."""
        benches = {f"{b.op}/{label}": b for b, label, _ in rows}
        wanted = [(b.op, label, s) for b, label, s in rows if f"{b.op}/{label}" in self._floors]
        harness.free(self._device)
        for row, found in peer.measure(one, wanted, table, self._seconds):
            print(f"{row} {one.name}", file=sys.stderr, flush=True)
            self._add(benches[row], row, one.name, found)

    def _floor(self, bench: Bench, sizes: tuple[int, ...]) -> dict[str, float]:
        inputs = bench.inputs(Make(self._device), *sizes)
        cost = bench.cost(bench.ops(), **inputs)
        shape = bench.products(**inputs) if bench.products else None
        del inputs
        if shape is not None and shape not in self._rates:
            harness.free(self._device)
            self._rates[shape] = roofline.products(self._device, *shape)
        rate = None if shape is None else self._rates[shape].sustained
        return {m: roofline.floor_ms(cost, m, self.bandwidth.copy, rate) for m in bench.modes}

    def _add(self, bench: Bench, row: str, provider: str, found: Measured) -> None:
        start = {"row": row, "op": bench.op, "provider": provider}
        end = {"device": self._name, "versions": self.versions}
        if found.reason is not None:
            records = [{"mode": None, "status": "failed", "reason": found.reason}]
        else:
            records = [self._figures(bench, row, found, mode) for mode in bench.modes]
        for record in records:
            self.records.append(start | record | end)
            if self._out is not None:
                print(json.dumps(self.records[-1]), file=self._out, flush=True)

    def _figures(self, bench: Bench, row: str, found: Measured, mode: str) -> Record:
        wall, kernel = found.wall[mode], found.kernel.get(mode)
        clock = "wall" if kernel is None else bench.clock
        judged = wall if kernel is None or clock == "wall" else kernel
        floor, peak = self._floors[row][mode], found.peak.get(mode)
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
            "host_us": found.host_us.get(mode),
        }


# Arguments ------------------------------------------------------------------------------------------------------------


def select(table: Sequence[Bench], asked: Sequence[str], quick: bool, tiny: bool) -> list[Row]:
    """Rows named by op or op/label, all if none is; `tiny` takes each op's tiny shape instead."""
    known = {f"{b.op}/{label}": (b, label, s) for b in table for label, s in b.shapes.items()}
    ops = {b.op for b in table}
    for name in asked:
        if name not in ops and name not in known:
            near = difflib.get_close_matches(name, [*ops, *known], 1)
            hint = (
                f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(sorted(ops))}."
            )
            raise ValueError(f"unknown row {name!r}.{hint}")
    rows = [
        (b, label, sizes)
        for row, (b, label, sizes) in known.items()
        if (not asked or b.op in asked or row in asked)
        and (not quick or label in b.quick or row in asked)
    ]
    if tiny:
        return [(b, "tiny", b.tiny) for b in table if any(b is chosen for chosen, _, _ in rows)]
    return rows


def _versions(peers: Sequence[peer.Installed]) -> dict[str, str]:
    found: dict[str, str] = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return found | {one.name: one.version() for one in peers}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "liger-kernel bench",
        description="Measure this package's kernels beside eager PyTorch, torch.compile and others.",
    )
    add = parser.add_argument
    add(
        "rows", nargs="*", metavar="ROW", help="op or op/shape, e.g. rms_norm or rms_norm/8192x4096"
    )
    add("--quick", action="store_true", help="a few shapes an op, about three minutes on a GPU")
    add("--providers", type=lambda text: text.split(","), help="e.g. eager,compile,ours (all)")
    add("--seconds", type=float, default=2.0, help="timed calls per row, about (2)")
    add("--out", metavar="FILE", help="write one JSON record a line")
    add(
        "--against",
        metavar="FILE",
        help="fail if a row of ours is 5 %% farther from its floor than there",
    )
    add(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="another library (repeatable)",
    )
    add("--table", type=Path, default=_TABLE, help="the table of rows (benchmarks/table.py)")
    return parser
