"""A worker process seen from its parent: start it, follow it with a progress bar, stop it."""

import json
import signal
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from liger_kernel.train import UsageError
from liger_kernel.train.settings import Settings

_STOP_SECONDS = 5


class RunFailed(Exception):
    """A run that broke off; its text says which and why."""


@dataclass
class Run:
    """What one worker has told so far."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_memory: int = 0
    loaded: dict[str, Any] = field(default_factory=dict)

    def tokens_per_second(self, settings: Settings) -> float | None:
        """From the median step after warm-up (a quarter of the steps, at most 5); None before the first step."""
        if not self.seconds:
            return None
        warm = self.seconds[min(5, len(self.seconds) // 4) :]
        return settings.step_tokens / statistics.median(warm)


def follow(run: Run, settings: Settings, blocks: Path, log: Path, quiet: bool = False) -> None:
    """Run one worker on `blocks` to its end and fill in `run`. The worker's own output goes to `log`.

    quiet: no progress bar.

    Raises:
        UsageError: the worker refused its input.
        RunFailed: it broke off.
    """
    from tqdm import tqdm

    job = blocks.with_name(f"{run.name}.json")
    job.write_text(
        json.dumps({"settings": asdict(settings), "run": run.name, "blocks": str(blocks)})
    )
    command = [sys.executable, "-m", "liger_kernel.train.worker", str(job)]
    # Its own session: Ctrl-C reaches this process alone, which then stops the worker and reports.
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process,
        tqdm(
            total=settings.steps,
            desc=f"{run.name:8}",
            unit="step",
            dynamic_ncols=True,
            disable=quiet,
        ) as bar,
    ):
        try:
            _read(process, run, settings, bar, log)
        finally:
            _stop(process)


def _read(process: subprocess.Popen, run: Run, settings: Settings, bar: Any, log: Path) -> None:
    assert process.stdout is not None
    bar.set_postfix_str("loading")
    for line in process.stdout:
        event = json.loads(line)
        match event.pop("event"):
            case "loaded":
                run.loaded = event
                bar.reset()  # the bar's clock starts with the first step
                bar.set_postfix_str("first step")
            case "step":
                run.losses.append(event["loss"])
                run.seconds.append(event["seconds"])
                run.peak_memory = event["peak_memory"]
                rate = run.tokens_per_second(settings)
                bar.set_postfix_str(
                    f"loss {event['loss']:.4f}, {rate:,.0f} tokens/s", refresh=False
                )
                bar.update()
            case "failed":
                if event["usage"]:
                    raise UsageError(event["message"])
                raise RunFailed(f"the {run.name} run failed: {event['message']} (traceback: {log})")
    code = process.wait()
    if code < 0:
        why = signal.Signals(-code).name
        hint = (
            "; probably out of memory, try a smaller --batch or --seq" if why == "SIGKILL" else ""
        )
        raise RunFailed(f"the {run.name} run was ended by {why}{hint} (its output: {log})")
    if code or len(run.losses) < settings.steps:
        raise RunFailed(f"the {run.name} run ended early with exit code {code} (its output: {log})")


def _stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
