"""Which kernel it was: one switched on at a time, and if none does it alone, one switched off at a time.

A bound that is just missed with all kernels, and kept without any one of them, is nobody's fault in particular.
"""

from collections.abc import Callable, Mapping
from typing import Any

from liger_kernel.transformers.patch import patched
from liger_kernel.transformers.patch.report import SWAPPED
from liger_kernel.transformers.patch.seams import ROPE, SEAMS
from liger_kernel.verification.result import Culprit, Row, Rows

_FLAGS: dict[str | None, tuple[str, ...]] = {
    **{seam.name: seam.flags for seam in (*SEAMS, ROPE)},
    "head": ("fused_linear_cross_entropy",),
    "cross_entropy": ("cross_entropy",),
    "rematerialise": ("rematerialise",),
}


def find_culprits(
    model: Any, flags: Mapping[str, bool], report: Any, bad: list[Row], judge: Callable[[], Rows]
) -> list[Culprit]:
    """The kernels to blame, in the order of the report, none if it is not clear; a kernel is the flags that switch it.

    Args:
        model: not patched; `report` is that of `patch(model, **flags)`.
        bad: the rows out of bounds with all of them.
        judge: compares a step of the model as it is now with the plain one.
    """

    def kernel(seam: str | None) -> tuple[str, ...]:
        return tuple(flag for flag in _FLAGS[seam] if flags[flag])

    def worst(on: dict[str, bool]) -> Row | None:
        with patched(model, **on):
            return next(iter(judge().bad), None)

    kernels = dict.fromkeys(kernel(row.seam) for row in report.rows if row.status == SWAPPED)
    found = []
    for mine in kernels:
        alone = worst({flag: flag in mine for flag in flags})
        outputs = [row for row in bad if row.kind == "output" and kernel(row.seam) == mine]
        first = next(iter(outputs), alone)
        if first is not None:
            found.append(Culprit(mine, str(first)))
    if found:
        return found
    # such as rematerialise, which does nothing alone
    for mine in kernels:
        if worst({flag: on and flag not in mine for flag, on in flags.items()}) is None:
            found.append(Culprit(mine, f"with the others on, {bad[0]}"))
    return found if len(found) == 1 else []
