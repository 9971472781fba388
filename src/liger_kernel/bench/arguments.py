"""The command line of `liger-kernel bench`, and the rows it names."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from liger_kernel.bench.row import Bench

_TABLE = Path(__file__).parents[3] / "benchmarks" / "table.py"
_SECONDS, _SIZES_SECONDS = 2.0, 0.1
_SIZES_PROVIDERS = ["eager", "ours"]

Row = tuple[Bench, str, tuple[int, ...]]
Sizes = Mapping[str, Mapping[str, tuple[int, ...]]]  # op -> label -> sizes


def select(
    table: Sequence[Bench], asked: Sequence[str], quick: bool, tiny: bool, sizes: Sizes | None = None
) -> list[Row]:  # fmt: skip
    """Rows named by op or op/label, all if none is.

    `sizes` takes the place of the table's shapes, `tiny` that of both: each op at its tiny shape.
    """
    known = {
        f"{b.op}/{label}": (b, label, shape)
        for b in table
        for label, shape in (b.shapes if sizes is None else sizes.get(b.op, {})).items()
    }
    ops = {b.op for b, _, _ in known.values()}
    for name in asked:
        if name not in ops and name not in known:
            near = difflib.get_close_matches(name, [*ops, *known], 1)
            hint = (
                f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(sorted(ops))}."
            )
            raise ValueError(f"unknown row {name!r}.{hint}")
    rows = [
        (b, label, shape)
        for row, (b, label, shape) in known.items()
        if (not asked or b.op in asked or row in asked)
        and (not quick or label in b.quick or row in asked)
    ]
    if tiny:
        return [(b, "tiny", b.tiny) for b in table if any(b is chosen for chosen, _, _ in rows)]
    return rows


def shard(text: str) -> slice:
    """I/N -> every Nth row from the Ith, 1 <= I <= N. Neighbours cost alike, so the parts do too."""
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N, such as 1/2")
    return slice(int(first) - 1, None, int(step))


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, for what is found wrong later, and its findings."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.resume and args.out is None:
        parser.error("--resume goes on with the file that --out names: name it.")
    if args.seconds is None:
        args.seconds = _SIZES_SECONDS if args.sizes else _SECONDS
    if args.providers is None and args.sizes:
        args.providers = _SIZES_PROVIDERS
    return parser, args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "liger-kernel bench",
        description="Measure this package's kernels beside eager PyTorch, torch.compile and other libraries.",
        epilog="Exit code: 0 done; 1 ours is wrong, or worse than --against; 2 bad arguments; "
        "3 rows are left (--limit), whatever was found so far.",
    )
    add = parser.add_argument
    add("rows", nargs="*", metavar="ROW", help="op or op/shape, such as rms_norm/8192x4096 (all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="a few shapes an op")
    which.add_argument(
        "--sizes",
        action="store_true",
        help="other rows: vocabularies, widths and token counts that people use, eager and ours "
        f"alone, {_SIZES_SECONDS} s a row; names those where ours is slower",
    )
    add(
        "--providers",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help="some of eager,compile,ours, or one variant such as 'ours 1 GiB' (all)",
    )
    add(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="another library, installed in FOLDER with pip --target, in a process of its own "
        "(repeatable): a NAME of the table's PEERS, such as upstream, cce, quack; rows that it "
        "cannot run are shown with their reason",
    )
    add("--seconds", type=float, help=f"timed calls a row, about ({_SECONDS:g})")
    add("--out", type=Path, metavar="FILE", help="write JSON records, a line each, row by row")
    add(
        "--resume",
        action="store_true",
        help="go on with the run whose records are in --out: same card, same versions of Python, "
        "torch, triton, this package and the peers; failed rows count as done",
    )
    add(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="begin no row that would end later than this, judged by the longest so far",
    )
    add("--shard", type=shard, metavar="I/N", help="every Nth row, from the Ith: one part per GPU")
    add(
        "--against",
        type=Path,
        metavar="FILE",
        help="fail if a row of ours is 5 %% farther from its floor than there",
    )
    add("--table", type=Path, default=_TABLE, help="the table of rows (benchmarks/table.py)")
    return parser
