"""`liger-kernel verify`: arguments, and what is printed."""

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from liger_kernel import _env
from liger_kernel.train import UsageError
from liger_kernel.train.command import Parser, number
from liger_kernel.train.model import find, require_packages
from liger_kernel.train.settings import DTYPES, Settings, complete

_EPILOG = """\
Each batch goes through the model as Hugging Face ships it and patched. Compared are the output of every swapped module
on the same inputs, the loss and all gradients, each against the unpatched model in a wider dtype. If they disagree, the
kernels are switched on one at a time to find out which one it is.

exit code: 0 they agree, 1 they do not, 2 bad arguments or input, 130 interrupted
"""


def main(argv: Sequence[str]) -> int:
    """Verify, print, perhaps write; the exit code."""
    args = vars(_parser().parse_args(argv))
    require_packages("verify")
    if _env.launch() is not None:
        raise UsageError("verify runs in one process; several were started.")
    out = _file(args.pop("json"))
    source = find(args["model"])
    settings = complete({**args, "optimizer": "sgd", "lr": None}, source.pretrained)

    import torch

    from liger_kernel.train.report import write
    from liger_kernel.train.text import title
    from liger_kernel.train.tokens import blocks
    from liger_kernel.verification.verify import verify

    batches = blocks(source, settings)
    print(f"{source.title} on {title(settings.text)}: {_shape(settings)}", file=sys.stderr)
    torch.manual_seed(settings.seed)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that GGUF files bring along
        model = source.load(DTYPES[settings.dtype], torch.device(settings.device))
    model.config.get_text_config().use_cache = False
    found = verify(model, batches)
    print(f"{found}\n\n{found.report}")
    if out is not None:
        write({"title": source.title, "shape": _shape(settings), **found.as_dict()}, out)
        print(f"\nwritten: {out}")
    return 0 if found.ok else 1


def _shape(settings: Settings) -> str:
    return f"{settings.steps} x {settings.batch} x {settings.seq} tokens, {settings.dtype}, {settings.device}"


def _file(path: Path | None) -> Path | None:
    if path is None:
        return None
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--json {path}: not a file in a folder that exists.")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "liger-kernel verify",
        description="Run a model plain and patched on a few real batches and say whether they agree.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        help="checkpoint folder, hub name, GGUF file, config.json, model type (random weights) or llama-1b; "
        "default SmolLM2-135M-Instruct",
    )
    add("--text", help="a UTF-8 file or a folder; default Python's standard library")
    add("--batches", dest="steps", type=number(int, 1), default=3, help="default 3")
    add("--batch", type=number(int, 1), help="sequences a batch; default 2 on a CPU, 4 on an accelerator")  # fmt: skip
    add(
        "--seq",
        type=number(int, 2),
        help="tokens a sequence; default 512 on a CPU, 2048 on an accelerator",
    )
    add("--dtype", choices=[*DTYPES], help="of the weights; default fp32 on a CPU, bf16 on an accelerator")  # fmt: skip
    add("--device", help="default the accelerator if there is one")
    add("--seed", type=number(int, 0), default=0, help="default 0")
    add("--json", type=Path, metavar="FILE", help="also write what the table shows to this file")
    return parser
