"""The largest batch or sequence whose step fits."""

from collections.abc import Callable

_TRIES = 8


def largest(peak: Callable[[int], int], limit: int, start: int, unit: int = 1) -> int:
    """The largest multiple of `unit` with peak(n) <= limit, 0 if there is none.

    peak grows with n, about linearly, and each call costs a step: a line through two known points says
    where to look next, and the interval between what fits and what does not closes around the answer.
    """
    fits, fails = 0, 0  # the largest n known to fit, the smallest known not to
    known: dict[int, int] = {}
    n = max(start // unit, 1) * unit
    for _ in range(_TRIES):
        known[n] = peak(n)
        if known[n] <= limit:
            fits = max(fits, n)
        else:
            fails = min(fails or n, n)
        if fails and fails - fits <= unit:
            break
        n = _next(known, limit, n, unit)
        n = max(n, fits + unit)
        if fails:
            n = min(n, fails - unit)
    return fits


def _next(known: dict[int, int], limit: int, n: int, unit: int) -> int:
    """Where the line through the two points nearest to the limit meets it."""
    if len(known) < 2:
        return 2 * n if known[n] <= limit else max(n // (2 * unit), 1) * unit
    a, b = sorted(known, key=lambda x: abs(known[x] - limit))[:2]
    slope = (known[b] - known[a]) / (b - a)
    return int((a + (limit - known[a]) / max(slope, 1e-9)) // unit) * unit
