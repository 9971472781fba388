"""The `liger-kernel` command: train, verify, bench, tune, estimate, plan, models, env, probe.

Each subcommand is imported only when it is asked for, so `liger-kernel env` works where nothing else does.
Exit codes: 0 done; 1 done but wrong (curves that disagree, a run that failed); 2 bad arguments or input;
3 stopped at its limit with work left (bench); 130 interrupted.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from liger_kernel import __version__
from liger_kernel.train import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; user errors become one line on stderr."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _COMMANDS[args.command][0](args.arguments)
    except UsageError as error:
        print(f"liger-kernel {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"liger-kernel {args.command}: interrupted.", file=sys.stderr)
        return 130


def _train(argv: Sequence[str]) -> int:
    from liger_kernel.train.command import main as train

    return train(argv)


def _verify(argv: Sequence[str]) -> int:
    from liger_kernel.verification.command import main as verify

    return verify(argv)


def _bench(argv: Sequence[str]) -> int:
    from liger_kernel.bench.run import main as bench

    return bench(argv) or 0


def _tune(argv: Sequence[str]) -> int:
    from liger_kernel.tuning.command import main as tune

    return tune(argv)


def _env(argv: Sequence[str]) -> int:
    argparse.ArgumentParser("liger-kernel env", description=_COMMANDS["env"][1]).parse_args(argv)
    from liger_kernel.env_report import print_env_report

    print_env_report()
    return 0


def _probe(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("liger-kernel probe", description=_COMMANDS["probe"][1])
    parser.add_argument(
        "model", help="checkpoint folder, hub name, GGUF file, config file, model type"
    )
    args = parser.parse_args(argv)
    from liger_kernel.train.model import find, require_packages

    require_packages("probe")
    config = find(args.model).config
    from liger_kernel.transformers.patch import probe_model

    print(probe_model(config))
    return 0


def _plan(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("liger-kernel plan", description=_COMMANDS["plan"][1])
    add = parser.add_argument
    add("--tokens", type=int, default=8192, help="that are not ignored, default 8192")
    add("--hidden", type=int, default=4096, help="width of the hidden states, default 4096")
    add("--vocab", type=int, default=128256, help="rows of the head, default 128256")
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default bf16")
    add("--budget", help="bytes, 256M, or a share of the device's memory such as 0.01")
    args = parser.parse_args(argv)
    if min(args.tokens, args.hidden, args.vocab) < 1:
        raise UsageError("--tokens, --hidden and --vocab must be positive.")
    from liger_kernel.ops.head.plan import describe

    try:
        print(describe(args.tokens, args.vocab, args.hidden, args.dtype, args.budget))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return 0


def _estimate(argv: Sequence[str]) -> int:
    from liger_kernel.estimate.command import main as estimate

    return estimate(argv)


def _models(argv: Sequence[str]) -> int:
    from liger_kernel.coverage.command import main as models

    return models(argv)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (_train, "fine-tune a model plain and patched, and compare"),
    "verify": (_verify, "run a few batches plain and patched, and say which kernel is off, if any"),
    "bench": (_bench, "measure the kernels beside eager PyTorch and torch.compile"),
    "tune": (_tune, "measure launch schedules on this GPU and keep the fastest"),
    "estimate": (_estimate, "predict the peak memory of a training step, and what fits"),
    "plan": (_plan, "print how the vocabulary head would chunk a batch, and the bytes it takes"),
    "models": (
        _models,
        "say of every model class of transformers what is fused, and why not the rest",
    ),
    "env": (_env, "print what a bug report needs"),
    "probe": (_probe, "print what would be swapped in a model, and why not the rest"),
}


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:10}{text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        "liger-kernel",
        description=f"Fused Triton kernels for training language models.\n\ncommands:\n{listed}",
        epilog="`liger-kernel COMMAND --help` describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
