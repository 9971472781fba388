"""What a row of the table is, and how one is measured."""

import importlib
import importlib.util
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from liger_kernel.bench import harness
from liger_kernel.bench.harness import COMPILE, Builder, Measured
from liger_kernel.bench.work import BACKWARD, BOTH, FORWARD, Function, Inputs, Make


@dataclass(frozen=True)
class Bench:
    """One operator.

    op        name of the row, and of the module in `liger_kernel.ops` that is imported when it runs
    inputs    (make, *sizes) -> tensors by keyword, in the operator's order
    grads     the inputs whose gradients are taken
    shapes    label -> sizes
    quick     the labels of `--quick`
    tiny      sizes for host time, and for everything on a CPU
    modes     which calls are timed
    clock     "kernel" or "wall": the time held against the floor
    eager, ours, cost    made from the module; by default `OP.reference`, the function named like the
              op, and `OP.cost`
    products  inputs -> (N, H, V) where three matrix products make the floor
    module    where ours stands if not in `liger_kernel.ops`
    """

    op: str
    inputs: Callable[..., Inputs]
    grads: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    quick: tuple[str, ...]
    tiny: tuple[int, ...]
    modes: tuple[str, ...] = (FORWARD, BOTH)
    clock: str = "kernel"
    eager: Callable[[Any], Function] = lambda ops: ops.OP.reference
    ours: Mapping[str, Callable[[Any], Function]] | None = None
    cost: Callable[..., Any] = lambda ops, **inputs: ops.OP.cost(*inputs.values())
    products: Callable[..., tuple[int, int, int]] | None = None
    module: str = ""

    def ops(self) -> Any:
        """The operator's module."""
        return importlib.import_module(self.module or f"liger_kernel.ops.{self.op}")

    def reference(self) -> Function:
        """Plain torch: the first provider, and what every provider is checked against."""
        return self.eager(self.ops())

    def providers(self) -> dict[str, Builder]:
        """Name -> builder of the callable; nothing is imported or compiled before it is called."""
        ours = self.ours or {"ours": lambda ops: getattr(ops, self.op)}
        return {
            "eager": self.reference,
            COMPILE: lambda: harness.compiled(self.reference()),
            **{name: (lambda make=make: make(self.ops())) for name, make in ours.items()},
        }


@dataclass(frozen=True)
class Peer:
    """Another library.

    module        where its functions stand
    distribution  the name it is installed under, for its version
    calls         op -> `(module, **inputs) -> tensor or tuple`
    slack         how many times as far from fp32 as ours its results may be and still be timed, if that is known of it
    """

    module: str
    distribution: str
    calls: Mapping[str, Callable[..., Any]]
    slack: float = 1.0


def measure_row(
    bench: Bench, sizes: tuple[int, ...], reference: Function, builders: Mapping[str, Builder],
    device: torch.device, seconds: float, known: Container[str] = (), slack: float = 1.0,
) -> dict[str, Measured]:  # fmt: skip
    """Everything about one row but its floor: gate, times and memory at `sizes`, host time at the tiny shape.

    The tiny shape is the same for all rows of an operator: providers in `known` have their host time from another row.
    """
    make = Make(device)
    found = harness.measure(
        reference,
        builders,
        bench.inputs(make, *sizes),
        bench.grads,
        bench.modes,
        device,
        seconds,
        make,
        slack,
    )
    right = {
        name: builders[name]
        for name, one in found.items()
        if one.reason is None and name not in known
    }
    if not right:
        return found
    tiny = bench.inputs(make, *bench.tiny)
    works, _ = harness.gate(reference, right, tiny, bench.grads, make, slack)
    for name, work in works.items():
        for mode in set(bench.modes) - {BACKWARD}:
            found[name].host_us[mode] = harness.host_us(work, mode, device)
    return found


def load_table(path: Path) -> Any:
    """The table's module: `TABLE`, a list of `Bench`, `SIZES`, op -> label -> sizes, and `PEERS`."""
    spec = importlib.util.spec_from_file_location("benchmark_table", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(
            f"no benchmark table at {path}. It is part of the repository, not of the installed "
            "package: run from a checkout, or name yours with --table."
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
