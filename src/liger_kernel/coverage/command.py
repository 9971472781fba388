"""`liger-kernel models`: arguments, progress, exit code."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from liger_kernel import _env
from liger_kernel.train import UsageError

_LIMIT = 120.0  # seconds for one class


def main(argv: Sequence[str]) -> int:
    """Examine the classes and print the matrix; 1 if a patched step differs from the plain one."""
    args = _parser().parse_args(argv)
    if args.jobs < 1:
        raise UsageError("--jobs must be at least 1.")
    missing = [name for name in ("transformers", "tqdm") if not _env.has_module(name)]
    if missing:
        raise UsageError(f"needs {', '.join(missing)}: pip install 'liger-kernel[train]'")
    from tqdm import tqdm

    from liger_kernel.coverage import families, page
    from liger_kernel.coverage.fleet import examine_all

    try:
        names = families.names(args.family)
    except re.error as error:
        raise UsageError(f"--family {args.family!r} is no regular expression: {error}") from None
    if not names:
        raise UsageError(f"--family {args.family!r} names no class of the installed transformers.")
    found = []
    with tqdm(total=len(names), unit="model", dynamic_ncols=True, file=sys.stderr) as bar:
        for family in examine_all(names, args.check, args.jobs, _LIMIT):
            found.append(family)
            bar.set_postfix_str(family.name[:32], refresh=False)
            bar.update()
    found.sort(key=lambda family: family.name)
    print(page.text(found))
    if args.json:
        _write(args.json, json.dumps([family.as_dict() for family in found], indent=1) + "\n")
    if args.markdown:
        _write(args.markdown, page.markdown(found))
    return int(any(family.wrong for family in found))


def _write(path: str, content: str) -> None:
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "liger-kernel models",
        description="Build every causal language model of the installed transformers tiny and say which of its parts "
        "would be fused, and why the rest would not.",
        epilog="Exit code 1: a patched training step differs from the plain one.",
    )
    add = parser.add_argument
    add("--family", default="", metavar="REGEX", help="only classes whose name matches")
    add(
        "--check",
        action="store_true",
        help="also compare a training step: loss and all gradients, fp32",
    )
    add("--json", metavar="FILE", help="write everything that was found")
    add("--markdown", metavar="FILE", help="write the page of the documentation")
    add("--jobs", type=int, default=1, help="processes at a time, default 1")
    return parser
