"""Ops that treat rows one by one, on DTensors: every rank runs the kernel on the rows it holds.

    x     Shard of any dimension but the last    stays where it is: nothing is gathered
          Replicate                              the same work on every rank, as DTensor does it
          Shard of the last dimension, Partial   made whole first, one collective per call
                                                 (an elementwise op takes the shard as it is)
    w     vectors that all rows share: whole on every rank. Their gradients are sums over rows, so a rank that has some
          of the rows has a Partial one, which DTensor reduces where the parameter wants it

That is sequence parallelism (`torch.distributed.tensor.parallel.SequenceParallel`) around a norm, and tensor
parallelism around a gated activation whose projections return DTensors.
"""

import sys
from typing import Any

import torch
from torch import Tensor


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor, without importing torch.distributed for those who have none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def by_rows(op: Any, args: tuple[Any, ...], impl: str | None) -> Any:
    """`op(*args)` on local shards; its outputs as DTensors that lie as the first argument does.

    The first `op.rows` arguments are `[*, D]`, of the first one's leading shape; the other tensors are shared by all
    rows. A plain tensor among them counts as the same on every rank, and so does its gradient.
    """
    from torch.distributed.tensor import Partial, Replicate

    x = args[0]
    mesh, last = x.device_mesh, x.dim() - 1
    layout = [p if _keeps(p, last, op.elementwise) else Replicate() for p in x.placements]
    whole = [Replicate()] * mesh.ndim
    sums = [Partial() if p.is_shard() else Replicate() for p in layout]

    def local(i: int, arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        placed = layout if i < op.rows else whole
        found = _on(mesh, arg).redistribute(mesh, placed)
        return found.to_local(grad_placements=placed if i < op.rows else sums)

    found = op(*(local(i, arg) for i, arg in enumerate(args)), impl=impl)
    if isinstance(found, tuple):
        return tuple(_wrapped(y, x, mesh, layout) for y in found)
    return _wrapped(found, x, mesh, layout)


def _keeps(placement: Any, last: int, elementwise: bool) -> bool:
    """Whether the op can run on this placement's shards."""
    return placement.is_replicate() or (
        placement.is_shard() and (elementwise or placement.dim != last)
    )


def _on(mesh: Any, tensor: Tensor) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    if is_dtensor(tensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _wrapped(y: Tensor, x: Any, mesh: Any, layout: list[Any]) -> Any:
    from torch.distributed.tensor import DTensor

    # Shards need not be equal, so the whole size is the caller's x's; a width of its own is nobody's shard.
    cut = any(p.is_shard() and p.dim == x.dim() - 1 for p in layout)
    shape = x.shape if cut else torch.Size((*x.shape[:-1], y.shape[-1]))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, layout, run_check=False, shape=shape, stride=strides)
