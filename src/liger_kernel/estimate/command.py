"""`liger-kernel estimate`: arguments and the table."""

import argparse
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from liger_kernel import _env
from liger_kernel.train import UsageError
from liger_kernel.train.model import find, one_line, require_packages
from liger_kernel.train.settings import DTYPES

_SHARE = 0.95  # of --gpu-memory; the rest is for the context and the allocator's gaps
_UNIT = 256  # tokens: the grain of the largest sequence
_ASSUMED = 80 << 30
_GIB = 1 << 30

Columns = dict[str, dict[str, str]]  # variant -> label -> cell


def main(argv: Sequence[str]) -> int:
    """Estimate each variant and print the table; the exit code."""
    args = _parser().parse_args(argv)
    if min(args.batch, args.seq, args.lora or 1) < 1:
        raise UsageError("--batch, --seq and --lora must be positive.")
    require_packages("probe")
    if args.lora and not _env.has_module("peft"):
        raise UsageError("--lora needs peft: pip install peft")
    limit = _memory(args.gpu_memory)
    source = find(args.model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers and peft about each other
            columns = _columns(source.config, args, limit)
    except (NotImplementedError, RuntimeError) as error:
        raise UsageError(
            f"{source.title} does not run without values: {one_line(error)}"
        ) from error
    lora = f", LoRA of rank {args.lora} on every linear layer" if args.lora else ""
    print(
        f"{source.title}: {args.batch} x {args.seq} tokens, {args.dtype}, {args.optimizer}{lora}; GiB\n"
    )
    print(_table(columns))
    return 0


def _columns(config: Any, args: argparse.Namespace, limit: int | None) -> Columns:
    from liger_kernel.estimate.fit import largest
    from liger_kernel.estimate.step import VARIANTS, empty, estimate

    model = empty(config, DTYPES[args.dtype], args.lora)
    memory = limit or _own_memory()
    columns: Columns = {}
    for variant in VARIANTS:

        @functools.cache
        def step(batch: int, seq: int, variant: Any = variant) -> Any:
            return estimate(model, variant, batch, seq, args.optimizer, memory)

        cells = _cells(step(args.batch, args.seq))
        if limit is not None:
            room = int(_SHARE * limit)
            of_batch: Callable[[int], int] = lambda n, step=step: step(n, args.seq).peak  # noqa: E731
            of_seq: Callable[[int], int] = lambda n, step=step: step(args.batch, n).peak  # noqa: E731
            batch, seq = largest(of_batch, room, args.batch), largest(of_seq, room, args.seq, _UNIT)
            cells[f"largest batch of {args.seq} tokens"] = f"{batch:,}"
            cells[f"largest sequence in a batch of {args.batch}"] = f"{seq:,}"
        columns[variant.name] = cells
    return columns


def _cells(found: Any) -> dict[str, str]:
    sizes = {"weights": found.weights, "gradients": found.gradients, "optimizer": found.optimizer}
    sizes["activations"] = sum(found.activations.values())
    by_size = sorted(found.activations.items(), key=lambda item: -item[1])
    sizes |= {f"  {kind}": size for kind, size in by_size}
    sizes["peak"] = found.peak
    return {label: f"{size / _GIB:.2f}" for label, size in sizes.items()}


def _table(columns: Columns) -> str:
    labels = list(dict.fromkeys(label for cells in columns.values() for label in cells))
    last = [label for label in labels if label == "peak" or label.startswith("largest")]
    labels = [label for label in labels if label not in last] + last
    width = max(map(len, labels))
    lines = [" " * width + "".join(f"  {name}" for name in columns)]
    for label in labels:
        row = (cells.get(label, "-").rjust(len(name)) for name, cells in columns.items())
        lines.append("  ".join([label.ljust(width), *row]))
    return "\n".join(lines)


def _memory(text: str | None) -> int | None:
    try:
        return None if text is None else _env.parse_bytes(text, "--gpu-memory")
    except ValueError as error:
        raise UsageError(str(error)) from None


def _own_memory() -> int:
    device = _env.default_device()
    return _ASSUMED if device.type == "cpu" else _env.device_info(device).total_memory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "liger-kernel estimate",
        description="Predict the peak memory of a training step on an accelerator, without weights or an accelerator.",
        epilog="Counted: what tensors hold. An accelerator's context and the allocator's gaps come on top.",
    )
    add = parser.add_argument
    add("model", help="checkpoint folder, hub name, GGUF file, config file, model type or llama-1b")
    add("--batch", type=int, default=1, help="sequences a step, default 1")
    add("--seq", type=int, default=2048, help="tokens a sequence, default 2048")
    add(
        "--dtype",
        choices=[*DTYPES],
        default="bf16",
        help="of weights and activations, default bf16",
    )
    add("--optimizer", choices=("adamw", "sgd"), default="adamw", help="default adamw")
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="train adapters of this rank instead of the weights",
    )
    add(
        "--gpu-memory",
        metavar="BYTES",
        help="such as 80G: also print the largest batch and sequence that fit",
    )
    return parser
