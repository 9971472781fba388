"""What every op must keep, written once and run on every row of `tests/cases.py`.

A property takes a `Case` and one point of it (shape, options, dtype) and raises AssertionError
with what it saw.
"""

import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._op import Op
from liger_kernel.testing.poison import poisoned_empty
from liger_kernel.testing.tolerance import Verdict, demand, pooled, verdicts

_SMALL, _DRAWS = 2048, 16  # the product of a small case's sizes, and how often it is drawn

Shape = tuple[int, ...]
Options = dict[str, Any]
Tensors = dict[str, Tensor]


class Maker:
    """Draws the inputs of one point, the same for the same seed on every device and dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0):
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normal values of the given standard deviation."""
        drawn = torch.randn(shape, generator=self._generator) * scale
        return drawn.to(dtype or self.dtype).to(self.device)

    def ids(self, high: int, *shape: int) -> Tensor:
        """Integers in [0, high)."""
        return torch.randint(high, shape, generator=self._generator).to(self.device)

    def chance(self, probability: float, *shape: int) -> Tensor:
        """Booleans, True with the given probability."""
        return (torch.rand(shape, generator=self._generator) < probability).to(self.device)


@dataclass(frozen=True)
class Case:
    """One op's row: how to call it, what to feed it, over which shapes and options.

    function and op.reference take the tensors of `inputs(shape, make, **options)` and the options
    as keywords. grads names the differentiable inputs. shapes start with the smallest; they hold
    odd sizes, size 1 and size 0.
    """

    op: Op
    function: Callable[..., Any]
    inputs: Callable[..., Tensors]
    shapes: Sequence[Shape]
    options: dict[str, Sequence[Any]] = field(default_factory=dict)
    grads: Sequence[str] = ()
    reference: Callable[..., Any] | None = None  # None: op.reference
    opchecks: Callable[[Tensors], list[tuple[Any, tuple[Any, ...]]]] | None = None  # launcher, args
    bad: Sequence[tuple[str, Callable[[Maker], Any], type[Exception]]] = ()  # message, call, error
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
    differentiable: bool = True  # False where a part of the loss is held constant: no gradcheck
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.op.name

    @property
    def definition(self) -> Callable[..., Any]:
        return self.reference or self.op.reference

    def grid(self, most: int = 48) -> Iterator[Options]:
        """Every combination of options; a fixed random choice of them where there are more than `most`."""
        keys = list(self.options)
        size = math.prod(len(v) for v in self.options.values())
        combinations = itertools.product(*self.options.values())
        chosen = set(random.Random(0).sample(range(size), most)) if size > most else range(size)
        for i, values in enumerate(combinations):
            if i in chosen:
                yield dict(zip(keys, values, strict=True))

    def cover(self) -> Iterator[Options]:
        """A short list of combinations that shows every value of every option at least once."""
        longest = max((len(v) for v in self.options.values()), default=1)
        for i in range(longest):
            yield {k: v[i % len(v)] for k, v in self.options.items()}

    def draw(
        self,
        shape: Shape,
        options: Options,
        dtype: torch.dtype,
        device: torch.device,
        turn: int = 0,
    ) -> Tensors:
        """turn: another draw of the same kind."""
        seed = zlib.crc32(f"{self.name}{shape}{sorted(options.items(), key=str)}".encode()) + turn
        return self.inputs(shape, Maker(dtype, device, seed), **options)


def outputs_of(result: Any) -> dict[str, Tensor]:
    """The tensors of a result (tensor, tuple, or dataclass) by name."""
    if isinstance(result, Tensor):
        return {"out": result}
    many = isinstance(result, (tuple, list))
    named = {f"out{i}": r for i, r in enumerate(result)} if many else vars(result)
    return {k: v for k, v in named.items() if isinstance(v, Tensor)}


def _fresh(tensors: Tensors, grads: Sequence[str]) -> Tensors:
    """Leaves with their own autograd history, in the layout of the originals."""
    return {
        k: (t.detach().requires_grad_(k in grads) if t.is_floating_point() else t)
        for k, t in tensors.items()
    }


def _upstream(outputs: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    make = Maker(torch.float32, torch.device("cpu"), seed)
    return {
        k: make(*v.shape, dtype=v.dtype).to(v.device) for k, v in outputs.items() if v.requires_grad
    }


def run(
    function: Callable[..., Any],
    tensors: Tensors,
    options: Options,
    grads: Sequence[str],
    upstream: dict[str, Tensor] | None = None,
) -> Tensors:
    """Outputs and gradients of one call, by name (`d<input>`)."""
    leaves = _fresh(tensors, grads)
    outputs = outputs_of(function(**leaves, **options))
    live = {k: v for k, v in outputs.items() if v.requires_grad}
    found = {k: v.detach() for k, v in outputs.items()}
    if live and grads:
        given = upstream or _upstream(outputs)
        wanted = [leaves[k] for k in grads]
        got = torch.autograd.grad(
            list(live.values()),
            wanted,
            [given[k].to(live[k].dtype) for k in live],
            allow_unused=True,
        )
        for k, leaf, g in zip(grads, wanted, got, strict=True):
            found[f"d{k}"] = torch.zeros_like(leaf) if g is None else g
    return found


def _wide(tensors: Tensors) -> Tensors:
    return {k: (t.double() if t.is_floating_point() else t) for k, t in tensors.items()}


def _near(a: Tensors, b: Tensors, what: str) -> None:
    """Equal up to the order of sums, which torch may change with the layout."""
    for k in a:
        room = 16 * torch.finfo(a[k].dtype).eps if a[k].is_floating_point() else 0.0
        scale = max(a[k].abs().max().item(), 1.0)
        worst = (a[k].double() - b[k].double()).abs().max().item()
        if not worst <= room * scale:
            raise AssertionError(f"{what}: {k} differs by {worst:.3e}")


def _same(a: Tensors, b: Tensors, what: str) -> None:
    if a.keys() != b.keys():
        raise AssertionError(f"{what}: {sorted(a)} against {sorted(b)}")
    for k in a:
        if not torch.equal(a[k].nan_to_num(nan=12345.0), b[k].nan_to_num(nan=12345.0)):
            worst = (a[k].double() - b[k].double()).abs().max().item()
            raise AssertionError(f"{what}: {k} differs by {worst:.3e}")


# Properties


def accurate(
    case: Case, shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> None:
    """No worse than twice eager's error against float64, values and gradients, on the path `_env`
    selects. A small case that looks worse is drawn again: eager may have been lucky.
    """

    def found(turn: int) -> list[Verdict]:
        tensors = case.draw(shape, options, dtype, device, turn)
        results = run(case.function, tensors, options, case.grads)
        with _env.using_impl("torch"):
            eager = run(case.definition, tensors, options, case.grads)
            truth = run(case.definition, _wide(tensors), options, case.grads)
        for k, v in results.items():
            if k.startswith("d") and k[1:] in tensors and v.dtype != tensors[k[1:]].dtype:
                raise AssertionError(f"{k} is {v.dtype}, its input {tensors[k[1:]].dtype}")
        return verdicts(results, eager, truth)

    first = found(0)
    lucky = math.prod(shape) <= _SMALL and not all(v.ok for v in first)
    demand(pooled([first, *map(found, range(1, _DRAWS))]) if lucky else first)


def written(
    case: Case, shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> None:
    """Every element of every buffer that matters is written: NaN-poisoned memory changes
    nothing.
    """
    tensors = case.draw(shape, options, dtype, device)
    clean = run(case.function, tensors, options, case.grads)
    with poisoned_empty():
        poisoned = run(case.function, tensors, options, case.grads)
    _same(clean, poisoned, "with poisoned memory")


def repeatable(
    case: Case, shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> None:
    """Two runs give the same bits, and neither the inputs nor the upstream gradients change."""
    tensors = case.draw(shape, options, dtype, device)
    before = {k: t.clone() for k, t in tensors.items()}
    with torch.no_grad():
        outputs = outputs_of(case.function(**tensors, **options))
    upstream = _upstream(
        {k: v.float().requires_grad_() for k, v in outputs.items() if v.is_floating_point()}
    )
    kept = {k: t.clone() for k, t in upstream.items()}
    first = run(case.function, tensors, options, case.grads, upstream)
    second = run(case.function, tensors, options, case.grads, upstream)
    _same(first, second, "second run")
    _same(before, tensors, "inputs after the run")
    _same(kept, upstream, "upstream gradients after the run")


def layout_variants(t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values in other memory layouts: transposed, every second element, an offset window,
    reversed dimensions.
    """
    if t.dim() >= 2:
        yield "transposed", t.transpose(-1, -2).contiguous().transpose(-1, -2)
        yield (
            "reversed dims",
            t.permute(*range(t.dim())[::-1]).contiguous().permute(*range(t.dim())[::-1]),
        )
    if t.dim() >= 1:
        wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1] + 1, dtype=t.dtype, device=t.device)
        wide[..., : 2 * t.shape[-1] : 2] = t
        yield "every second column", wide[..., : 2 * t.shape[-1] : 2]
        padded = torch.zeros(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype, device=t.device)
        padded[..., 1 : 1 + t.shape[-1]] = t
        yield "offset window", padded[..., 1 : 1 + t.shape[-1]]


def layouts(
    case: Case, shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> None:
    """Operands and upstream gradients of any strides give the result of contiguous ones."""
    tensors = case.draw(shape, options, dtype, device)
    plain = run(case.function, tensors, options, case.grads)
    for name, tensor in tensors.items():
        for what, variant in layout_variants(tensor):
            other = run(case.function, {**tensors, name: variant}, options, case.grads)
            _near(plain, other, f"{name} {what}")
    _gradient_layouts(case, tensors, options)


def _gradient_layouts(case: Case, tensors: Tensors, options: Options) -> None:
    leaves = _fresh(tensors, case.grads)
    outputs = {
        k: v for k, v in outputs_of(case.function(**leaves, **options)).items() if v.requires_grad
    }
    if not outputs:
        return
    contiguous = _upstream(outputs)
    plain = run(case.function, tensors, options, case.grads, contiguous)
    for k, g in contiguous.items():
        for what, variant in layout_variants(g):
            other = run(case.function, tensors, options, case.grads, {**contiguous, k: variant})
            _near(plain, other, f"gradient of {k} {what}")
    ones = {k: torch.ones_like(v) for k, v in contiguous.items()}
    spread = {
        k: torch.ones((), dtype=v.dtype, device=v.device).expand(v.shape)
        for k, v in contiguous.items()
    }
    _near(
        run(case.function, tensors, options, case.grads, ones),
        run(case.function, tensors, options, case.grads, spread),
        "expanded gradient",
    )


def partial(
    case: Case, shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> None:
    """Any subset of inputs may need gradients; each gradient is the same as when all do."""
    tensors = case.draw(shape, options, dtype, device)
    full = run(case.function, tensors, options, case.grads)
    upstream = _upstream(outputs_of(case.function(**_fresh(tensors, case.grads), **options)))
    for size in range(len(case.grads)):
        for subset in itertools.combinations(case.grads, size):
            some = run(case.function, tensors, options, subset, upstream)
            _same({k: full[k] for k in some}, some, f"gradients of only {subset}")


def traced(
    case: Case, shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> None:
    """`torch.compile(fullgraph=True)` traces the op and gives eager's result."""
    tensors = case.draw(shape, options, dtype, device)
    plain = run(case.function, tensors, options, case.grads)
    torch._dynamo.reset()
    compiled = torch.compile(case.function, fullgraph=True, backend="aot_eager")
    _same(plain, run(compiled, tensors, options, case.grads), "compiled")


def differentiable(case: Case, shape: Shape, options: Options, device: torch.device) -> None:
    """The reference's own gradients are right: gradcheck in float64."""
    tensors = _wide(case.draw(shape, options, torch.float64, device))
    leaves = _fresh(tensors, case.grads)

    def call(*wanted: Tensor) -> Any:
        given = {**leaves, **dict(zip(case.grads, wanted, strict=True))}
        found = outputs_of(case.definition(**given, **options))
        return tuple(v for v in found.values() if v.requires_grad)

    torch.autograd.gradcheck(call, tuple(leaves[k] for k in case.grads))
