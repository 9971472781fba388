"""Records of `liger-kernel bench --out FILE` as pictures and as the README's table.

    python -m liger_kernel.bench.plot FILE FOLDER

writes FOLDER/floor.png (percent of what the card attains, bars per row), FOLDER/host.png (host time
per small call), FOLDER/linear_ce.png (time against memory), FOLDER/growth_tokens.png and
FOLDER/growth_classes.png (time against one size, of the losses, from `bench --sizes`) and prints the
Markdown table. Needs matplotlib. What a metric has no records for is not drawn.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from liger_kernel.bench import report
from liger_kernel.bench.report import Record

_BOTH = "forward+backward"
_HEAD_OP = "fused_linear_cross_entropy"
_GROWING = ("cross_entropy", _HEAD_OP)
_LINE = 3  # points that show how something grows


def markdown(records: Iterable[Record]) -> str:
    """Forward + backward of every row: per provider, milliseconds, percent of the floor, MiB; why some failed."""
    records = list(records)
    providers = list(dict.fromkeys(r["provider"] for r in records))
    judged = [r for r in records if r["mode"] in (_BOTH, None)]
    cells = {(r["row"], r["provider"]): _cell(r) for r in judged}
    lines = ["| row | " + " | ".join(providers) + " |", "|---" * (len(providers) + 1) + "|"]
    for row in dict.fromkeys(r["row"] for r in records):
        found = [cells.get((row, provider), "-") for provider in providers]
        lines.append(f"| {row} | " + " | ".join(found) + " |")
    machine = f"{records[0]['device']}, " + ", ".join(
        f"{name} {version}" for name, version in records[0]["versions"].items()
    )
    note = (
        f"Forward + backward on {machine}: milliseconds / percent of what the card attains / MiB."
    )
    failed = [
        f"* {r['row']}, {r['provider']}: {r['reason']}" for r in judged if r["status"] == "failed"
    ]
    return "\n".join([*lines, "", note, *failed])


def _cell(record: Record) -> str:
    if record["status"] == "failed":
        return "-"
    peak = "" if record["peak_mib"] is None else f" / {record['peak_mib']:.0f}"
    return f"{record['ms']:.3g} / {record['percent']:.0f} %{peak}"


def plot(records: Iterable[Record], folder: Path) -> list[Path]:
    """One PNG per metric; returns the files written."""
    good = [r for r in records if r["status"] == "ok" and r["mode"] == _BOTH]
    host = [r for r in good if r["host_us"] is not None]
    head = [r for r in good if r["op"] == _HEAD_OP and r["peak_mib"] is not None]
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[tuple[str, list[Record], Callable[[Any, list[Record]], None]]] = [
        ("floor.png", good, _floor),
        ("host.png", host, _host),
        ("linear_ce.png", head, _head),
        ("growth_tokens.png", growth(good, 0), partial(_growth, size=0)),
        ("growth_classes.png", growth(good, -1), partial(_growth, size=-1)),
    ]
    return [_draw(folder / name, chosen, draw) for name, chosen, draw in figures if chosen]


def _draw(path: Path, records: list[Record], draw: Callable[[Any, list[Record]], None]) -> Path:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    height = 4 + 0.4 * len({r["row"] for r in records})
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    draw(axes, records)
    axes.legend(fontsize="small")
    figure.suptitle(records[0]["device"], fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _floor(axes: Any, records: list[Record]) -> None:
    _bars(axes, records, "row", "percent")
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("% of what the card attains, forward + backward")


def _host(axes: Any, records: list[Record]) -> None:
    _bars(axes, records, "op", "host_us")
    axes.set_xlabel("host time of one small call, forward + backward, us")


def _bars(axes: Any, records: Sequence[Record], group: str, value: str) -> None:
    """One horizontal bar per provider in each group, the first group on top."""
    groups = list(dict.fromkeys(r[group] for r in records))
    providers = list(dict.fromkeys(r["provider"] for r in records))
    height = 0.8 / len(providers)
    for i, provider in enumerate(providers):
        values = {r[group]: r[value] for r in records if r["provider"] == provider}
        places = [groups.index(g) + (i - (len(providers) - 1) / 2) * height for g in values]
        axes.barh(places, list(values.values()), height, label=provider)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()


def _head(axes: Any, records: list[Record]) -> None:
    for provider in dict.fromkeys(r["provider"] for r in records):
        mine = [r for r in records if r["provider"] == provider]
        times = [r["ms"] / r["floor_ms"] for r in mine]
        axes.scatter([r["peak_mib"] for r in mine], times, label=provider)
        for r, time in zip(mine, times, strict=True):
            label = r["row"].partition("/")[2]
            axes.annotate(label, (r["peak_mib"], time), textcoords="offset points", xytext=(4, 2))
    axes.set_xscale("log")
    axes.set_xlabel("MiB above the inputs, gradients included")
    axes.set_ylabel("time / its three products")


def growth(records: Iterable[Record], size: int) -> list[Record]:
    """The losses' records in which one of the sizes varies alone: per operator, the largest such set."""
    sets: dict[str, dict[tuple[int, ...], list[Record]]] = {}
    for r in records:
        if r["op"] in _GROWING and r["provider"] in ("eager", "ours"):
            others = tuple(r["sizes"][1:] if size == 0 else r["sizes"][:size])
            sets.setdefault(r["op"], {}).setdefault(others, []).append(r)
    largest = [max(of_op.values(), key=len) for of_op in sets.values()]
    return [r for one in largest if len({r["sizes"][size] for r in one}) >= _LINE for r in one]


def _growth(axes: Any, records: list[Record], size: int) -> None:
    """Lines on logarithmic axes, and what linear growth would look like."""
    axes.figure.set_size_inches(9, 6)
    for op, provider in dict.fromkeys((r["op"], r["provider"]) for r in records):
        mine = [r for r in records if (r["op"], r["provider"]) == (op, provider)]
        points = sorted((r["sizes"][size], r["ms"]) for r in mine)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{op}, {provider}")
    last, ms = max((r["sizes"][size], r["ms"]) for r in records)
    first = min(r["sizes"][size] for r in records)
    axes.plot((first, last), (ms * first / last, ms), "--", color="gray", label="linear")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens" if size == 0 else "classes")
    axes.set_ylabel("ms, forward + backward")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m liger_kernel.bench.plot FILE FOLDER")
    found = report.read(sys.argv[1])
    for written in plot(found, Path(sys.argv[2])):
        print(written, file=sys.stderr)
    print(markdown(found))
