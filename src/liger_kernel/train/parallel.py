"""Several processes under torchrun: the engine around the model, each one's share of a step, their mean loss."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_kernel import _env
from liger_kernel.train.settings import Settings

Wrap = Callable[[Any], Any]


@contextlib.contextmanager
def engine(settings: Settings, run: str) -> Iterator[Wrap]:
    """A process group for one run, and what wraps the model: `DistributedDataParallel`, FSDP2 or nothing."""
    if settings.parallel is None:
        yield lambda model: model
        return
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    device = torch.device(settings.device)
    backend = "gloo"
    if device.type != "cpu":
        backend = _env.infer_comm_backend()
        torch.accelerator.set_device_index(device.index)
    store, rank, ranks = next(rendezvous("env://"))
    # The launcher's store outlives a run: the second one must not read the first one's addresses.
    dist.init_process_group(backend, store=PrefixStore(run, store), rank=rank, world_size=ranks)
    try:
        yield _ddp if settings.parallel == "ddp" else _fsdp
    finally:
        dist.destroy_process_group()


def _ddp(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def _fsdp(model: Any) -> Any:
    """Every block that Hugging Face says must not be split is a unit, the rest another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    blocks = set(model._no_split_modules or ())
    for module in [m for m in model.modules() if type(m).__name__ in blocks]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def own_rows(block: Tensor) -> Tensor:
    """This process's sequences of a step `[ranks * batch, seq]`."""
    if not dist.is_initialized():
        return block
    return block.chunk(dist.get_world_size())[dist.get_rank()]


def mean_over_ranks(loss: Tensor) -> Tensor:
    """The loss of the whole step: every process has as many tokens."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss
