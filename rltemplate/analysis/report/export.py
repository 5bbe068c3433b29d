"""The figures of a report as PNG and SVG, by matplotlib because Plotly needs a browser, and its tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltemplate.analysis.report.experiments import Experiment, code_name
from rltemplate.analysis.report.figures import Chart

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "rltemplate",
    "svg.fonttype": "path",
    "font.size": 7.0,
    "savefig.bbox": "tight",
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_DASHES = {
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "longdash": (0, (9, 2)),
    "longdashdot": (0, (9, 2, 2, 2)),
}


def write_figures(charts: Iterable[Chart], folder: Path) -> None:
    """Write each chart to `folder`, which exists, as `<key>.png` (300 dpi) and `<key>.svg`.

    Equal charts give equal bytes with the same matplotlib. Letters in SVG are outlines, alike in any program.
    """
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        for chart in charts:
            page = _drawn(chart.figure)
            page.savefig(folder / f"{chart.key}.png", dpi=300, metadata={"Software": None})
            page.savefig(folder / f"{chart.key}.svg", metadata={"Date": None, "Creator": None})


def _drawn(figure: Figure) -> Any:
    """The figure by matplotlib, as far as `figures` uses Plotly; panels lie where Plotly has them."""
    from matplotlib.figure import Figure as Page
    from matplotlib.ticker import EngFormatter

    layout = figure.layout
    panels: dict[str, Any] = {}
    page = Page(figsize=(layout.width / 130, layout.height / 130))
    for trace in figure.data:
        number = (trace.xaxis or "x")[1:]
        if number not in panels:
            x, y = layout[f"xaxis{number}"], layout[f"yaxis{number}"]
            place = (x.domain[0], y.domain[0], x.domain[1] - x.domain[0], y.domain[1] - y.domain[0])
            panels[number] = page.add_axes(place, sharey=panels[""] if y.matches else None)
            panels[number].set(xlabel=x.title.text, ylabel=_plain(y.title.text))
            panels[number].tick_params(labelleft=not y.matches, labelsize=5 if x.tickfont.size else 7)
            if x.type != "category":
                panels[number].xaxis.set_major_formatter(EngFormatter(sep=""))
        _draw(panels[number], trace)
    for shape in layout.shapes:
        panel = panels[shape.xref.removesuffix(" domain")[1:]]
        if shape.type == "rect":
            panel.axhspan(shape.y0, shape.y1, color=shape.fillcolor, alpha=shape.opacity, linewidth=0)
        else:
            panel.axhline(shape.y0, color=shape.line.color, linestyle=":", linewidth=1)
    for note in layout.annotations:  # titles of panels, and levels
        level = note.xref != "paper"
        transform = panels[""].get_yaxis_transform() if level else page.transFigure
        text: dict[str, Any] = {
            "ha": "left" if level else "center",
            "va": "bottom",
            "fontsize": 6,
            "transform": transform,
        }
        (panels[""] if level else page).text(note.x, note.y, _plain(note.text), **text)
    if panels[""].get_legend_handles_labels()[0]:
        page.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=6, fontsize=6, frameon=False)
    return page


def _draw(panel: Any, trace: Any) -> None:
    if trace.fill:
        panel.fill(trace.x, trace.y, color=trace.fillcolor, alpha=trace.opacity, linewidth=0)
        return
    color = trace.line.color or trace.marker.color
    if trace.error_y.array is not None:
        ends = [trace.error_y.arrayminus, trace.error_y.array]
        panel.errorbar(trace.x, trace.y, yerr=ends, color=color, capsize=3)
    dash: Any = _DASHES.get(trace.line.dash, "-") if "lines" in trace.mode else "none"
    label = "" if trace.showlegend is False else _plain(trace.name)
    look = {
        "linewidth": (trace.line.width or 0) * 0.7,
        "alpha": trace.opacity,
        "label": label,
        "markersize": 3,
    }
    panel.plot(trace.x, trace.y, color=color, linestyle=dash, marker="o" * ("markers" in trace.mode), **look)


def _plain(text: str | None) -> str:
    """Text without HTML's entities, in which matplotlib finds no formula."""
    return unescape(text or "").replace("$", r"\$")


def write_tables(experiments: Sequence[Experiment], folder: Path) -> None:
    """Write `experiments.csv`, a line for each, and `curves.csv`, a line for each return that counts."""
    table: list[tuple[Any, ...]] = [
        ("experiment", "algo", "env", "by", "seeds", "steps", "iqm", "low", "high", "published")
    ]
    curves: list[tuple[Any, ...]] = [
        ("algo", "env", "seed", "env_steps", "eval_return", "run", "commit", "cpu")
    ]
    for each in experiments:
        group = each.group
        if group.runs:
            labels = (group.algo, group.env, group.by, len(group.runs), group.steps)
            published = group.standing.summary if group.standing else ""
            table.append((each.number, *labels, *group.interval(), published))
        for run in group.runs:
            run_facts = (run.id, code_name(run), run.value("machine.cpu"))
            names = (group.algo, group.env, run.config["seed"])
            points = each.metrics.get(run.id, {}).get(group.score, [])
            curves.extend((*names, *point, *run_facts) for point in points)
    for name, rows in (("experiments.csv", table), ("curves.csv", curves)):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
