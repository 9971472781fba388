"""The matrix as text for a terminal and as the page `docs/models.md`."""

from collections import Counter, defaultdict

import torch

from liger_kernel import _packages
from liger_kernel.coverage.matrix import ABSENT, ALL, NONE, SEAMS, SOME, TOLERANCE, Family, totals

_INTRO = """# Models

Every `*ForCausalLM`, `*ForConditionalGeneration` and `*LMHeadModel` class of transformers {transformers}, built tiny
from its default config, and what `liger_kernel.patch` does with it. Written by

```
liger-kernel models {check}--markdown docs/models.md
```

with torch {torch}. `all`: every place of that kind is fused; `some`: not all of them, the reasons stand below; `none`:
no place; `-`: the model has no such part. Places in vision and audio towers count like those of the text model.
{checked}"""
_CHECKED = """`step`: the largest relative difference of a patched training step from a plain one, loss and gradient of
each parameter, in fp32; `not run`: the class takes no step on text, pictures or sounds made up for it, see below.
Further steps, of the classes that take them as shipped, and their largest difference:

{ways}
"""


def text(families: list[Family]) -> str:
    """A line for each class, the reasons of what is left, and the totals."""
    cells = [_cells(family) for family in families if not family.skipped]
    cells.insert(0, ["class", *SEAMS, "step"])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    ]
    notes = [
        f"{title}, {target}: {reason} ({where})"
        for title, target, reason, where in _reasons(families)
    ]
    skipped = [f"{family.name}: {family.skipped}" for family in families if family.skipped]
    blocks = [
        lines,
        _paragraph("Left:", notes),
        _paragraph("Not counted:", skipped),
        _totals(families),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def markdown(families: list[Family]) -> str:
    """The page of the documentation."""
    checked = any(family.built and _step(family) != ABSENT for family in families)
    head = _INTRO.format(
        transformers=_packages.version_of("transformers"),
        torch=torch.__version__.partition("+")[0],
        check="--check " if checked else "",
        checked=_CHECKED.format(ways="\n".join(_ways(families))) if checked else "",
    ).rstrip()
    rows = [_row(["", "classes that have it", ALL, SOME, NONE, "share of all", "of all and some"])]
    rows += [_row(["---"] * 7)]
    rows += [_row([title, *map(str, numbers)]) for title, *numbers in _shares(families)]
    table = [_row(["class", "model type", *SEAMS, "step"]), _row(["---"] * (len(SEAMS) + 3))]
    for family in families:
        if not family.skipped:
            name, *rest = _cells(family)
            table.append(_row([f"`{name}`", family.model_type, *rest]))
    reasons = [
        f"* {title}, `{target}`: {reason} ({where})"
        for title, target, reason, where in _reasons(families)
    ]
    unrun = [f"* `{f.name}`: {f.unchecked}" for f in families if f.unchecked]
    unbuilt = [f"* `{f.name}`: {f.unbuilt}" for f in families if f.unbuilt]
    failed = [f"* `{f.name}`: {f.failed}" for f in families if f.failed]
    skipped = [f"* `{f.name}`: {f.skipped}" for f in families if f.skipped]
    parts = [
        [head], rows, ["## Classes", "", *table], ["## What is left, and why", "", *reasons],
        _section("Could not be patched", failed), _section("Take no step on made-up inputs", unrun),
        _section("Could not be built", unbuilt), _section("Not counted", skipped),
    ]  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _ways(families: list[Family]) -> list[str]:
    """A table of the other calls: how many classes were compared, how far they are off."""
    names = dict.fromkeys(name for family in families for name in family.ways)
    rows = [_row(["", "classes", "difference"]), _row(["---"] * 3)]
    for name in names:
        found = [family.ways[name] for family in families if name in family.ways]
        rows.append(_row([name, str(len(found)), f"{max(found):.0e}"]))
    return rows


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *lines] if lines else []


def _paragraph(title: str, lines: list[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)] if lines else []


def _cells(family: Family) -> list[str]:
    if not family.built:
        return [family.name, *["?"] * len(SEAMS), "FAILED" if family.failed else "?"]
    return [family.name, *(family.verdicts[title] for title in SEAMS), _step(family)]


def _step(family: Family) -> str:
    if family.unchecked:
        return "not run"
    if family.loss is None or family.gradients is None:
        return ABSENT
    if family.wrong:
        return f"WRONG {max(family.loss, family.gradients, *family.ways.values()):.0e}"
    return f"{max(family.loss, family.gradients):.0e}"


def _reasons(families: list[Family]) -> list[tuple[str, str, str, str]]:
    """(title, class or function, reason, the model classes), by title."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for family in families:
        for reason in family.reasons:
            found[reason].append(family.name)
    order = list(SEAMS)
    by_seam = sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    return [(*reason, ", ".join(names)) for reason, names in by_seam]


def _shares(families: list[Family]) -> list[tuple[str, int, int, int, int, str, str]]:
    """(title, classes that have it, all, some, none, share with all, share with all or some)."""
    lines = []
    for title, counts in totals(families).items():
        have = counts[ALL] + counts[SOME] + counts[NONE]
        if have:
            whole = f"{counts[ALL] / have:.1%}"
            partly = f"{(counts[ALL] + counts[SOME]) / have:.1%}"
            lines.append((title, have, counts[ALL], counts[SOME], counts[NONE], whole, partly))
    return lines


def _totals(families: list[Family]) -> list[str]:
    built = [family for family in families if family.built]
    unbuilt = [family for family in families if family.unbuilt]
    lines = [f"{len(built)} classes; shares are of those that have the part."]
    lines += [
        f"  {title:12}{have:4} have it   all {whole:>6}   at least some {partly:>6}"
        for title, have, _, _, _, whole, partly in _shares(families)
    ]
    if unbuilt:
        lines.append(f"{len(unbuilt)} could not be built:")
        lines += [f"  {family.name}: {family.unbuilt}" for family in unbuilt]
    lines += [f"PATCHING FAILED, {f.name}: {f.failed}" for f in families if f.failed]
    compared = [family for family in built if family.loss is not None]
    if compared:
        wrong = [family.name for family in compared if family.wrong]
        lines.append(
            f"{len(compared)} training steps compared, {len(wrong)} differ by more than {TOLERANCE:g}"
            f"{': ' + ', '.join(wrong) if wrong else '.'}"
        )
        counts = Counter(name for family in compared for name in family.ways)
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        lines.append(f"compared likewise: {told}.")
    return lines
