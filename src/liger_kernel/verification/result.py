"""How far apart is too far, and how it is told.

Everything is judged against the unpatched model in a wider dtype, beside the unpatched model itself:

    error(patched) <= 2 * error(plain) + floor          error = |x - exact| / |exact|, in the Frobenius norm

    floor   1e-5, and for what is compared one rounding of the model's dtype: a whole eps for gradients, a quarter (what
            rounding to nearest does on average) for outputs and the loss; three times that for 16 bits under Triton's
            interpreter, which truncates, as in `testing/tolerance.py`

Errors are those of the worst place of a group: the same parameter in all layers, the modules of one class, the loss of
all batches. One tensor's own error is too much a matter of luck in 16 bits.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from liger_kernel import _env

_FLOOR = 1e-5
_EPS = {"output": 0.25, "loss": 0.25, "gradient": 1.0}
_NOBODY = (
    "No kernel can be named: none does this alone, and there is not one without which it is gone."
)


@dataclass
class Row:
    """One group of places and the largest errors in it; no places: what is swapped there was not called.

    `where`, `batch`: of the patched model's largest error.
    """

    kind: str  # output, loss, gradient
    group: str
    floor: float
    places: set[str] = field(default_factory=set)
    error: float = -1.0  # below any
    plain: float = 0.0
    where: str = ""
    batch: int = 0
    seam: str | None = None  # of an output

    @property
    def allowed(self) -> float:
        """The largest error that still counts as equal."""
        return 2 * self.plain + self.floor

    @property
    def ok(self) -> bool:
        """False also where an error is not finite."""
        return self.error <= self.allowed < math.inf

    @property
    def excess(self) -> float:
        """Its error in terms of the bound; infinite where one is not finite."""
        finite = math.isfinite(self.error) and math.isfinite(self.allowed)
        return self.error / self.allowed if finite else math.inf

    def see(self, where: str, batch: int, error: float, plain: float) -> None:
        """Take one more place into account."""
        self.places.add(where)
        if not plain <= self.plain:
            self.plain = plain
        if not math.isnan(self.error) and not error <= self.error:
            self.error, self.where, self.batch = error, where, batch

    def __str__(self) -> str:
        what = f"{self.kind} of {self.where}"
        if not math.isfinite(self.plain):
            return f"{what} is not finite in the plain model either"
        return f"{what} is {self.error:.1e} off, {self.allowed:.1e} is allowed"


class Rows(dict[tuple[str, str], Row]):
    """Rows by kind and group, in the order they were met."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        truncated = _env.interpreting() and dtype.itemsize == 2
        self._eps = torch.finfo(dtype).eps * (3 if truncated else 1)

    def of(self, kind: str, group: str, seam: str | None = None) -> Row:
        """The row of a group, made if it is new."""
        floor = _FLOOR + _EPS[kind] * self._eps
        return self.setdefault((kind, group), Row(kind, group, floor, seam=seam))

    def again(self) -> "Rows":
        """The same bounds, for other steps of the patched model."""
        new = Rows.__new__(Rows)
        new._eps = self._eps
        new.update({key: Row(r.kind, r.group, r.floor, plain=r.plain) for key, r in self.items()})
        return new

    @property
    def finite(self) -> bool:
        """Whether the plain model is, so that there is something to compare with."""
        return all(math.isfinite(row.plain) for row in self.values())

    @property
    def bad(self) -> list[Row]:
        """Those out of bounds, the worst first."""
        return sorted((row for row in self.values() if not row.ok), key=lambda row: -row.excess)


@dataclass(frozen=True)
class Culprit:
    """A kernel to blame: the flags that switch it, and what is out of bounds because of it."""

    flags: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        off = ", ".join(f"{flag}=False" for flag in self.flags)
        return f"{'/'.join(self.flags)}: {self.reason}; patch(model, {off}) does without it."


@dataclass(frozen=True)
class Cost:
    """Of a step: tokens a second, None if no step was timed, and peak memory above the model, in bytes."""

    tokens_per_second: float | None
    peak_memory: int


@dataclass(frozen=True)
class Verification:
    """Returned by `verify`. `ok`; print it; `as_dict()` for programs; `report`: what was patched."""

    model: str
    dtype: torch.dtype
    exact: torch.dtype
    rows: list[Row]
    culprits: list[Culprit]
    plain: Cost
    patched: Cost
    report: Any

    @property
    def ok(self) -> bool:
        """Whether every output, loss and gradient is as near the exact one as the bounds ask."""
        return all(row.ok for row in self.rows)

    @property
    def verdict(self) -> str:
        """One line if all is well; else a line for each kernel to blame."""
        if self.ok:
            worst = max(self.rows, key=lambda row: row.excess)
            return f"patched and plain agree; nearest to its bound: {worst}."
        worst = max((row for row in self.rows if not row.ok), key=lambda row: row.excess)
        if not math.isfinite(worst.plain):
            return f"there is nothing to compare with: {worst}."
        blame = [f"  {culprit}" for culprit in self.culprits] or [f"  {_NOBODY}"]
        return "\n".join([f"patched and plain disagree: {worst}.", *blame])

    def table(self) -> str:
        """Every group with its error, that of the plain model, the bound and the worst place; then speed and memory."""
        head = ("", "places", "patched", "plain", "allowed", "", "worst")
        lines = [head, *(_cells(row) for row in self.rows)]
        return "\n".join([*_aligned(lines), "", *_aligned(self._costs())])

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.exact)]
        top = f"{self.model}: errors in {names[0]} against {names[1]}"
        return f"{top}\n\n{self.table()}\n\n{self.verdict}"

    def as_dict(self) -> dict[str, Any]:
        """What the table shows, as plain values."""
        rows = [
            {
                "kind": row.kind,
                "group": row.group,
                "places": len(row.places),
                "error": row.error if row.places else None,
                "plain_error": row.plain,
                "allowed": row.allowed,
                "ok": row.ok,
                "worst": row.where,
                "batch": row.batch,
            }
            for row in self.rows
        ]
        costs = {"plain": vars(self.plain), "patched": vars(self.patched)}
        return {
            "model": self.model,
            "ok": self.ok,
            "verdict": self.verdict,
            "dtype": str(self.dtype).removeprefix("torch."),
            "exact_dtype": str(self.exact).removeprefix("torch."),
            "rows": rows,
            "culprits": [{"flags": list(c.flags), "reason": c.reason} for c in self.culprits],
            **costs,
            "patch": self.report.as_dict(),
        }

    def _costs(self) -> list[tuple[str, ...]]:
        pair = self.plain, self.patched
        lines: list[tuple[str, ...]] = [("", "plain", "patched", "ratio")]
        for label, values, unit in (
            ("tokens/s", [c.tokens_per_second for c in pair], 1),
            ("peak MiB above the model", [c.peak_memory for c in pair], _env.MIB),
        ):
            cells = ["-" if v is None else f"{v / unit:,.1f}" for v in values]
            ratio = f"{values[1] / values[0]:.2f}" if values[0] and values[1] else "-"
            lines.append((label, *cells, ratio))
        return lines


def _cells(row: Row) -> tuple[str, ...]:
    name = row.kind if row.group == row.kind else f"{row.kind} {row.group}"
    if not row.places:
        return name, "0", "-", "-", "-", "not called", ""
    numbers = (f"{x:.1e}" for x in (row.error, row.plain, row.allowed))
    where = "" if row.where == row.group else row.where
    mark = "" if row.ok else "<- too far"
    return name, str(len(row.places)), *numbers, mark, where


def _aligned(lines: Iterable[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need; numbers to the right, the first column and words to the left."""
    lines = list(lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    words = {0, *(i for i, title in enumerate(lines[0]) if i and title in ("", "worst"))}

    def show(line: tuple[str, ...]) -> str:
        cells = (
            c.ljust(w) if i in words else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [show(line) for line in lines]
