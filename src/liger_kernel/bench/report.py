"""Records on paper: the aligned table at the end of a run, and the comparison with an earlier run.

A record is one line of JSON: one provider at one row in one mode.

    row op provider mode      "rms_norm/8192x4096" "rms_norm" "ours" "forward+backward"
    status reason             "ok", or "failed" and why (then nothing below)
    error overwrites          worst relative error against fp32; caller's tensors it wrote over
    clock                     which time is held against the floor: "kernel", "wall", or "cpu"
    ms iqr_ms samples         that time: median, interquartile range, number of calls
    wall_ms kernel_ms         medians of both clocks (no kernel time on a CPU or without a tracer)
    floor_ms percent          what the card needs at least, and 100 * floor / ms
    peak_mib                  above the inputs, outputs and gradients included
    host_us                   per call at the row's tiny shape
    device versions           the machine
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
SLACK = 1.05  # how much farther from its floor a row may be than in an earlier run
_MODES = {"forward": "fwd", "backward": "bwd", "forward+backward": "both"}
_REASON_WIDTH = 52  # columns


def read(path: str | Path) -> list[Record]:
    """The records of a JSON-lines file."""
    lines = Path(path).read_text().splitlines()
    try:
        records = [json.loads(line) for line in lines if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} holds no benchmark records: {error}.") from None
    if not records or any("row" not in r or "status" not in r for r in records):
        raise ValueError(f"{path} holds no benchmark records; write one with --out.")
    return records


def is_ours(record: Mapping[str, Any]) -> bool:
    """Whether the record's provider is this package."""
    return record["provider"].split()[0] == "ours"


def headline(device: str, versions: Mapping[str, str], copy: float, read_rate: float) -> str:
    """The machine in one line."""
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{device}; {named}; copy {copy:.0f} GB/s, read {read_rate:.0f} GB/s"


def table(records: Iterable[Record]) -> str:
    """One aligned line per record, short enough for a terminal."""
    head = ("row", "provider", "mode", "ms", "iqr", "% floor", "MiB", "host us")
    lines = [head, *(_cells(r) for r in _sorted(records))]
    widths = [
        max(len(line[i]) for line in lines if len(line) == len(head)) for i in range(len(head))
    ]
    for i in range(3):
        widths[i] = max(len(line[i]) for line in lines)
    return "\n".join(_aligned(line, widths) for line in lines)


def _cells(record: Record) -> tuple[str, ...]:
    """Three words, then five figures, or one reason."""
    name = record["row"].replace("fused_linear_cross_entropy", "linear_ce")
    start = (name, record["provider"], _MODES.get(record["mode"], "-"))
    if record["status"] == "failed":
        return *start, "failed: " + record["reason"][:_REASON_WIDTH]
    figures = (
        f"{record['ms']:.3f}",
        f"{record['iqr_ms']:.3f}",
        f"{record['percent']:.0f}",
        "-" if record["peak_mib"] is None else f"{record['peak_mib']:.0f}",
        "-" if record["host_us"] is None else f"{record['host_us']:.0f}",
    )
    return *start, *figures


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    words = [cell.ljust(width) for cell, width in zip(line[:3], widths, strict=False)]
    if len(line) == 4:
        return "  ".join([*words, line[3]])
    return "  ".join(words + [c.rjust(w) for c, w in zip(line[3:], widths[3:], strict=True)])


def _sorted(records: Iterable[Record]) -> list[Record]:
    """By row in order of first appearance, so that a peer's records stand beside ours."""
    records = list(records)
    order = {row: i for i, row in enumerate(dict.fromkeys(r["row"] for r in records))}
    modes = list(_MODES)
    return sorted(records, key=lambda r: (order[r["row"]], modes.index(r["mode"] or modes[-1])))


# Against an earlier run -----------------------------------------------------------------------------------------------


def same_device(baseline: Sequence[Record], device: str) -> None:
    """ValueError if the earlier run was made on another card: ratios to the floor do not carry over."""
    other = {r["device"] for r in baseline} - {device}
    if other:
        raise ValueError(
            f"--against was measured on {', '.join(sorted(other))}, this is {device}: not comparable."
        )


def regressions(baseline: Iterable[Record], records: Iterable[Record]) -> list[str]:
    """One line for each record of ours that is over 5 % farther from its floor, or has failed since.

    Each run measured its own floor, so a slower clock or a hotter card cancels. Rows in only one of
    them are not compared.
    """
    now: dict[tuple[str, str], dict[str | None, Record]] = {}
    for r in records:
        now.setdefault((r["row"], r["provider"]), {})[r["mode"]] = r
    lines = []
    for old in baseline:
        modes = now.get((old["row"], old["provider"]))
        if not is_ours(old) or old["status"] != "ok" or modes is None:
            continue
        name = f"{old['row']} {old['provider']} {old['mode']}"
        new = modes.get(old["mode"])
        if new is None:
            failed = modes.get(None)
            if failed is not None:
                lines.append(f"worse: {name}: failed: {failed['reason']}")
            continue
        before, after = (r["ms"] / r["floor_ms"] for r in (old, new))
        if after > SLACK * before:
            lines.append(f"worse: {name}: {after:.2f} x its floor, was {before:.2f}")
    return lines
