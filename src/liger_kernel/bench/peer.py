"""Other libraries, each in a process of its own.

A peer may bear this package's import name. So the child first imports the bench and the references
it needs from here, then drops them from `sys.modules` and imports the peer from its folder, which
heads PYTHONPATH. Results come back as lines of JSON on stdout.
"""

import importlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from liger_kernel import _env
from liger_kernel.bench import harness
from liger_kernel.bench.harness import Measured, Spread
from liger_kernel.bench.row import Bench, Peer, load_table, measure_row
from liger_kernel.bench.work import Function

_OURS = "liger_kernel"
_SOURCE = Path(__file__).parents[2]
_MARK = "LIGER_BENCH "
_CHILD = (
    "import sys; ours, folder = sys.argv[1:3]; sys.path[0] = folder; sys.path.insert(0, ours); "
    "from liger_kernel.bench import peer; sys.path.pop(0); peer.child(*sys.argv[2:])"
)


@dataclass(frozen=True)
class Installed:
    """A peer and the folder it is installed in."""

    name: str
    peer: Peer
    folder: Path

    def version(self) -> str:
        """Version of the distribution found in the folder."""
        found = importlib.metadata.distributions(
            name=self.peer.distribution, path=[str(self.folder)]
        )
        return next((d.version for d in found), "unknown version")


def parse(text: str, known: Mapping[str, Peer]) -> Installed:
    """NAME=FOLDER -> the peer; ValueError says what is wrong."""
    name, _, folder = text.partition("=")
    if name not in known:
        raise ValueError(f"--peer: unknown library {name!r}; the table knows {', '.join(known)}.")
    if not folder or not Path(folder).is_dir():
        raise ValueError(
            f"--peer {name}=FOLDER needs the folder it is installed in; {folder!r} is none."
        )
    return Installed(name, known[name], Path(folder).resolve())


def measure(
    one: Installed, rows: Sequence[tuple[str, str, tuple[int, ...]]], table: Path, seconds: float
) -> Iterator[tuple[str, Measured]]:
    """Measure `(op, label, sizes)` rows in a new process; yields (op/label, what was found)."""
    command = [sys.executable, "-c", _CHILD, str(_SOURCE), str(one.folder), one.name]
    command += [str(table.resolve()), str(seconds), json.dumps(rows)]
    done = set()
    with subprocess.Popen(command, cwd=one.folder, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith(_MARK):
                row, measured = json.loads(line.removeprefix(_MARK))
                done.add(row)
                yield row, _measured(measured)
    for op, label, _ in rows:
        if f"{op}/{label}" not in done:
            reason = f"its process ended with {process.returncode} before this row"
            yield f"{op}/{label}", Measured(reason=reason)


def child(folder: str, name: str, table: str, seconds: str, rows: str) -> None:
    """The other end of `measure`. `folder` already heads `sys.path`."""
    _env.export("PYTHONPATH", folder)  # for processes the peer starts
    module = load_table(Path(table))
    benches: dict[str, Bench] = {bench.op: bench for bench in module.TABLE}
    chosen = json.loads(rows)
    references = {op: benches[op].reference() for op, _, _ in chosen}
    peer: Peer = module.PEERS[name]
    hide_ourselves()
    library = load(peer.module, folder)
    for op, label, sizes in chosen:
        found = _one(benches[op], sizes, references[op], peer, library, float(seconds))
        print(_MARK + json.dumps([f"{op}/{label}", asdict(found)]), flush=True)


def _one(
    bench: Bench, sizes: Sequence[int], reference: Function, peer: Peer, library: Any, seconds: float
) -> Measured:  # fmt: skip
    if bench.op not in peer.calls:
        return Measured(reason="the table has no call for it")
    builders = {"peer": lambda: partial(peer.calls[bench.op], library)}
    device = _env.default_device()
    try:
        return measure_row(bench, tuple(sizes), reference, builders, device, seconds)["peer"]
    except torch.OutOfMemoryError as error:
        harness.free(device)
        return Measured(reason=str(error).splitlines()[0])


def hide_ourselves() -> None:
    """Forget this package's modules, so that its name can mean another's; functions keep working."""
    for name in [n for n in sys.modules if n.split(".")[0] == _OURS]:
        del sys.modules[name]


def load(module: str, folder: str) -> Any:
    """The peer's module; ImportError if it comes from elsewhere than `folder`."""
    library = importlib.import_module(module)
    where = Path(library.__file__ or "").resolve()
    if Path(folder).resolve() not in where.parents:
        raise ImportError(f"{module} was found at {where}, not under {folder}.")
    return library


def _measured(plain: dict[str, Any]) -> Measured:
    found = Measured(**plain)
    for times in (found.wall, found.kernel):
        times.update({mode: Spread(**spread) for mode, spread in times.items()})  # type: ignore[arg-type]
    return found
