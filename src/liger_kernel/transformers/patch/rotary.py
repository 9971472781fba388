"""Seam: rotary embedding, a function that attention layers call by name.

Such a function is looked up in the Python module of the modelling file at each call, so it can only
be replaced there, for every model of that file. What makes that safe: the probe has shown equal
values for arbitrary tables, calls of another form than the probed one go to the original, and the
replacement stays until the last model that asked for it is undone. An unpatched model in the same
process keeps its numbers (to the rounding of one fp32 instead of three 16-bit operations).
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.llama4_rope import llama4_rope
from liger_kernel.ops.qwen2vl_mrope import qwen2vl_mrope
from liger_kernel.ops.rope import rope
from liger_kernel.transformers.patch import probe

NAMES = (
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_vision",
    "apply_rotary_pos_emb_interleave",  # DeepSeek-V3 and its kin
    "apply_multimodal_rotary_pos_emb",  # Qwen2-VL before transformers 5
    "apply_rotary_emb",  # Llama 4, DeepSeek-V2
    "vision_apply_rotary_emb",  # Llama 4
)
_DIM, _TOKENS = 16, 5

# parameter of a function -> what it stands for
_ROLES = {
    **dict.fromkeys(("q", "x", "xq", "query", "tensor"), "q"),
    **dict.fromkeys(("k", "xk", "key"), "k"),
    **dict.fromkeys(("freqs_cis", "freqs_ci"), "freqs"),
    **{name: name for name in ("cos", "sin", "mrope_section", "position_ids", "unsqueeze_dim")},
}


@dataclass(frozen=True)
class Form:
    """One way to rotate: (q, k or None, *tables, axis of the heads, impl) -> (q', k'), and how many columns a column of
    the tables turns."""

    name: str
    rotate: Callable[..., Any]
    ratio: int = 1


def _rope(**options: Any) -> Callable[..., Any]:
    def rotate(q: Any, k: Any, cos: Tensor, sin: Tensor, axis: int, impl: str | None = None) -> Any:
        return rope(q, k, cos, sin, unsqueeze_dim=axis, impl=impl, **options)

    return rotate


def _rope_of_pairs(half: bool = False, **options: Any) -> Callable[..., Any]:
    """One value a pair: all of the tables, or their first half."""

    def rotate(q: Any, k: Any, cos: Tensor, sin: Tensor, axis: int, impl: str | None = None) -> Any:
        pairs = cos.shape[-1] // 2 if half else cos.shape[-1]
        cos, sin = cos[..., :pairs], sin[..., :pairs]
        return rope(q, k, cos, sin, unsqueeze_dim=axis, rotary_dim=2 * pairs, impl=impl, **options)

    return rotate


def _complex(q: Any, k: Any, freqs: Tensor, axis: int, impl: str | None = None) -> Any:
    if _without_batch(q, freqs, axis):
        freqs = freqs.reshape(q.shape[3 - axis], -1)
    return llama4_rope(q, k, freqs.to(q.device), axis, impl=impl)  # they move it too


def _without_batch(q: Tensor, freqs: Tensor, axis: int) -> bool:
    """Whether freqs holds one complex number for each token and pair of a 4-D q, in whatever shape."""
    return 2 * freqs.numel() == q.shape[3 - axis] * q.shape[-1]


def _sectioned(
    q: Any, k: Any, cos: Tensor, sin: Tensor, sections: Any, axis: int, impl: str | None = None
) -> Any:
    return qwen2vl_mrope(q, k, cos, sin, sections, axis, impl=impl)


# tables of a function -> the forms they can have
_FORMS = {
    ("cos", "sin"): (
        Form("rotate-half", _rope()),
        Form("rotate-half, one value a pair", _rope_of_pairs(), 2),
        Form("interleaved", _rope(interleaved=True)),
        Form("interleaved, first half of the tables", _rope_of_pairs(True, interleaved=True)),
        Form("interleaved, one value a pair", _rope_of_pairs(interleaved=True), 2),
        Form("interleaved, last columns", _rope_of_pairs(interleaved=True, trailing=True), 2),
        Form("interleaved to halves", _rope_of_pairs(True, interleaved=True, to_halves=True)),
    ),
    ("freqs",): (Form("complex", _complex, 2),),
    ("cos", "sin", "mrope_section"): (Form("rotate-half, three sections", _sectioned),),
}


@dataclass(frozen=True)
class Layout:
    """Rank of q, axis of its heads (None: the call says), rank of the tables."""

    q: int
    axis: int | None
    tables: int


class Signature:
    """How a function is called: which of its parameters are q, k, the tables and the axis of the heads."""

    def __init__(self, function: Any) -> None:
        # With the `kernels` package installed, decorated functions are modules without weights.
        called = function.forward if isinstance(function, nn.Module) else function
        parameters = inspect.signature(called).parameters
        self.roles = {name: _ROLES.get(name, "") for name in parameters}
        roles = list(self.roles.values())
        self.tables = tuple(t for t in ("cos", "sin", "freqs", "mrope_section") if t in roles)
        self.single = "k" not in roles
        self.needed = {"q", "k", *self.tables} & set(roles)
        known = "q" in roles and "" not in roles and len(set(roles)) == len(roles)
        if not known or self.tables not in _FORMS:
            raise probe.Refused(f"its arguments are ({', '.join(parameters)})")
        first = parameters.get("position_ids")
        if first is not None and first.default is first.empty:
            raise probe.Refused("its tables are those of all positions, looked up by position_ids")
        by_call = "unsqueeze_dim" in parameters
        self.axis = parameters["unsqueeze_dim"].default if by_call else None

    def layouts(self) -> tuple[Layout, ...]:
        """What the function may have been written for, to be tried in this order."""
        if self.axis is not None:
            return (Layout(4, None, 4 if "mrope_section" in self.tables else 3),)
        by_token, by_head = Layout(4, 2, 3), Layout(4, 1, 3)
        if self.tables == ("freqs",):
            return by_token, by_head, Layout(4, 2, 2)
        return Layout(3, -2, 2), by_token, by_head

    def bind(self, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any] | None:
        """role -> value in one call; None for a call the function itself would refuse."""
        given = {**dict(zip(self.roles, args, strict=False)), **named}
        if len(given) < len(args) + len(named) or not given.keys() <= self.roles.keys():
            return None
        values = {self.roles[name]: value for name, value in given.items()}
        return values if self.needed.issubset(values) else None


class RopeSeam:
    """Functions of modelling files."""

    name = "rope"
    flags = ("rope",)

    @functools.cache  # noqa: B019 - the seams live as long as the process
    def probe(self, function: Any) -> tuple[str, Any]:
        """(description, replacement); `Refused` if no form reproduces the function."""
        call = Signature(function)
        found: list[tuple[Form, Layout, bool]] = []
        with probe.bench():
            for form in _FORMS[call.tables]:
                width = _DIM // form.ratio
                for layout in call.layouts():
                    if _fits(function, call, form, layout, width):
                        partial = _fits(function, call, form, layout, width // 2)
                        found.append((form, layout, partial))
        if not found:
            raise probe.Refused(
                "it rotates neither halves nor interleaved pairs in the usual sense"
            )
        form, layout, partial = max(found, key=lambda fit: fit[2])  # the first of the more general
        replacement = _replacement(function, call, form, layout, partial)
        return f"{form.name}{', partial' if partial else ''}", replacement


def _replacement(original: Any, call: Signature, form: Form, layout: Layout, partial: bool) -> Any:
    def probed(given: dict[str, Any]) -> bool:
        q, table = given["q"], given[call.tables[0]]
        if not (isinstance(q, Tensor) and isinstance(table, Tensor) and q.dim() == layout.q):
            return False
        if call.tables == ("freqs",) and layout.tables == 2:  # the original takes it in any shape
            return _without_batch(q, table, 2)
        whole = table.shape[-1] * form.ratio == q.shape[-1]
        return table.dim() == layout.tables and (partial or whole)

    @functools.wraps(original, updated=())
    def rotary(*args: Any, **named: Any) -> Any:
        given = call.bind(args, named)
        if given is None or not probed(given):
            return original(*args, **named)
        axis = given.get("unsqueeze_dim", call.axis) if layout.axis is None else layout.axis
        tables = (given[table] for table in call.tables)
        found = form.rotate(given["q"], given.get("k"), *tables, axis)
        return found[0] if call.single else found

    rotary.__liger_seam__ = "rope"  # type: ignore[attr-defined]
    return rotary


# Does a form fit?


def _fits(function: Any, call: Signature, form: Form, layout: Layout, width: int) -> bool:
    """Equal on random tables, all of whose entries differ, for both axes of the heads if the call says which."""
    return all(
        _fits_at(function, call, form, axis, _given(call, layout, axis, width))
        for axis in ((1, 2) if layout.axis is None else (layout.axis,))
    )


def _given(call: Signature, layout: Layout, axis: int, width: int) -> dict[str, Any]:
    """Arguments of one call, by role."""
    draw = probe.Draw()
    batch = (2,) if layout.q == 4 else ()

    def heads(n: int) -> Tensor:
        return draw(*batch, *((n, _TOKENS) if axis == 1 else (_TOKENS, n)), _DIM)

    def table() -> Tensor:
        return draw(*(3, 2, _TOKENS, width)[4 - layout.tables :])

    given: dict[str, Any] = {"q": heads(3)}
    if not call.single:
        given["k"] = heads(2)
    for name in call.tables:
        if name == "mrope_section":
            given[name] = [width // 8, 3 * width // 8, width // 2 - width // 8 - 3 * width // 8]
        else:
            given[name] = torch.complex(table(), table()) if name == "freqs" else table()
    if layout.axis is None:
        given["unsqueeze_dim"] = axis
    return given


def _fits_at(function: Any, call: Signature, form: Form, axis: int, given: dict[str, Any]) -> bool:
    def cast(dtype: torch.dtype) -> dict[str, Any]:
        return {
            role: probe.cast(value, dtype)
            if isinstance(value, Tensor) and not value.is_complex()
            else value
            for role, value in given.items()
        }

    def original(dtype: torch.dtype) -> Any:
        values = cast(dtype)
        return function(
            **{name: values[role] for name, role in call.roles.items() if role in values}
        )

    def candidate(dtype: torch.dtype) -> Any:
        values = cast(dtype)
        tables = (values[table] for table in call.tables)
        found = form.rotate(values["q"], values.get("k"), *tables, axis, impl="torch")
        return found[0] if call.single else found

    try:
        return probe.same(original, candidate, exact=False)
    except (RuntimeError, ValueError, IndexError):  # shapes this function does not take
        return False
