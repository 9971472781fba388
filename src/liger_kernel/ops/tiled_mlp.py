"""An MLP over one part of the sequence at a time.   y = fn(module, x), row by row

    x: [*, S, H], cut along S into equal parts (the last may be shorter); y: what fn returns for them, joined

For long sequences, where the `[S, I]` tensors inside an MLP are what fills the memory: forward computes one part after
the other and keeps x alone; backward computes each part again and differentiates it. At any time the inner tensors of
one part exist. The price is one more forward pass.

Gradients of parameters are summed over the parts in fp32 (or wider) and rounded once. They leave as gradients of this
one function: hooks that wait for them (DDP, FSDP) run once, as behind an ordinary module. Backward restores the random
numbers (dropout; not while a CUDA graph is captured) and the autocast of the forward pass.
Under torch.compile the parts are checkpointed one by one, and autograd sums their gradients in their own dtype.

Paper   Bekman et al., "Arctic Long Sequence Training", arXiv:2506.13996
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from liger_kernel import _env
from liger_kernel.ops._op import compute_dtype, first_order, require
from liger_kernel.ops._triton import cdiv

Part = Callable[[Any, Tensor], Tensor]  # (module, part of x) -> part of y


def _trainable(module: nn.Module) -> list[Tensor]:
    """What wants a gradient in a module: parameters, or the views of a flat one that FSDP puts in their place."""
    found = {
        id(value): value
        for child in module.modules()
        for value in (*child._parameters.values(), *vars(child).values())
        if isinstance(value, Tensor) and value.requires_grad
    }
    flat = {id(tensor._base) for tensor in found.values()}
    return [tensor for key, tensor in found.items() if key not in flat]


class _Replay:
    """The random numbers and the autocast of the forward pass, recorded when made, in force within `with replay():`."""

    def __init__(self, x: Tensor) -> None:
        kind = x.device.type
        self.kind, self.cpu = kind, torch.get_rng_state()
        self.devices, self.states = get_device_states(*(() if _env.capturing(x.device) else (x,)))
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        enabled, dtype = self.autocast
        with torch.random.fork_rng(self.devices, device_type=self.kind):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states, device_type=self.kind)
            with torch.enable_grad(), torch.autocast(self.kind, dtype, enabled, cache_enabled=False):  # fmt: skip
                yield


class _Sum:
    """A sum of gradients, wide while there is more than one."""

    def __init__(self, parts: int) -> None:
        self.parts, self.total = parts, None

    def add(self, grad: Tensor | None) -> None:
        if grad is None:
            return
        if self.total is None:
            alone = self.parts == 1
            self.total = grad if alone else grad.to(compute_dtype(grad), copy=True)
        else:
            self.total.add_(grad)


class _TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fn: Part, module: nn.Module, size: int, tensors: Callable[[], list[Tensor]], x: Tensor, *given: Tensor
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, *given)
        ctx.call, ctx.size, ctx.tensors = (fn, module), size, tensors
        ctx.replay = _Replay(x)
        y, start = None, 0
        for part in x.split(size, -2):
            out = fn(module, part)
            if y is None:
                y = out.new_empty((*out.shape[:-2], x.shape[-2], out.shape[-1]))
            y.narrow(-2, start, part.shape[-2]).copy_(out)
            start += part.shape[-2]
        return y  # type: ignore[return-value]

    @staticmethod
    @first_order("tiled_mlp")
    def backward(ctx: Any, dy: Tensor) -> Any:
        (fn, module), size = ctx.call, ctx.size
        x = ctx.saved_tensors[
            0
        ]  # all of them are unpacked, which notices a parameter changed since
        need_x, *need = ctx.needs_input_grad[4:]
        inner = [t for t, needed in zip(ctx.tensors(), need, strict=True) if needed]
        dx = torch.empty_like(x) if need_x else None
        parts = x.split(size, -2)
        sums = [_Sum(len(parts)) for _ in inner]
        start = 0
        with ctx.replay():
            for part, dpart in zip(parts, dy.split(size, -2), strict=True):
                leaf = part.detach().requires_grad_(need_x)
                wanted = [leaf, *inner] if need_x else inner
                grads = list(
                    torch.autograd.grad(fn(module, leaf), wanted, dpart, allow_unused=True)
                )
                if dx is not None:
                    dx.narrow(-2, start, part.shape[-2]).copy_(grads.pop(0))
                for total, grad in zip(sums, grads, strict=True):
                    total.add(grad)
                start += part.shape[-2]
        _check_found(module, inner, sums)
        found = iter(
            s.total if s.total is None else s.total.to(t.dtype)
            for s, t in zip(sums, inner, strict=True)
        )
        return None, None, None, None, dx, *(next(found) if needed else None for needed in need)


def _check_found(module: nn.Module, inner: Sequence[Tensor], sums: Sequence[_Sum]) -> None:
    """A module whose hooks swap its parameters on every call would train nothing, silently."""
    if inner and all(s.total is None for s in sums):
        raise RuntimeError(
            f"tiled_mlp: no parameter of {type(module).__name__} took part in what fn computed. If hooks of the"
            " module gather its parameters (FSDP, ZeRO-3), call apply_tiled_mlp within the module's forward."
        )


def apply_tiled_mlp(
    fn: Part, mlp_module: nn.Module, x: Tensor, num_shards: int | None = None,
    compute_params: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """fn(mlp_module, x) computed part by part along the sequence, forth and back.

    Args:
        fn: `(module, part) -> y`, each row of y from the same row of the part alone, e.g. the
            module's class's own `forward`.
        mlp_module: passed to fn. To be called from within the module's own forward, so that hooks
            around it (FSDP, ZeRO-3) see one call.
        x: `[*, S, H]`.
        num_shards: number of parts; None: S / H rounded up, parts of H tokens at most.
        compute_params: the parameters that fn uses and that want gradients; None: all of the module's.
    Returns:
        What fn returns, `[*, S, H']`; differentiable once, in x and the parameters.
    Memory:
        Keeps x; backward holds one part's graph and an fp32 sum for each parameter.
    Raises:
        ValueError: x is not at least 2-D, or num_shards is no positive number.
        RuntimeError: in backward, if fn used none of the parameters.
    """
    require(x.dim() >= 2, f"tiled_mlp: x must be [*, S, H]; got shape {list(x.shape)}.")
    length = x.shape[-2]
    shards = max(1, cdiv(length, x.shape[-1])) if num_shards is None else num_shards
    require(shards >= 1, f"tiled_mlp: num_shards must be at least 1 or None; got {num_shards}.")
    size = max(1, cdiv(length, shards))
    if torch.compiler.is_compiling():
        parts = [
            checkpoint(fn, mlp_module, part, use_reentrant=False) for part in x.split(size, -2)
        ]
        return torch.cat(parts, -2)  # type: ignore[arg-type]

    def tensors() -> list[Tensor]:
        return _trainable(mlp_module) if compute_params is None else list(compute_params)

    return _TiledMLP.apply(fn, mlp_module, size, tensors, x, *tensors())


class LigerTiledMLPFunction:
    """`apply(fn, mlp_module, x, shards, compute_params=None)` is `apply_tiled_mlp`."""

    apply = staticmethod(apply_tiled_mlp)
