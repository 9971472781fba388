"""Records on paper: the aligned table at the end of a run, and the comparison with an earlier run.

A record is one line of JSON: one provider at one row in one mode.

    row op sizes              "rms_norm/8192x4096" "rms_norm" [8192, 4096]
    provider mode             "ours" "forward+backward"
    status reason             "ok", or "failed" and why (then nothing below)
    error overwrites          worst relative error against fp32; caller's tensors it wrote over
    clock                     which time is held against the floor: "kernel", "wall", or "cpu"
    ms iqr_ms samples         that time: median, interquartile range, number of calls
    wall_ms kernel_ms         medians of both clocks (no kernel time on a CPU or without a tracer)
    floor_ms percent          what the card needs at least, and 100 * floor / ms
    peak_mib                  above the inputs, outputs and gradients included
    host_us                   per call at the row's tiny shape
    device versions           the machine, and the peers of the run
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
_SHOWN = 8  # rows named in one line
SLACK = 1.05  # how much farther from its floor a row may be than in an earlier run
_MODES = {"forward": "fwd", "backward": "bwd", "forward+backward": "both"}
_REASON_WIDTH = 52  # columns
_FAR = 1e-2  # a relative error that ours may not have in any dtype


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
    records = list(records)
    head = ("row", "provider", "mode", "ms", "iqr", "% floor", "MiB", "host us")
    lines = [head, *(_cells(r) for r in _sorted(records))]
    widths = [
        max(len(line[i]) for line in lines if len(line) == len(head)) for i in range(len(head))
    ]
    for i in range(3):
        widths[i] = max(len(line[i]) for line in lines)
    return "\n".join([*(_aligned(line, widths) for line in lines), *_coarse(records)])


def _coarse(records: Iterable[Record]) -> list[str]:
    """A line for each peer that was timed although it is farther from fp32 than ours may be."""
    far = {(r["row"], r["provider"]): r["error"] for r in records if (r.get("error") or 0.0) > _FAR}
    return [f"{row}, {name}: off by {error:.1e} of the norm" for (row, name), error in far.items()]


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


# Going on with a run --------------------------------------------------------------------------------------------------

_MUST_AGREE = ("python", "torch", "triton", "liger_kernel")  # and a peer, for its own records


def resumed(path: Path, device: str, versions: Mapping[str, str]) -> list[Record]:
    """The records of a run that was cut, none if it has not begun; an unfinished last line is cut off the file.

    They must come from this card and these versions: ValueError otherwise. Failed rows count as done, or a row that
    takes the process down would be begun for ever; delete its lines to have it run again. Edits of the sources
    within one version are not seen.
    """
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    records = read(path) if whole else []
    for r in records:
        known = {k: v for k, v in r["versions"].items() if k in (*_MUST_AGREE, r["provider"])}
        other = {k: v for k, v in known.items() if versions.get(k, v) != v}
        if r["device"] != device:
            other["card"] = r["device"]
        if other:
            raise ValueError(
                f"--resume: {path} was measured with {_named(other)}, this is "
                f"{_named({'card': device, **versions}, other)}. Name another file, or leave --resume out "
                "to begin it anew."
            )
    return records


def _named(versions: Mapping[str, str], only: Iterable[str] = ()) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in only or versions)


# Against eager --------------------------------------------------------------------------------------------------------

_NOISE = 1.02


def against_eager(records: Iterable[Record]) -> str:
    """One line for each row where ours takes over 2 % longer than eager, by either clock, and their number."""
    times = {(r["row"], r["provider"], r["mode"]): r for r in records if r["status"] == "ok"}
    compared, lines = 0, []
    for (row, provider, mode), ours in times.items():
        eager = times.get((row, "eager", mode))
        if provider != "ours" or eager is None:
            continue
        compared += 1
        ratios = {
            clock: ours[f"{clock}_ms"] / eager[f"{clock}_ms"]
            for clock in ("kernel", "wall")
            if ours[f"{clock}_ms"] and eager[f"{clock}_ms"]
        }
        if any(ratio > _NOISE for ratio in ratios.values()):
            found = ", ".join(f"{clock} {ratio:.2f} x" for clock, ratio in ratios.items())
            lines.append(f"slower than eager: {row} {mode}: {found}")
    return "\n".join([*lines, f"ours is slower than eager in {len(lines)} of {compared} cases"])


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

    Each run measured its own floor, so a slower clock or a hotter card cancels. `uncompared` names
    what stands in one of them alone.
    """
    now = {_key(r): r for r in records}
    lines = []
    for key, old in _comparable(baseline).items():
        name, new = " ".join(key), now.get(key)
        if new is None:
            failed = now.get((*key[:2], ""))
            if failed is not None:
                lines.append(f"worse: {name}: failed: {failed['reason']}")
            continue
        before, after = (r["ms"] / r["floor_ms"] for r in (old, new))
        if after > SLACK * before and old["clock"] == new["clock"]:
            lines.append(f"worse: {name}: {after:.2f} x its floor, was {before:.2f}")
    return lines


def uncompared(baseline: Iterable[Record], records: Iterable[Record]) -> list[str]:
    """What `regressions` could not judge, by reason: rows of ours in one run alone, or timed by different clocks."""
    records = list(records)
    old, new = _comparable(baseline), _comparable(records)
    failed = {key[:2] for key in map(_key, records) if key[2] == ""}
    found = {
        "only in the earlier run": [k for k in old if k not in new and k[:2] not in failed],
        "only in this run": [k for k in new if k not in old],
        "another clock": [k for k in old if k in new and old[k]["clock"] != new[k]["clock"]],
    }
    return [f"not compared, {reason}: {_rows(keys)}" for reason, keys in found.items() if keys]


def _rows(keys: Iterable[tuple[str, str, str]]) -> str:
    """The rows among the keys, by name as far as a terminal has room."""
    rows = list(dict.fromkeys(row for row, _, _ in keys))
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return ", ".join(rows[:_SHOWN]) + more


def _key(record: Record) -> tuple[str, str, str]:
    """Row, provider and mode; no mode if it failed."""
    return record["row"], record["provider"], record["mode"] or ""


def _comparable(records: Iterable[Record]) -> dict[tuple[str, str, str], Record]:
    """What is ours and was measured."""
    return {_key(r): r for r in records if is_ours(r) and r["status"] == "ok"}
