"""What came out: a plain dictionary (report.json) and a table for people."""

import json
import math
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from liger_kernel import _env, _packages
from liger_kernel.train import text
from liger_kernel.train.compare import compare
from liger_kernel.train.model import Source
from liger_kernel.train.process import Run
from liger_kernel.train.settings import Settings

_PACKAGES = ("liger-kernel", "torch", "triton", "transformers", "tokenizers", "numpy")


def build(settings: Settings, source: Source, runs: list[Run], ended: str) -> dict[str, Any]:
    """Everything about a comparison. `ended` is "finished", "interrupted" or why it broke off."""
    by_name = {run.name: run for run in runs}
    plain, patched = (by_name[n].losses if n in by_name else [] for n in ("plain", "patched"))
    comparison = compare(plain, patched, settings.tolerance)
    return {
        "ended": ended,
        "settings": asdict(settings),
        "model": {
            "title": source.title,
            "type": source.config.model_type,
            "pretrained": source.pretrained,
            "vocabulary": source.text_config.vocab_size,
        },
        "text": {"title": text.title(settings.text), "tokens": settings.tokens},
        "machine": _machine(settings),
        "runs": {run.name: _run(run, settings) for run in runs},
        "comparison": {
            "agree": comparison.agree,
            "verdict": str(comparison),
            "steps_compared": min(len(plain), len(patched)),
            "tolerance": comparison.tolerance,
            "largest_relative_difference": comparison.largest,
            "largest_at_step": comparison.largest_at,
            "first_step_out_of_tolerance": comparison.step,
        },
    }


def write(report: dict[str, Any], path: Path) -> None:
    """As JSON; a number that is not finite becomes null."""
    path.write_text(json.dumps(_finite(report), indent=2, allow_nan=False) + "\n")


def show(report: dict[str, Any], console: Any) -> None:
    """Print the table and what was patched."""
    console.print(_table(report))
    patched = report["runs"].get("patched", {})
    if patched.get("patch_text"):
        console.print(patched["patch_text"], markup=False, highlight=False)


def mib(size: float | None) -> str:
    """ "1,234 MiB", or a dash for nothing."""
    return "-" if size is None else f"{size / _env.MIB:,.0f} MiB"


def _table(report: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    settings, comparison, runs = report["settings"], report["comparison"], report["runs"]
    table = Table(
        box=box.SIMPLE_HEAVY, title=_title(report), title_justify="left", title_style="bold"
    )
    for column in ("", "plain", "patched", "patched / plain"):
        table.add_column(column, justify="right" if column else "left")
    pair = [runs.get(name, {}) for name in ("plain", "patched")]

    def row(label: str, key: str, show: Any, ratio: bool = True) -> None:
        a, b = (run.get(key) for run in pair)
        table.add_row(
            label, *(_cell(show, v) for v in (a, b)), f"{b / a:.2f}" if ratio and a and b else ""
        )

    row("steps", "steps", lambda v: f"{v} of {settings['steps']}", ratio=False)
    row("final loss", "final_loss", lambda v: f"{v:.5f}", ratio=False)
    row("tokens/s", "tokens_per_second", lambda v: f"{v:,.0f}")
    row("peak memory above the model", "peak_memory_bytes", mib)
    if comparison["steps_compared"]:
        mark = "[green]agree[/]" if comparison["agree"] else "[bold red]disagree[/]"
        allowed = f"(allowed {comparison['tolerance']:g})"
        table.add_row(
            "largest loss difference",
            mark,
            f"{comparison['largest_relative_difference']:.1e}",
            allowed,
        )
    return table


def _title(report: dict[str, Any]) -> str:
    s = report["settings"]
    shape = (
        f"{s['steps']} steps of {s['batch']} x {s['seq']} tokens, {s['dtype']}, {s['optimizer']}"
    )
    device = report["machine"]["device"]
    if s["parallel"]:
        device = f"{s['ranks']} x {device}, {s['parallel']}"
    return f"{report['model']['title']} on {report['text']['title']}: {shape}, {device}"


def _cell(show: Any, value: Any) -> str:
    return "-" if value is None else show(value)


def _run(run: Run, settings: Settings) -> dict[str, Any]:
    loaded = run.loaded
    return {
        "steps": len(run.losses),
        "final_loss": run.losses[-1] if run.losses else None,
        "tokens_per_second": run.tokens_per_second(settings),
        "peak_memory_bytes": run.peak_memory if run.losses else None,
        "memory_method": loaded.get("memory_method"),
        "parameters": loaded.get("parameters"),
        "loading_seconds": loaded.get("seconds"),
        "patch": loaded.get("patch"),
        "patch_text": loaded.get("patch_text"),
        "losses": run.losses,
        "seconds": run.seconds,
    }


def _machine(settings: Settings) -> dict[str, Any]:
    device = torch.device(settings.device)
    threads = torch.get_num_threads()
    versions = {name: _packages.version_of(name) for name in _PACKAGES}
    versions[_packages.DISTRIBUTION] = (
        _packages.package_version()
    )  # also of a checkout that is not installed
    name = f"CPU, {threads} threads" if device.type == "cpu" else _env.device_info(device).name
    return {
        "device": name,
        "cpu_threads": threads,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
