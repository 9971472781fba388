"""One process for each model class: nothing that one does to transformers, or its crash, reaches the next."""

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from liger_kernel.coverage.matrix import Family, examine

# imported once, before the first class
_PRELOADED = ["transformers.modeling_utils", "liger_kernel.transformers.patch.model"]
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@dataclass
class _Running:
    name: str
    process: Any
    ends: float


def examine_all(names: list[str], check: bool, jobs: int, limit: float) -> Iterator[Family]:
    """`matrix.examine` of each class, `jobs` at a time, in the order in which they finish.

    Args:
        limit: seconds a class may take.
    """
    context: Any = multiprocessing.get_context(_METHOD)
    if _METHOD == "forkserver":
        context.set_forkserver_preload(_PRELOADED)
    todo, running = list(reversed(names)), dict[Connection, _Running]()
    try:
        while todo or running:
            while todo and len(running) < jobs:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_examine, args=(sender, todo[-1], check), daemon=True
                )
                process.start()
                sender.close()
                running[receiver] = _Running(todo.pop(), process, time.monotonic() + limit)
            yield from _finished(running, limit)
    finally:
        for one in running.values():
            one.process.kill()


def _finished(running: dict[Connection, _Running], limit: float) -> Iterator[Family]:
    """The classes that are done, or out of time, after a moment's wait."""
    ready = wait(list(running), timeout=1.0)
    for receiver, one in list(running.items()):
        late = time.monotonic() > one.ends
        if receiver not in ready and not late:
            continue
        family = Family(one.name, unbuilt=f"took more than {limit:g} s")
        if receiver in ready:
            try:
                family = receiver.recv()
            except EOFError:
                one.process.join()
                family.unbuilt = f"its process ended with exit code {one.process.exitcode}"
        one.process.kill()
        one.process.join()
        receiver.close()
        del running[receiver]
        yield family


def _examine(sender: Connection, name: str, check: bool) -> None:
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    sender.send(examine(name, check))
