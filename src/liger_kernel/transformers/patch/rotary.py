"""Seam: rotary embedding, a function that attention layers call by name.

`apply_rotary_pos_emb` is looked up in the Python module of the modelling file at each call, so it can
only be replaced there, for every model of that file. What makes that safe: the probe has shown equal
values for arbitrary tables, calls of another form than the probed one go to the original, and the
replacement stays until the last model that asked for it is undone. An unpatched model in the same
process keeps its numbers (to the rounding of one fp32 instead of three 16-bit operations).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.rope import rope
from liger_kernel.transformers.patch import probe

NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_vision")
_DIM = 16
Rotate = Callable[..., Any]  # (q, k or None, cos, sin, axis of the heads, impl) -> (q', k')


def _half(q: Any, k: Any, cos: Tensor, sin: Tensor, axis: int, impl: str | None = None) -> Any:
    return rope(q, k, cos, sin, unsqueeze_dim=axis, impl=impl)


def _half_of_pairs(
    q: Any, k: Any, cos: Tensor, sin: Tensor, axis: int, impl: str | None = None
) -> Any:
    return rope(q, k, cos, sin, unsqueeze_dim=axis, rotary_dim=2 * cos.shape[-1], impl=impl)


def _pairs(q: Any, k: Any, cos: Tensor, sin: Tensor, axis: int, impl: str | None = None) -> Any:
    return rope(q, k, cos, sin, unsqueeze_dim=axis, interleaved=True, impl=impl)


def _pairs_of_half(
    q: Any, k: Any, cos: Tensor, sin: Tensor, axis: int, impl: str | None = None
) -> Any:
    width = cos.shape[-1]
    cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    return rope(q, k, cos, sin, unsqueeze_dim=axis, rotary_dim=width, interleaved=True, impl=impl)


# description -> (function, rotated columns for each column of the tables)
_FORMS: dict[str, tuple[Rotate, int]] = {
    "rotate-half": (_half, 1),
    "rotate-half, one value a pair": (_half_of_pairs, 2),
    "interleaved": (_pairs, 1),
    "interleaved, first half of the tables": (_pairs_of_half, 1),
}


class Signature:
    """How a function is called: `(q, k | x, cos, sin[, position_ids][, unsqueeze_dim])`."""

    def __init__(self, function: Any) -> None:
        # With the `kernels` package installed, decorated functions are modules without weights.
        called = function.forward if isinstance(function, nn.Module) else function
        parameters = inspect.signature(called).parameters
        names = list(parameters)
        self.single = names[:3] == ["x", "cos", "sin"]
        rest = names[3 if self.single else 4 :]
        both = names[:4] == ["q", "k", "cos", "sin"]
        if not (self.single or both) or not set(rest) <= {"position_ids", "unsqueeze_dim"}:
            raise probe.Refused(f"its arguments are ({', '.join(names)})")
        self.at = rest.index("unsqueeze_dim") if "unsqueeze_dim" in rest else None
        self.axis: int = parameters["unsqueeze_dim"].default if self.at is not None else -2
        self.rank = 4 if self.at is not None else 3  # of q; tables have one less

    def axis_of(self, rest: tuple[Any, ...], named: dict[str, Any]) -> int:
        """The axis of the heads in this call."""
        if self.at is not None and len(rest) > self.at:
            return rest[self.at]
        return named.get("unsqueeze_dim", self.axis)


class RopeSeam:
    """Functions of modelling files."""

    name = "rope"
    flags = ("rope",)

    @functools.cache  # noqa: B019 - the seams live as long as the process
    def probe(self, function: Any) -> tuple[str, Any]:
        """(description, replacement); `Refused` if no form reproduces the function."""
        signature = Signature(function)
        with probe.bench():
            for description, (rotate, ratio) in _FORMS.items():
                width = _DIM // ratio
                if not _fits(function, signature, rotate, width):
                    continue
                partial = _fits(function, signature, rotate, width // 2)
                replacement = _replacement(function, signature, rotate, ratio, partial)
                return f"{description}{', partial' if partial else ''}", replacement
        raise probe.Refused("it rotates neither halves nor interleaved pairs in the usual sense")


def _replacement(original: Any, call: Signature, rotate: Rotate, ratio: int, partial: bool) -> Any:
    def probed(q: Any, cos: Any) -> bool:
        ranks = q.dim() == call.rank and cos.dim() == call.rank - 1
        return ranks and (partial or cos.shape[-1] * ratio == q.shape[-1])

    @functools.wraps(original, updated=())
    def rotary(q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        if not probed(q, cos):
            return original(q, k, cos, sin, *rest, **named)
        return rotate(q, k, cos, sin, call.axis_of(rest, named))

    @functools.wraps(original, updated=())
    def rotary_one(x: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        if not probed(x, cos):
            return original(x, cos, sin, *rest, **named)
        return rotate(x, None, cos, sin, call.axis_of(rest, named))[0]

    replacement: Any = rotary_one if call.single else rotary
    replacement.__liger_seam__ = "rope"
    return replacement


def _fits(function: Any, call: Signature, rotate: Rotate, width: int) -> bool:
    """Equal on random tables, all of whose entries differ, for both layouts of the heads if there are two."""
    draw = probe.Draw()
    tokens, batch = 5, () if call.rank == 3 else (2,)
    tables = [draw(*batch, tokens, width) for _ in range(2)]
    for axis in (-2,) if call.at is None else (1, 2):
        heads_first = axis == 1
        q, k = (
            draw(*batch, *((heads, tokens) if heads_first else (tokens, heads)), _DIM)
            for heads in (3, 2)
        )
        named = {} if call.at is None else {"unsqueeze_dim": axis}
        tensors = [q, *tables] if call.single else [q, k, *tables]
        try:
            equal = probe.same(
                functools.partial(_run_original, function, tensors, named),
                functools.partial(_run_candidate, rotate, tensors, axis),
                exact=False,
            )
        except (
            RuntimeError,
            ValueError,
            IndexError,
        ):  # tables of a width this function does not take
            return False
        if not equal:
            return False
    return True


def _run_original(
    function: Any, tensors: list[Tensor], named: dict[str, int], dtype: torch.dtype
) -> Any:
    return function(*(probe.cast(t, dtype) for t in tensors), **named)


def _run_candidate(rotate: Rotate, tensors: list[Tensor], axis: int, dtype: torch.dtype) -> Any:
    *x, cos, sin = (probe.cast(t, dtype) for t in tensors)
    q, k = x if len(x) == 2 else (x[0], None)
    found = rotate(q, k, cos, sin, axis, impl="torch")
    return found[0] if k is None else found
