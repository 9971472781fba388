"""Other libraries, each in a process of its own.

A peer may bear this package's import name. So the child first imports the bench and the references
it needs from here, then drops them from `sys.modules` and imports the peer from its folder, which
heads PYTHONPATH. It is asked for one row at a time: a line of JSON on stdin, one back on stdout.

Whatever goes wrong becomes a row's reason: a child that dies, or gives no answer for long, fails the
row it was at, and another child goes on with the next one; one that cannot import its library fails
all of them.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import queue
import site
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from liger_kernel import _env
from liger_kernel.bench import harness
from liger_kernel.bench.harness import Measured, Spread, one_line
from liger_kernel.bench.row import Bench, Peer, load_table, measure_row
from liger_kernel.bench.work import Function

_OURS = "liger_kernel"
_SOURCE = Path(__file__).parents[2]
_MARK = "LIGER_BENCH "
_PATIENCE = 180.0  # seconds for one answer: some libraries compile and tune hundreds of kernels
_GRACE = 20.0  # seconds to leave by itself
_CHILD = (
    "import sys; ours, folder = sys.argv[1:3]; sys.path[0] = folder; sys.path.insert(0, ours); "
    "from liger_kernel.bench import peer; sys.path.pop(0); peer.child(*sys.argv[2:])"
)


class NoAnswer(Exception):
    """The child is gone, or silent for too long."""


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


# Here -----------------------------------------------------------------------------------------------------------------


class Session:
    """A peer's process: started for its first row, and anew for the next one after it died."""

    def __init__(self, one: Installed, table: Path, seconds: float, ops: Iterable[str]) -> None:
        self.one = one
        wanted = json.dumps([op for op in ops if op in one.peer.calls])
        self._command = [sys.executable, "-c", _CHILD, str(_SOURCE), str(one.folder), one.name]
        self._command += [str(table.resolve()), str(seconds), wanted]
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._unusable: str | None = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close(_GRACE)

    def measure(self, op: str, sizes: Sequence[int]) -> Measured:
        """Ask for one row."""
        try:
            if self._process is None and self._unusable is None:
                self._unusable = self._start()
            if self._unusable is not None:
                return Measured(reason=self._unusable)
            found, alive = self._ask([op, sizes])
            if not alive:
                self.close(_GRACE)
            return _measured(found)
        except NoAnswer as gone:
            self.close()
            return Measured(reason=str(gone))

    def close(self, grace: float = 0.0) -> None:
        """Let the child leave within `grace` seconds, then end it."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            _stream(process.stdin).close()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> str | None:
        """None, or why this library cannot be measured at all."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, cwd=self.one.folder, stdin=pipe, stdout=pipe, text=True
        )
        self._answers = queue.Queue()
        arguments = (_stream(self._process.stdout), self._answers)
        threading.Thread(target=_listen, args=arguments, daemon=True).start()
        try:
            reason = self._answer()
        except NoAnswer as gone:
            reason = f"{gone} before it had imported its library"
        if reason is not None:
            self.close()
        return reason

    def _ask(self, question: Any) -> Any:
        if self._process is None:
            raise NoAnswer("its process was never started")
        with contextlib.suppress(BrokenPipeError):  # then its answer says that it ended
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        try:
            line = self._answers.get(timeout=_PATIENCE)
        except queue.Empty:
            raise NoAnswer(f"its process was silent for {_PATIENCE:.0f} s") from None
        if line is None:
            code = self._process.wait() if self._process else None
            raise NoAnswer(f"its process ended with {code}")
        return json.loads(line)


def _listen(stream: IO[str], answers: "queue.Queue[str | None]") -> None:
    """Pass on the answers among whatever else a library prints; None at the end."""
    with stream:
        for line in stream:
            if line.startswith(_MARK):
                answers.put(line.removeprefix(_MARK))
    answers.put(None)


def _stream(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise NoAnswer("its process has no pipe")
    return pipe


def _measured(plain: dict[str, Any]) -> Measured:
    found = Measured(**plain)
    for times in (found.wall, found.kernel):
        times.update({mode: Spread(**spread) for mode, spread in times.items()})  # type: ignore[arg-type]
    return found


# In the child ---------------------------------------------------------------------------------------------------------


def child(folder: str, name: str, table: str, seconds: str, ops: str) -> None:
    """The other end of `Session`. `folder` already heads `sys.path`."""
    module = load_table(Path(table))
    benches: dict[str, Bench] = {bench.op: bench for bench in module.TABLE}
    references = {op: benches[op].reference() for op in json.loads(ops)}
    peer: Peer = module.PEERS[name]
    settle(folder)
    hide_ourselves()
    try:
        library = load(peer.module, folder)
    except Exception as error:  # any library may fail in its own way: the reason goes to the report
        _reply(one_line(error))
        return
    _reply(None)
    timed: set[str] = set()  # ops whose host time is known
    for line in sys.stdin:
        op, sizes = json.loads(line)
        call = partial(peer.calls[op], library)
        known = ("peer",) if op in timed else ()
        found = _one(benches[op], sizes, references[op], call, float(seconds), known, peer.slack)
        if found.host_us:
            timed.add(op)
        alive = harness.tidy(_env.default_device())
        _reply([asdict(found), alive])
        if not alive:
            return


def _reply(answer: Any) -> None:
    print("\n" + _MARK + json.dumps(answer), flush=True)


def _one(
    bench: Bench, sizes: Sequence[int], reference: Function, call: Function, seconds: float,
    known: Sequence[str], slack: float,
) -> Measured:  # fmt: skip
    builders, device = {"peer": lambda: call}, _env.default_device()
    try:
        found = measure_row(bench, tuple(sizes), reference, builders, device, seconds, known, slack)
        return found["peer"]
    except torch.OutOfMemoryError as error:
        return Measured(reason=one_line(error))


def settle(folder: str) -> None:
    """Make `folder` a site directory, here and for processes the peer starts: its .pth files count."""
    before = set(sys.path)
    site.addsitedir(folder)
    added = [path for path in sys.path if path not in before]
    _env.export("PYTHONPATH", os.pathsep.join([*added, folder]))


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
