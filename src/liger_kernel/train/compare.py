"""Do two loss curves agree?  |a - b| / |a| at every step, against one tolerance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Steps count from 1; `step` is the first one that breaks the rule, None if all keep it."""

    tolerance: float
    largest: float
    largest_at: int  # 0 if no step was compared
    step: int | None
    values: tuple[float, float] | None  # the two losses at `step`

    @property
    def agree(self) -> bool:
        """Whether every compared step is finite and within the tolerance."""
        return self.step is None

    def __str__(self) -> str:
        if not self.largest_at:
            return "no step of both runs to compare."
        if self.step is None or self.values is None:
            return f"the curves agree: at most {self.largest:.1e} apart, {self.tolerance:g} is allowed."
        plain, patched = self.values
        if not (math.isfinite(plain) and math.isfinite(patched)):
            return (
                f"a loss is not finite: step {self.step}, plain {plain:.6g}, patched {patched:.6g}."
            )
        return (
            f"the curves disagree: step {self.step}, plain {plain:.6f}, patched {patched:.6f}, "
            f"{_distance(plain, patched):.1e} apart; {self.tolerance:g} is allowed."
        )


def compare(plain: Sequence[float], patched: Sequence[float], tolerance: float) -> Comparison:
    """Compare the steps that both curves have."""
    distances = [_distance(a, b) for a, b in zip(plain, patched, strict=False)]
    largest = max(distances, default=0.0)
    bad = next((i for i, d in enumerate(distances) if not d <= tolerance), None)
    return Comparison(
        tolerance=tolerance,
        largest=largest,
        largest_at=distances.index(largest) + 1 if distances else 0,
        step=None if bad is None else bad + 1,
        values=None if bad is None else (plain[bad], patched[bad]),
    )


def _distance(a: float, b: float) -> float:
    """Relative to the plain loss; infinite when either is not a number."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), 1e-12)
