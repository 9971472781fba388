"""A function in several gloo processes on one machine. Whatever goes wrong in one of them ends all, and says where.

    run(check, 2, *args)        check(*args) as rank 0 and 1 of a process group; what each returned

The processes are forked from a server that has imported torch and transformers already: a run costs tenths of a
second, not the seconds of an import. `check` must be importable (a function at module level), arguments and results
must pickle. Within it `torch.distributed` is initialised and torchrun's RANK, WORLD_SIZE, ... are set.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

_PRELOADED = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "liger_kernel.transformers",
]
_GRACE = 2.0  # seconds in which the other ranks may tell their own error before they are ended


class RankFailed(AssertionError):
    """A rank that raised, died or did not end in time; the text has each rank's traceback or stack."""


def run(
    check: Callable[..., Any], world: int, *args: Any, timeout: float = 150.0, backend: str = "gloo"
) -> list[Any]:
    """`check(*args)` in `world` processes; their results in the order of ranks. With another backend than gloo each
    rank has the accelerator of its number.

    Raises:
        RankFailed: naming the ranks that raised, died, or still ran after `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ranks, ends = [], []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(world):
                mine, theirs = context.Pipe(duplex=False)
                job = (check, args, rank, world, folder, timeout, backend, theirs)
                ranks.append(context.Process(target=_rank, args=job, daemon=True))
                ranks[-1].start()
                theirs.close()  # the rank's is the only one left: its death is the end of the pipe
                ends.append(mine)
            told = _listen(ends, time.monotonic() + timeout)
            failed = {rank: text for rank, (ok, text) in told.items() if not ok}
            late = not failed and all(process.is_alive() for process in ranks)
            for rank in sorted({*range(world)} - told.keys()):
                failed[rank] = _last_words(ranks[rank], Path(folder, f"stack{rank}"), late, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()
    if failed:
        blocks = [f"rank {rank} of {world}: {text}" for rank, text in sorted(failed.items())]
        raise RankFailed("\n\n".join(blocks))
    return [told[rank][1] for rank in range(world)]


def _listen(ends: list[Any], deadline: float) -> dict[int, tuple[bool, Any]]:
    """rank -> (finished, result or traceback), until all have told, one failed, or time is up."""
    told: dict[int, tuple[bool, Any]] = {}
    waiting = dict(enumerate(ends))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for end in connection.wait(list(waiting.values()), left):
            rank = next(r for r, e in waiting.items() if e is end)
            del waiting[rank]
            try:
                told[rank] = word = pickle.loads(end.recv_bytes())
            except EOFError:  # died without a word
                word = (False, None)
            if not word[0]:
                deadline = min(deadline, time.monotonic() + _GRACE)
    return told


def _last_words(process: Any, stack: Path, late: bool, timeout: float) -> str:
    process.join(_GRACE / 2)  # its pipe ends a moment before it does
    if not process.is_alive():
        return f"died with exit code {process.exitcode}"
    os.kill(process.pid, signal.SIGUSR1)  # see `_rank`: it writes down where it is
    time.sleep(_GRACE / 4)
    what = f"still ran after {timeout:g} s" if late else "still ran when another rank had failed"
    return f"{what}\n{stack.read_text() if stack.exists() else ''}".rstrip()


def _rank(
    check: Callable[..., Any], args: Any, rank: int, world: int, folder: str, timeout: float, backend: str,
    end: Any,
) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    stack = Path(folder, f"stack{rank}").open("w")  # noqa: SIM115 - for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stack)
    sizes = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in sizes.items()}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "gloo":
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": "",
            "HIP_VISIBLE_DEVICES": "",
        }  # there may be fewer than ranks
    else:
        torch.accelerator.set_device_index(rank)
    try:
        dist.init_process_group(
            backend, f"file://{folder}/store", timedelta(seconds=timeout), world, rank
        )
        told = (True, check(*args))
        dist.barrier()
    except BaseException:
        told = (False, traceback.format_exc())
    end.send_bytes(
        pickle.dumps(told)
    )  # `send` would share a tensor's memory, which ends with its process
    os._exit(0)  # no farewell: gloo's threads may wait for a rank that is gone


# What checks need


def mine(whole: dict[str, Any]) -> dict[str, Any]:
    """This rank's rows of a batch whose rows divide evenly."""
    import torch.distributed as dist

    return {n: t.chunk(dist.get_world_size())[dist.get_rank()] for n, t in whole.items()}


def mean(value: Any) -> Any:
    """The mean of a tensor over the ranks."""
    import torch.distributed as dist

    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def full(tensor: Any) -> Any:
    """A tensor, or all of a DTensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Equal tensors by name, relative to their norms and, for small ones, to the largest."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    largest = max(float(t.norm()) for t in wanted.values())
    for name, tensor in wanted.items():
        error = float((found[name] - tensor).norm())
        assert error <= tolerance * (float(tensor.norm()) + 1e-3 * largest), (name, error)
