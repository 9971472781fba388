"""Each swapped module and function on the inputs that the model gave the original.

The model runs as shipped. Where it calls something that `patch` swaps, the replacement is called too, and the original
once more in exact arithmetic; then the model goes on with what the original returned.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from liger_kernel.transformers.patch.apply import Change, original_of, seam_of
from liger_kernel.transformers.patch.probe import plain_class
from liger_kernel.verification.result import Row, Rows
from liger_kernel.verification.state import exactly, wide, widened
from liger_kernel.verification.steps import Batch

# seen in its loss and gradients
_OF_THE_MODEL = ("head", "cross_entropy", "rematerialise", "adapters")


def compare_outputs(
    model: nn.Module, changes: Iterable[Change], batch: Batch, index: int, rows: Rows, exact: torch.dtype
) -> None:  # fmt: skip
    """One forward in evaluation mode; a row for each kind of swapped module or function.

    Args:
        model: not patched.
        changes: what `patch` replaced and has put back.
        index: of the batch.
    """
    watch = _Watch(index, exact, next(model.parameters()).device)
    names = {module: name for name, module in model.named_modules()}
    model.eval()
    with contextlib.ExitStack() as stack:
        for change in changes:
            seam, owner = seam_of(change.new), change.owner
            if seam is None or seam in _OF_THE_MODEL:
                continue
            if isinstance(owner, nn.Module):
                row = rows.of("output", f"{seam} {plain_class(owner).__name__}", seam)
                stack.enter_context(watch.module(change, row, names[owner]))
            elif isinstance(owner, ModuleType):
                space = owner.__name__.rpartition(".")[2]
                row = rows.of("output", f"{seam} {space}.{change.name}", seam)
                stack.enter_context(watch.function(change, row))
        with torch.no_grad():
            model(**batch)


class _Watch:
    """Of one forward: calls what is swapped three ways. Not within such calls: a module may hold another one."""

    def __init__(self, index: int, exact: torch.dtype, device: torch.device) -> None:
        self.index, self.exact, self.device = index, exact, device
        self.busy = False

    @contextlib.contextmanager
    def module(self, change: Change, row: Row, name: str) -> Iterator[None]:
        """Within the block the calls of a module are compared."""

        def hook(module: nn.Module, args: Any, named: Any, plain: Any) -> None:
            context = functools.partial(widened, module, self.exact, self.device)
            self._compare(row, name, plain, change.new, module.forward, context, args, named)

        handle = change.owner.register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def function(self, change: Change, row: Row) -> Iterator[None]:
        """Within the block the calls of a function of a Python module are compared."""
        original, calls = original_of(change.new), itertools.count(1)
        context = functools.partial(exactly, self.device)

        @functools.wraps(original, updated=())
        def tap(*args: Any, **named: Any) -> Any:
            plain = original(*args, **named)
            name = f"call {next(calls)}"
            self._compare(row, name, plain, change.new, original, context, args, named)
            return plain

        setattr(change.owner, change.name, tap)
        try:
            yield
        finally:
            setattr(change.owner, change.name, original)

    def _compare(
        self, row: Row, name: str, plain: Any, new: Callable[..., Any], original: Callable[..., Any],
        context: Callable[[], Any], args: Any, named: Any,
    ) -> None:  # fmt: skip
        if self.busy:
            return
        self.busy = True
        try:
            found = new(*args, **named)
            with context():
                args, named = tree_map(functools.partial(wide, exact=self.exact), (args, named))
                truth = original(*args, **named)
        finally:
            self.busy = False
        row.see(name, self.index, distance(found, truth), distance(plain, truth))


def distance(found: Any, truth: Any) -> float:
    """The largest relative error of the tensors in a result, NaN if one is."""
    pairs = zip(_tensors(found), _tensors(truth), strict=True)
    errors = [float((x.to(t.dtype) - t).norm() / t.norm().clamp_min(1e-30)) for x, t in pairs]
    return torch.tensor(errors).max().item()


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
