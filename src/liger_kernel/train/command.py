"""`liger-kernel train`: arguments, and the order of things."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from liger_kernel import _env
from liger_kernel.train import UsageError
from liger_kernel.train.model import find, require_packages
from liger_kernel.train.settings import DTYPES, OPTIMIZERS, Settings, complete

_EPILOG = """\
The model is fine-tuned twice from the same seed on the same batches, as Hugging Face ships it and with
liger_kernel.patch(model), each time in its own process. --out receives report.json and curves.png.
On several accelerators: torchrun --nproc-per-node 2 -m liger_kernel train --fsdp

exit code: 0 the two loss curves agree, 1 they do not or a run failed, 2 bad arguments or input, 130 interrupted
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the options).")


def main(argv: Sequence[str]) -> int:
    """Train twice, compare, report; the exit code."""
    args = vars(_parser().parse_args(argv))
    require_packages("train")
    out = _folder(args.pop("out"))
    source = find(args["model"])
    settings = complete(args, source.pretrained)

    import torch

    from liger_kernel.train.process import Run, RunFailed, follow
    from liger_kernel.train.text import title
    from liger_kernel.train.tokens import blocks

    runs: list[Run] = []
    code, ended = 0, "finished"
    launched = _env.launch()
    first = launched is None or launched.rank == 0
    if launched is not None:
        signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(prefix="liger-kernel-train-") as scratch:
        packed = Path(scratch, "blocks.pt")
        torch.save(blocks(source, settings), packed)
        if first:
            print(f"{source.title} on {title(settings.text)}", file=sys.stderr)
        try:
            for name in ("plain", "patched"):
                runs.append(Run(name))
                log = f"{name}.log" if launched is None else f"{name}.{launched.rank}.log"
                follow(runs[-1], settings, packed, out / log, quiet=not first)
        except RunFailed as failure:
            code, ended = 1, str(failure)
        except KeyboardInterrupt:
            code, ended = 130, "interrupted"
    if not any(run.losses for run in runs) and code == 130:
        raise KeyboardInterrupt
    if not first:  # it has seen the same losses; one report is enough
        return code
    report = _report(settings, source, runs, ended, out)
    return verdict(report, code)


def _leave(*_: Any) -> NoReturn:
    """The launcher ends all processes when one has failed: end the worker on the way out."""
    sys.exit(143)


def _report(
    settings: Settings, source: Any, runs: list[Any], ended: str, out: Path
) -> dict[str, Any]:
    from rich.console import Console

    from liger_kernel.train import plot
    from liger_kernel.train import report as reports

    report = reports.build(settings, source, runs, ended)
    reports.write(report, out / "report.json")
    files = [out / "report.json"]
    if any(run.losses for run in runs):
        plot.draw(report, out / "curves.png")
        files.append(out / "curves.png")
    console = Console(soft_wrap=True)
    reports.show(report, console)
    console.print("written: " + ", ".join(map(str, files)), markup=False, highlight=False)
    return report


def verdict(report: dict[str, Any], code: int) -> int:
    """Say on stderr what went wrong, if anything; `code`, or 1 where the curves disagree."""
    if report["ended"] != "finished":
        _complain(report["ended"].rstrip(".") + ".")
    if not report["comparison"]["agree"]:
        _complain(report["comparison"]["verdict"])
        return code or 1
    return code


def _complain(message: str) -> None:
    print(f"liger-kernel train: {message}", file=sys.stderr)


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}.") from error
    return path


def number(kind: type, least: float, strict: bool = False) -> Callable[[str], Any]:
    """A type of argparse: a number that is at least, or `strict` above, `least`."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not (value > least if strict else value >= least):
            bound = f"above {least:g}" if strict else f"at least {least:g}"
            raise argparse.ArgumentTypeError(f"must be {bound}; got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it in "invalid int value"
    return parse


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "liger-kernel train",
        description="Fine-tune a model plain and patched, and compare losses, speed and memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    count, rate = number(int, 1), number(float, 0, strict=True)
    add = parser.add_argument
    add("--model", help="checkpoint folder, hub name, GGUF file, config.json, model type (random weights) or "
        "llama-1b; default SmolLM2-135M-Instruct")  # fmt: skip
    add("--text", help="a UTF-8 file or a folder; default Python's standard library")
    add("--steps", type=count, help="default 10 on a CPU, 60 on an accelerator")
    add(
        "--batch",
        type=count,
        help="sequences a step and process; default 2 on a CPU, 4 on an accelerator",
    )
    add(
        "--seq",
        type=number(int, 2),
        help="tokens a sequence; default 512 on a CPU, 2048 on an accelerator",
    )
    add(
        "--dtype",
        choices=[*DTYPES],
        help="of the weights; default fp32 on a CPU, bf16 on an accelerator",
    )
    add("--device", help="default the accelerator if there is one")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="default adamw")
    add("--lr", type=rate, help="learning rate; the default follows optimizer and model")
    among = parser.add_mutually_exclusive_group()
    for kind, what in (("ddp", "DistributedDataParallel"), ("fsdp", "FSDP2 (fully_shard)")):
        text = f"{what} over the processes that torchrun has started"
        among.add_argument(
            f"--{kind}", dest="parallel", action="store_const", const=kind, help=text
        )
    add("--seed", type=number(int, 0), default=0, help="default 0")
    add(
        "--out",
        type=Path,
        default=Path("runs/train"),
        help="folder of the results; default runs/train",
    )
    return parser
