"""Verdicts of one model class, seam by seam, and the totals of many."""

import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from liger_kernel.coverage import build
from liger_kernel.coverage.families import load

# title -> seams of the patcher's report
SEAMS: dict[str, tuple[str, ...]] = {
    "norm": ("rms_norm", "layer_norm"),
    "gated norm": ("gated_norm",),
    "RoPE": ("rope",),
    "gated MLP": ("gated_mlp",),
    "activation": ("relu_squared",),
    "experts": ("experts",),
    "head + loss": ("head",),
}
HEAD = "head + loss"
ALL, SOME, NONE, ABSENT = "all", "some", "none", "-"
TOLERANCE = 1e-4  # of fp32 gradients


@dataclass
class Family:
    """What became of one model class."""

    name: str
    model_type: str = ""
    skipped: str = ""  # why it is not counted
    unbuilt: str = ""  # why no tiny model could be built
    failed: str = ""  # what the patcher raised
    verdicts: dict[str, str] = field(default_factory=dict)  # title -> ALL, SOME, NONE or ABSENT
    reasons: list[tuple[str, str, str]] = field(
        default_factory=list
    )  # (title, class or function, reason)
    loss: float | None = None  # largest relative difference of the loss, of a gradient
    gradients: float | None = None
    ways: dict[str, float] = field(default_factory=dict)  # other calls -> largest difference
    unchecked: str = ""  # why there is no such difference: it does not run as shipped

    @property
    def built(self) -> bool:
        """Whether there are verdicts."""
        return not (self.skipped or self.unbuilt or self.failed)

    @property
    def wrong(self) -> bool:
        """Whether the patcher failed, or a patched step was compared and differs."""
        if self.failed:
            return True
        differences = (self.loss or 0.0, self.gradients or 0.0, *self.ways.values())
        return not all(difference <= TOLERANCE for difference in differences)  # NaN differs

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without what is empty."""
        return {k: v for k, v in asdict(self).items() if v not in ("", None, [], {})}


def examine(name: str, check: bool) -> Family:
    """Build one class tiny, ask the patcher about it and, if `check`, compare a training step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # default configs warn about themselves
        return _examine(name, check)


def _examine(name: str, check: bool) -> Family:
    family = Family(name)
    try:
        cls, family.skipped = load(name)
        if family.skipped:
            return family
        family.model_type = cls.config_class.model_type
        model = build.tiny(cls)
    except Exception as error:  # any of three hundred files and constructors
        family.unbuilt = _one_line(error)
        return family
    try:
        _judge(family, model)
        if check:
            _compare(family, model)
    except Exception as error:  # a bug of ours
        family.failed = _one_line(error)
    return family


def _judge(family: Family, model: Any) -> None:
    """Fill in what the patcher says."""
    from liger_kernel.coverage.unseen import add_unseen
    from liger_kernel.transformers.patch import probe_model

    report = probe_model(model)
    add_unseen(model, report)
    for title, seams in SEAMS.items():
        rows = [row for row in report.rows if row.seam in seams]
        left = [row for row in rows if row.status == "left"]
        if title == HEAD and left and not build.has_head(model):
            rows = left = []  # a loss of another kind
        family.verdicts[title] = _verdict(len(rows), len(left))
        family.reasons += [(title, row.target, row.detail) for row in left]


def _compare(family: Family, model: Any) -> None:
    """Fill in what training steps and an evaluation say."""
    found = build.plain_step(model)
    if isinstance(found, str):
        family.unchecked = found
        return
    family.loss, family.gradients, logits_built = build.differences(model, *found)
    inputs = found[0]
    for name, given in build.ways(model, inputs):
        plain = build.step_as_shipped(model, given)
        if plain is not None:
            loss, gradients, _ = build.differences(model, given, plain)
            family.ways[name] = max(loss, gradients)
    difference = build.evaluation_difference(model, inputs)
    if difference is not None:
        family.ways["evaluation"] = difference
    if logits_built and family.verdicts[HEAD] == ALL:
        family.verdicts[HEAD] = NONE
        reason = "it does more with its logits than a loss, so they are built"
        family.reasons.append((HEAD, family.name, reason))


def _verdict(rows: int, left: int) -> str:
    if not rows:
        return ABSENT
    return NONE if left == rows else SOME if left else ALL


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]


def totals(families: list[Family]) -> dict[str, Counter[str]]:
    """Title -> how many of the classes that could be built have each verdict."""
    built = [family for family in families if family.built]
    return {title: Counter(family.verdicts[title] for family in built) for title in SEAMS}
