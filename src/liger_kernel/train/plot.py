"""The picture: both loss curves, both memory bars."""

from pathlib import Path
from typing import Any

from liger_kernel import _env

_INK, _FAINT, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_COLOURS = {"plain": "#a7b1bd", "patched": "#0b7285"}
_STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 10, "text.color": _INK, "axes.labelcolor": _FAINT,
    "axes.edgecolor": _GRID, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.color": _FAINT, "ytick.color": _FAINT, "axes.axisbelow": True, "grid.color": _GRID,
}  # fmt: skip


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw `report` (see `report.build`) into a PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=(2.4, 1))
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12, rect=(0, 0, 1, 0.86))  # type: ignore[union-attr]
        figure.text(0.016, 0.935, _headline(report), fontsize=14, fontweight="bold")
        figure.text(0.016, 0.875, _subtitle(report), fontsize=9.5, color=_FAINT)
        _curves(left, report)
        _bars(right, report)
        figure.savefig(path, dpi=160, facecolor="white")


def _headline(report: dict[str, Any]) -> str:
    plain, patched = (
        report["runs"].get(n, {}).get("peak_memory_bytes") for n in ("plain", "patched")
    )
    compared = report["comparison"]
    if not (plain and patched and report["ended"] == "finished"):
        return "Interrupted" if report["ended"] == "interrupted" else "Broke off"
    losses = "Same loss" if compared["agree"] else "Different loss"
    change = 100 * (1 - patched / plain)
    return f"{losses}, {abs(change):.0f} % {'less' if change >= 0 else 'more'} memory"


def _subtitle(report: dict[str, Any]) -> str:
    s = report["settings"]
    return (
        f"{report['model']['title']} on {report['text']['title']}  ·  {s['batch']} x {s['seq']} tokens a step, "
        f"{s['dtype']}, {s['optimizer']}  ·  {report['machine']['device']}"
    )


def _curves(axes: Any, report: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, run in report["runs"].items():
        if not run["steps"]:
            continue
        under = name == "plain"
        axes.plot(
            range(1, len(run["losses"]) + 1),
            run["losses"],
            color=_COLOURS[name],
            linewidth=6 if under else 1.8,
            solid_capstyle="round",
            label=name,
        )
    axes.set_xlabel("step")
    axes.set_title(_curves_title(report["comparison"]), loc="left", fontsize=10.5, color=_INK)
    axes.grid(axis="y")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=0)
    axes.legend(
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0,
        ncols=2,
        handlelength=1.6,
    )


def _curves_title(compared: dict[str, Any]) -> str:
    if not compared["steps_compared"]:
        return "training loss"
    return f"training loss, at most {compared['largest_relative_difference']:.0e} apart (relative)"


def _bars(axes: Any, report: dict[str, Any]) -> None:
    sizes = {
        n: (run["peak_memory_bytes"] or 0) / _env.MIB
        for n, run in report["runs"].items()
        if run["steps"]
    }
    bars = axes.bar([*sizes], [*sizes.values()], width=0.62, color=[_COLOURS[n] for n in sizes])
    axes.bar_label(
        bars, [f"{v:,.0f} MiB" for v in sizes.values()], padding=4, fontsize=10, fontweight="bold"
    )
    axes.set_title("peak memory above the model", loc="left", fontsize=10.5, color=_INK)
    axes.margins(y=0.12)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0, labelsize=10, labelcolor=_INK)
