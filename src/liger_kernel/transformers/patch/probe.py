"""Does a candidate compute what a class computes? Asked once per class, with tiny tensors on the CPU.

The user's weights are never read: they may be sharded, quantised or on the meta device. A twin of
the module (same class, same plain attributes, tiny random weights) and the candidate get the same
inputs, in fp32 and in bf16, with rows from 0.01 to 30 so that an eps, a clamp or a cap shows.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.transformers.patch.apply import original_of

_SCALES = (0.01, 1.0, 4.0, 30.0)  # of the rows of a probe input
_BASE = frozenset(vars(nn.Module()))


class Refused(Exception):
    """A candidate does not fit; the message is the reason shown in the report."""


@contextlib.contextmanager
def bench() -> Iterator[None]:
    """Plain eager CPU, whatever device, autocast or gradient mode the caller is in, and its random state afterwards."""
    with (
        torch.device("cpu"),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),  # modules draw their first weights
    ):
        yield


class Draw:
    """Reproducible random CPU tensors that leave the global generator alone."""

    def __init__(self) -> None:
        self.generator = torch.Generator(device="cpu").manual_seed(20240)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def rows(self, width: int) -> Tensor:
        """`[1, 8, width]` of every scale."""
        scale = torch.tensor(_SCALES * 2, dtype=torch.float32, device="cpu").view(1, -1, 1)
        return self(1, 2 * len(_SCALES), width) * scale


def plain_class(module: nn.Module) -> type:
    """The class as its author wrote it, below what FSDP2 puts in front."""
    return next(
        cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.distributed")
    )


def arguments(cls: type) -> list[str]:
    """Names of the arguments of a class's own `forward`, without self."""
    return list(inspect.signature(original_of(cls.forward)).parameters)[1:]  # type: ignore[attr-defined]


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module knows besides parameters, buffers, children and what other libraries hung on it."""
    skip = _BASE | {"forward", "_hf_hook", "_old_forward"}
    return {k: v for k, v in vars(module).items() if k not in skip and not isinstance(v, Tensor)}


def fingerprint(module: nn.Module) -> Any:
    """Modules with equal fingerprints need one probe: class, scalars, shapes, kinds of children, ranks."""
    scalars = (
        (k, v)
        for k, v in plain_attributes(module).items()
        if (isinstance(v, (bool, int, float, str, type(None))) or _is_shape(v))
        and k not in ("layer_idx", "layer_id")
    )
    children = (
        (name, type(child), child.extra_repr())
        for name, child in module.named_children()
        if not _linear(child)
    )
    ranks = ((name, None if p is None else p.dim()) for name, p in module._parameters.items())
    cls = plain_class(module)
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)  # type: ignore[attr-defined]
    reads_config = code is not None and "config" in code.co_names
    config = repr(vars(module).get("config")) if reads_config else None
    return cls, tuple(scalars), tuple(children), tuple(ranks), config


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(v) is int for v in value)


def _linear(child: nn.Module) -> bool:
    return hasattr(child, "in_features")


def bare(child: nn.Module) -> nn.Module:
    """The child with the same contents but without hooks: a probe is nobody's forward."""
    new = copy.copy(child)
    for name, value in vars(child).items():
        if name.endswith("_hooks") or "_hooks_" in name:
            new.__dict__[name] = type(value)()
    for name in ("forward", "_hf_hook", "_old_forward"):
        new.__dict__.pop(name, None)
    return new


def twin(
    module: nn.Module, resized: dict[int, int], tensors: dict[str, Tensor | None], general: bool
) -> nn.Module:
    """A module of the same class and plain attributes in training mode.

    Args:
        resized: small sizes for the sizes that occur in the attributes.
        tensors: its parameters.
        general: stand for every instance of the class, whatever its config says: numbers other than
            an eps are changed, so that a factor which happens to be 1 shows. (A candidate that reads
            the attribute itself is not affected.)
    """
    cls: Any = plain_class(module)
    new: nn.Module = cls.__new__(cls)
    nn.Module.__init__(new)
    for name, value in plain_attributes(module).items():
        if _is_shape(value):
            value = tuple(resized.get(v, v) for v in value)
        elif type(value) is int:
            value = resized.get(value, value)
        elif general and type(value) is float and "eps" not in name:
            value = 0.75 * value + 0.125
        new.__dict__[name] = value
    for name, value in tensors.items():
        new.register_parameter(name, None if value is None else nn.Parameter(value))
    return new


def linear(weight: Tensor) -> nn.Linear:
    """A linear layer without bias."""
    new = nn.Linear(1, 1, bias=False, device="cpu", dtype=weight.dtype)
    new.out_features, new.in_features = weight.shape
    new.weight = nn.Parameter(weight)
    return new


Outputs = tuple[Tensor, ...]


def same(
    original: Callable[[torch.dtype], Any], candidate: Callable[[torch.dtype], Any], exact: bool
) -> bool:
    """Whether both give the same values in fp32 (1e-5 of the largest in a row) and in bf16.

    exact: bit for bit in bf16. Otherwise the candidate's bf16 result may differ, but must not be
    further from the original's fp32 result (on the same bf16 numbers) than the original's is.
    """

    def pairs(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        return list(zip(_outputs(original(dtype)), _outputs(candidate(dtype)), strict=True))

    def alike(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.dtype == b.dtype

    if not all(alike(a, b) and _close(a, b) for a, b in pairs(torch.float32)):
        return False
    narrow = pairs(torch.bfloat16)
    if exact:
        return all(alike(a, b) and torch.equal(a, b) for a, b in narrow)
    truth = _outputs(original(torch.float64))
    return all(
        alike(a, b) and _error(b, t) <= 1.05 * _error(a, t)
        for (a, b), t in zip(narrow, truth, strict=True)
    )


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x for one of the three runs of `same`; fp64 stands for "bf16 numbers, exact arithmetic"."""
    return x.to(torch.bfloat16).float() if dtype == torch.float64 else x.to(dtype)


def _outputs(result: Any) -> Outputs:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _close(a: Tensor, b: Tensor) -> bool:
    """Row by row, so that small rows count."""
    scale = a.abs().amax(-1, keepdim=True)
    return bool(torch.isfinite(a).all()) and bool(((a - b).abs() <= 1e-5 * scale + 1e-30).all())


def _error(x: Tensor, truth: Tensor) -> float:
    return float((x.float() - truth.float()).norm())
