"""The one tolerance policy.

A result is judged against float64, beside eager PyTorch in the same dtype:

    error(result) <= 2 * error(eager) + ulps * ulp(dtype at the tensor's scale) + floor

in the maximum norm and in the Frobenius norm. `ulps` is 1, or 3 for 16-bit results under Triton's
interpreter, which truncates where hardware rounds to nearest. `floor` is a few fp32 roundings at
the scale of the largest tensor of the case, for results that are small because large ones cancel.
No op has a tolerance of its own.

Where a result is a handful of numbers, eager's may be right by luck. So a case may be drawn several
times; then all three terms are root mean squares over the draws (`pooled`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_kernel import _env

_FLOOR = 8 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the truth, how far eager is, and how much farther than twice that it may be."""

    name: str
    error: float
    eager: float
    room: float
    norm: str

    @property
    def bound(self) -> float:
        return 2 * self.eager + self.room

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # False for NaN

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.norm} error {self.error:.3e} against float64, "
            f"eager {self.eager:.3e}, allowed {self.bound:.3e}"
        )


def judge(
    name: str, result: Tensor, eager: Tensor, truth: Tensor, scale: float = 0.0
) -> list[Verdict]:
    """Verdicts for one tensor; `scale` is the largest absolute value of the whole case."""
    if result.shape != truth.shape:
        raise AssertionError(f"{name}: shape {list(result.shape)}, expected {list(truth.shape)}.")
    if result.numel() == 0:
        return []
    finite = torch.isfinite(truth)
    wide = result.double()
    if not torch.equal(wide[~finite].nan_to_num(), truth[~finite].nan_to_num()):
        raise AssertionError(f"{name}: the non-finite entries differ from float64's.")
    truth, wide, rival = truth[finite], wide[finite], eager.double()[finite]
    if truth.numel() == 0:
        return []
    ulps = 3 if _env.interpreting() and result.element_size() == 2 else 1
    eps = torch.finfo(result.dtype).eps if result.is_floating_point() else 0.0
    off, rival_off = wide - truth, (rival - truth).nan_to_num()
    peak = truth.abs().max().item()
    room = ulps * eps * 2.0 ** math.floor(math.log2(peak)) if peak > 0 else 0.0
    top = Verdict(
        name,
        off.abs().max().item(),
        rival_off.abs().max().item(),
        room + _FLOOR * scale,
        "maximum",
    )
    spread = math.sqrt(truth.numel())
    mass = Verdict(
        name,
        off.norm().item(),
        rival_off.norm().item(),
        ulps * eps * truth.norm().item() + _FLOOR * scale * spread,
        "Frobenius",
    )
    return [top, mass]


def verdicts(
    results: dict[str, Tensor], eager: dict[str, Tensor], truth: dict[str, Tensor]
) -> list[Verdict]:
    """Of every tensor of a case."""
    finite = [t[torch.isfinite(t)] for t in truth.values()]
    scale = max((t.abs().max().item() for t in finite if t.numel()), default=0.0)
    return [v for k in truth for v in judge(k, results[k], eager[k], truth[k], scale)]


def pooled(draws: Sequence[Sequence[Verdict]]) -> list[Verdict]:
    """Of several draws of a case, which have the same tensors."""

    def mean(found: Sequence[Verdict], field: str) -> float:
        return math.sqrt(sum(getattr(v, field) ** 2 for v in found) / len(found))

    alike: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in (v for draw in draws for v in draw):
        alike.setdefault((verdict.name, verdict.norm), []).append(verdict)
    return [
        Verdict(name, mean(found, "error"), mean(found, "eager"), mean(found, "room"), norm)
        for (name, norm), found in alike.items()
    ]


def demand(found: Sequence[Verdict]) -> None:
    """AssertionError that lists what is out of bounds."""
    bad = [str(v) for v in found if not v.ok]
    if bad:
        raise AssertionError("\n".join(bad))


def assert_close_to_truth(
    results: dict[str, Tensor], eager: dict[str, Tensor], truth: dict[str, Tensor]
) -> None:
    """Judge every tensor of a case; AssertionError lists those out of bounds."""
    demand(verdicts(results, eager, truth))
