"""What a figure shows, apart from how it is drawn, and its drawing for papers as PNG and SVG.

The page of `report/` draws the same charts in the browser. Colours are those of Okabe and Ito (2008, Color
Universal Design), which people with any common colour blindness tell apart; each also has a dash pattern, a
marker and a name beside its line, so that a figure can be read in print without colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue, vermilion, bluish green, reddish purple, orange, sky blue, black; yellow is too pale for white paper.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# Six patterns and seven colours and five markers: a pair of them repeats after 42 lines.
DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (5, 1.5, 1.2, 1.5)),
    (0, (9, 2)),
    (0, (9, 2, 2, 2)),
)
MARKERS = ("o", "s", "D", "^", "v")
_FEW_POINTS = 30  # of a line, so that each may have a marker
_MM = 1 / 25.4
_WIDTH, _HEIGHT = 120 * _MM, 74 * _MM
_DPI = 300


class Reference(NamedTuple):
    """A level that a curve is measured against, such as the return of a random policy."""

    value: float
    text: str


@dataclass(frozen=True)
class Line:
    """One curve, over environment steps unless its chart says otherwise.

    `low` and `high`, if given, are the ends of its interval. `style` chooses colour, dashes and marker. A
    line that is not `main` stays in the background. `label` is written beside its last point.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    style: int
    label: str = ""
    main: bool = False
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Dot:
    """One run's single value."""

    name: str
    value: float
    style: int


@dataclass(frozen=True)
class Chart:
    """Lines over `over`, or, with `dots`, single values side by side.

    `key` names its files, `caption` says in a page that has said the rest what it is. `summary` says in a
    sentence what is to be seen, for those who do not see it.
    `middle` is an interval over the dots: its name, value, low and high end.
    """

    key: str
    title: str
    caption: str
    value_label: str
    summary: str
    lines: Sequence[Line] = ()
    dots: Sequence[Dot] = ()
    middle: tuple[str, float, float, float] | None = None
    references: Sequence[Reference] = field(default=())
    over: str = "environment steps"


def write_figures(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Draw each chart into `folder`, which exists, as `<key>.png` (300 dpi) and `<key>.svg`.

    The same charts give the same bytes with the same matplotlib. Letters in SVG are outlines, so that they
    look alike in any program, with or without the font.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written: list[Path] = []
    with mpl.rc_context({"svg.hashsalt": "rltemplate", "svg.fonttype": "path", "font.size": 8.0}):
        for chart in charts:
            figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
            FigureCanvasAgg(figure)
            _draw(figure, chart)
            for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
                path = folder / f"{chart.key}.{suffix}"
                figure.savefig(path, dpi=_DPI, metadata=metadata)
                written.append(path)
    return written


def _draw(figure: Figure, chart: Chart) -> None:
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(_plain(chart.title), fontsize=9, loc="left", wrap=True)
    if chart.dots:
        _draw_dots(axis, chart)
    else:
        _draw_lines(axis, chart)


def _draw_lines(axis: Axes, chart: Chart) -> None:
    from matplotlib.ticker import EngFormatter

    for line in chart.lines:
        color = COLORS[line.style % len(COLORS)]
        dashes = DASHES[line.style % len(DASHES)]
        marker = MARKERS[line.style % len(MARKERS)] if line.main and len(line.steps) <= _FEW_POINTS else ""
        look: dict[str, Any] = (
            {"linewidth": 1.6, "zorder": 3.0} if line.main else {"linewidth": 0.7, "alpha": 0.75}
        )
        axis.plot(line.steps, line.values, color=color, linestyle=dashes, marker=marker, markersize=3, **look)
        if line.low:
            axis.fill_between(line.steps, line.low, line.high, color=color, alpha=0.18, linewidth=0)
    for reference in chart.references:
        axis.axhline(reference.value, color="#555555", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    axis.set_xlabel(_plain(chart.over))
    axis.set_ylabel(_plain(chart.value_label))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.grid(alpha=0.25, linewidth=0.5)
    ends = [
        (line.values[-1], line.label, COLORS[line.style % len(COLORS)]) for line in chart.lines if line.label
    ]
    ends += [(reference.value, reference.text, "#555555") for reference in chart.references]
    low, high = axis.get_ylim()
    for value, (at, text, color) in zip(
        apart([value for value, *_ in ends], (high - low) / 14), ends, strict=True
    ):
        axis.annotate(
            _plain(text),
            xy=(1.0, at),
            xycoords=("axes fraction", "data"),
            xytext=(1.02, value),
            textcoords=("axes fraction", "data"),
            fontsize=7,
            color=color,
            va="center",
            annotation_clip=False,
        )


def _draw_dots(axis: Axes, chart: Chart) -> None:
    rows = len(chart.dots) + (chart.middle is not None)
    names = [dot.name for dot in chart.dots]
    for row, dot in enumerate(chart.dots):
        color, marker = COLORS[dot.style % len(COLORS)], MARKERS[dot.style % len(MARKERS)]
        axis.plot([dot.value], [row], color=color, marker=marker, markersize=5, linestyle="none")
    if chart.middle is not None:
        name, value, low, high = chart.middle
        names.append(name)
        axis.plot([low, high], [rows - 1, rows - 1], color="black", linewidth=1.4)
        axis.plot([value], [rows - 1], color="black", marker="|", markersize=9, linestyle="none")
    for reference in chart.references:
        axis.axvline(reference.value, color="#555555", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        axis.annotate(
            _plain(reference.text),
            xy=(reference.value, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, -2),
            textcoords="offset points",
            fontsize=6,
            color="#555555",
            rotation=90,
            va="top",
        )
    axis.set_yticks(range(rows), [_plain(name) for name in names])
    axis.set_ylim(rows - 0.5, -0.5)
    axis.set_xlabel(_plain(chart.value_label))
    axis.grid(axis="x", alpha=0.25, linewidth=0.5)


def apart(values: Sequence[float], gap: float) -> list[float]:
    """Places near `values`, in the same order, no two closer than `gap`, for names beside lines.

    Values that are closer than that share their mean as the centre of a stack.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    stacks: list[list[int]] = []
    for i in order:
        stacks.append([i])
        while len(stacks) > 1 and _bottom(stacks[-1], values, gap) - _top(stacks[-2], values, gap) < gap:
            last = stacks.pop()
            stacks[-1] += last
    places = [0.0] * len(values)
    for stack in stacks:
        bottom = _bottom(stack, values, gap)
        for nr, i in enumerate(stack):
            places[i] = bottom + nr * gap
    return places


def _bottom(stack: Sequence[int], values: Sequence[float], gap: float) -> float:
    return sum(values[i] for i in stack) / len(stack) - gap * (len(stack) - 1) / 2


def _top(stack: Sequence[int], values: Sequence[float], gap: float) -> float:
    return _bottom(stack, values, gap) + gap * (len(stack) - 1)


def _plain(text: str) -> str:
    """Without what matplotlib would take for mathematics, or cannot draw."""
    return "".join(letter if letter.isprintable() else " " for letter in text).replace("$", r"\$")


def thinned(steps: list[int], values: list[float], most: int) -> tuple[list[int], list[float]]:
    """At most `most` points of a curve, which look like all of them.

    The curve is cut into equal parts by number of points. Of each the smallest and the largest value stay,
    in their order, and so do the first and the last point: a spike of a single point is still to be seen.
    """
    count = len(values)
    if count <= most:
        return steps, values
    kept: list[int] = [0]
    parts = max(1, (most - 2) // 2)
    for part in range(parts):
        begin, end = part * count // parts, (part + 1) * count // parts
        here = values[begin:end]
        kept += (begin + here.index(min(here)), begin + here.index(max(here)))
    kept = sorted({*kept, count - 1})
    return [steps[i] for i in kept], [values[i] for i in kept]
