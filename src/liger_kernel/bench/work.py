"""What a provider is asked to do: one call, forward or backward or both, on given tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FORWARD, BACKWARD, BOTH = MODES = ("forward", "backward", "forward+backward")

Function = Callable[..., Any]
Inputs = dict[str, Tensor]


class Make:
    """Draws inputs: `make(*shape)` standard normal, `make.ids(high, *shape)` integers below `high`.

    Equal seeds draw equal tensors.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
        generator = torch.Generator(device).manual_seed(seed)
        self._to: dict[str, Any] = {"device": device, "generator": generator}
        self._dtype = dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, **self._to)

    def ids(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, **self._to)


@dataclass
class Work:
    """One provider's call on its inputs. `restore` puts back what the provider wrote over."""

    function: Function
    inputs: Inputs
    grads: tuple[str, ...]
    upstream: list[Tensor | None]
    restore: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What belongs to the caller: inputs and upstream gradients, detached, by name."""
        yield from ((name, t.detach()) for name, t in self.inputs.items())
        for i, t in enumerate(self.upstream):
            if t is not None:
                yield f"upstream {i}", t

    def forward(self) -> tuple[Tensor, ...]:
        result = self.function(**self.inputs)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.grads:
            return ()
        return torch.autograd.grad(
            outputs, [self.inputs[name] for name in self.grads], self.upstream
        )

    def prepare(self, mode: str) -> tuple[Tensor, ...] | None:
        """What has to happen, untimed, before a call in this mode."""
        for mine, original in self.restore:
            mine.copy_(original)
        return self.forward() if mode == BACKWARD else None

    def run(self, mode: str, prepared: tuple[Tensor, ...] | None) -> Any:
        """The timed part."""
        if mode == FORWARD:
            return self.forward()
        outputs = self.forward() if prepared is None else prepared
        return outputs, self.backward(outputs)


def work_of(function: Function, inputs: Inputs, grads: tuple[str, ...], make: Make) -> Work:
    """A `Work` on `inputs` as leaves; outputs that are no scalars get random upstream gradients."""
    leaves = {n: t.detach().requires_grad_(n in grads) for n, t in inputs.items()}
    work = Work(function, leaves, grads, [])
    outputs = work.forward()
    work.upstream = [
        torch.empty_like(y).copy_(make(*y.shape)) if y.dim() else None for y in outputs
    ]
    return work


def rewired(work: Work, function: Function, dtype: torch.dtype | None = None) -> Work:
    """`work` with another function, on copies of its tensors (floating-point ones in `dtype`)."""

    def copy(t: Tensor, name: str = "") -> Tensor:
        wide = dtype if t.is_floating_point() else None
        return t.detach().to(wide or t.dtype, copy=True).requires_grad_(name in work.grads)

    inputs = {name: copy(t, name) for name, t in work.inputs.items()}
    upstream = [None if t is None else copy(t) for t in work.upstream]
    return Work(function, inputs, work.grads, upstream)
