"""What the patcher did to a model, why not more, and the way back."""

import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from liger_kernel import _env
from liger_kernel.transformers.patch.apply import Ledger

SWAPPED, ALREADY, FITS, LEFT = "swapped", "already", "fits", "left"


@dataclass(frozen=True)
class Row:
    """One kind of place in a model: `count` places where `seam` met `target`."""

    seam: str
    target: str
    status: str  # swapped, already (by an earlier call), fits (a probe binds nothing), left
    detail: str = ""
    count: int = 1


class Report:
    """Returned by `patch`. Print it; `undo()` takes the model back; `as_dict()` for programs."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._found: Counter[Row] = Counter()
        self.ledger = Ledger()
        # part of the model -> bytes that its latest training forward did not keep
        self.rebuilt: dict[str, int] = {}

    def add(self, seam: str, target: str, status: str, detail: str = "") -> None:
        """Count one place."""
        self._found[Row(seam, target, status, detail)] += 1

    @property
    def rows(self) -> list[Row]:
        """One row for every kind of place."""
        return [Row(r.seam, r.target, r.status, r.detail, n) for r, n in self._found.items()]

    def count(self, seam: str, *statuses: str) -> int:
        """How many places of a seam have one of `statuses` (default: swapped)."""
        wanted = statuses or (SWAPPED,)
        return sum(row.count for row in self.rows if row.seam == seam and row.status in wanted)

    def undo(self) -> None:
        """Put back everything this call replaced. Doing it twice changes nothing."""
        kept = self.ledger.undo()
        if kept:
            warnings.warn(
                f"Not undone, because another library has replaced them since: {', '.join(kept)}.",
                stacklevel=2,
            )

    def as_dict(self) -> dict[str, Any]:
        """`{"model": ..., "rows": [{"seam", "target", "status", "detail", "count"}, ...], "rebuilt_bytes": ...}`."""
        rows = [asdict(row) for row in self.rows]
        return {"model": self.subject, "rows": rows, "rebuilt_bytes": sum(self.rebuilt.values())}

    def __str__(self) -> str:
        lines = [("seam", "target", "count", "status", "detail")]
        lines += [(r.seam, r.target, str(r.count), r.status, r.detail) for r in self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        table = [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[4]]).rstrip()
            for line in lines
        ]
        if self.rebuilt:
            size = sum(self.rebuilt.values()) / _env.MIB
            what = "activations a step rebuilt instead of kept"
            table.append(f"rematerialise: {size:,.2f} MiB of {what}")
        return "\n".join([f"liger_kernel on {self.subject}", *table])

    def __repr__(self) -> str:
        swapped = sum(row.count for row in self.rows if row.status == SWAPPED)
        left = sum(row.count for row in self.rows if row.status == LEFT)
        return f"<Report: {self.subject}, {swapped} swapped, {left} left>"
