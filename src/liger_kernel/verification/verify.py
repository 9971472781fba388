"""The order of things: plain and patched, batch by batch, and if they part, which kernel it was."""

import statistics
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.transformers.patch import patched, probe_model
from liger_kernel.transformers.patch.apply import unshared
from liger_kernel.transformers.patch.flags import DEFAULTS, checked
from liger_kernel.transformers.patch.model import unwrapped
from liger_kernel.transformers.patch.report import ALREADY
from liger_kernel.verification.choices import Choices, recomputes
from liger_kernel.verification.culprit import find_culprits
from liger_kernel.verification.outputs import compare_outputs
from liger_kernel.verification.result import Cost, Culprit, Rows, Verification
from liger_kernel.verification.state import (
    coarsest,
    exact_for,
    left_as_found,
    why_not,
    wide,
    widened,
)
from liger_kernel.verification.steps import Batch, Step, compare_steps, step


def verify(model: Any, batches: Iterable[Any], **flags: bool | None) -> Verification:
    """Run a model as shipped and patched on a few batches and say whether they agree, and if not, which kernel it is.

    Compared are the output of every swapped module on the inputs that the model gives it, the loss, and the gradient of
    every parameter, each against the unpatched model in a wider dtype (fp32 for 16 bits, fp64 for fp32): the patched
    model may be twice as far from it as the plain one is, plus one rounding. See `result.py`.

    Args:
        model: an unpatched Hugging Face model, or a wrapper that `patch` looks through, in one process. To judge a step
            under autocast, call this inside it. Training mode, gradients, buffers and random state stay as they are.
        batches: each a dict of the model's arguments with labels, or token ids `[B, T]`, which are their own labels.
        flags: as in `patch`.
    Returns:
        A `Verification`: `.ok`, `.table()`, printable.
    Raises:
        TypeError: an unknown flag, with the nearest known one.
        ValueError: no batch, no loss, nothing to train, sharded or quantised weights, a model that is patched already.

    Memory: the weights a second time in the wider dtype, and the gradients three times. Time: three steps and a forward
    a batch; where something is wrong, a step more for every kernel.
    """
    chosen = {**DEFAULTS, **checked(flags, "verify", DEFAULTS)}
    with unshared():  # other models of the same file may be patched
        return _verify(unwrapped(model), batches, chosen)


def _verify(model: nn.Module, batches: Iterable[Any], chosen: dict[str, bool]) -> Verification:
    _check(model)
    device = next(model.parameters()).device
    data = [_batch(each, device) for each in batches]
    if not data:
        raise ValueError("verify needs at least one batch; got none.")
    dtype = coarsest(model, device)
    exact, rows = exact_for(dtype), Rows(dtype)
    with patched(model, **chosen) as report:
        changes = list(report.ledger.changes)
    costs: dict[str, list[Step]] = {"plain": [], "patched": []}
    with left_as_found(model):
        for index, batch in enumerate(data):
            compare_outputs(model, changes, batch, index, rows, exact)
            choices = _choices(model)
            truth = _exact_step(model, batch, choices, exact)
            plain = step(model, batch, choices, measure=index == 0)
            with patched(model, **chosen) as report:
                found = step(model, batch, choices, measure=index == 0)
            compare_steps(found, plain, truth, index, rows)
            for name, each in (("plain", plain), ("patched", found)):
                costs[name].append(replace(each, grads={}))
            del truth, plain, found
        culprits = (
            _blame(model, data, chosen, report, rows, exact) if rows.bad and rows.finite else []
        )
    plain_cost, patched_cost = (_cost(steps, data) for steps in costs.values())
    return Verification(
        type(model).__name__,
        dtype,
        exact,
        [*rows.values()],
        culprits,
        plain_cost,
        patched_cost,
        report,
    )


def _blame(
    model: nn.Module, data: list[Batch], flags: dict[str, bool], report: Any, rows: Rows, exact: torch.dtype
) -> list[Culprit]:  # fmt: skip
    index = next((row.batch for row in rows.bad if row.kind != "output"), 0)
    batch, choices = data[index], _choices(model)
    truth = _exact_step(model, batch, choices, exact)
    plain = step(model, batch, choices)

    def judge() -> Rows:
        again = rows.again()
        compare_steps(step(model, batch, choices), plain, truth, index, again)
        return again

    return find_culprits(model, flags, report, rows.bad, judge)


def _choices(model: nn.Module) -> AbstractContextManager[Any]:
    return nullcontext() if recomputes(model) else Choices()


def _exact_step(
    model: nn.Module, batch: Batch, choices: AbstractContextManager[Any], exact: torch.dtype
) -> Step:
    with widened(model, exact, next(model.parameters()).device):
        return step(model, {name: wide(value, exact) for name, value in batch.items()}, choices)


def _cost(steps: list[Step], data: list[Batch]) -> Cost:
    """Time from all steps but the first, which compiles, and on a CPU counts its memory."""
    rates = [_tokens(b) / s.seconds for s, b in zip(steps[1:], data[1:], strict=True)]
    return Cost(statistics.median(rates) if rates else None, steps[0].peak)


def _tokens(batch: Batch) -> int:
    return max(
        (x.numel() for x in batch.values() if isinstance(x, Tensor) and not x.is_floating_point()),
        default=0,
    )


def _batch(given: Any, device: torch.device) -> Batch:
    if isinstance(given, Tensor):
        given = {"input_ids": given, "labels": given}
    if not isinstance(given, Mapping):
        raise ValueError(f"a batch is a dict or a tensor of token ids; got {type(given).__name__}.")
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}


def _check(model: Any) -> None:
    reason = why_not(model)
    if reason is None:
        found = probe_model(model, **dict.fromkeys(DEFAULTS, True)).rows
        bound = dict.fromkeys(row.seam for row in found if row.status == ALREADY)
        if bound:
            reason = f"it is patched already ({', '.join(bound)}): undo() that first"
    if reason is not None:
        raise ValueError(f"verify cannot judge this {type(model).__name__}: {reason}.")
