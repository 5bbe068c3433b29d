"""The figures of a report: lines in panels, as data for the page and drawn by matplotlib for files.

Colours are those of Okabe and Ito (2008, Color Universal Design), which people with any common colour
blindness tell apart. Light ones are darker here, to be seen on white as well as on a dark page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

from runlab.analysis.experiments import Experiment, Points, is_usable, points, thinned
from runlab.config.terminal import escaped
from runlab.run import paths
from runlab.run.files import replace_file
from runlab.run.record import SearchRecord
from runlab.run.validation import read_json

COLORS = ("#0072b2", "#d55e00", "#009e73", "#c06a9b", "#b07a00", "#2384bd", "#000000")
GREY = "#5c6570"
_COLUMNS = 4
_MOST_POINTS, _FEWER_POINTS = 200, 100  # of one line, and in small panels; longer ones are thinned evenly
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.ymargin": 0.1,  # room for the name of a level at the top
    "axes.formatter.limits": (-3, 5),  # long numbers would reach into other panels
    "legend.fontsize": 6,
    "figure.subplot.wspace": 0.3,
    "figure.subplot.hspace": 0.45,
    "text.parse_math": False,  # names are text, also with a $ in them
    "svg.hashsalt": "runlab",
    "pdf.fonttype": 42,  # text stays text, which journals ask for
    "savefig.bbox": "tight",
}


class Line(NamedTuple):
    """A curve. A line with a band of low and high ends is drawn thick."""

    name: str
    points: Points
    color: str
    band: list[tuple[float, float]] | None = None
    dots: bool = False


class Panel(NamedTuple):
    """Lines with common axes, and levels: the low and the high end of each range of reference returns."""

    title: str
    lines: list[Line]
    levels: dict[str, tuple[float, float]] = {}
    bars: dict[str, float] = {}
    across: str = "environment steps"  # label of the horizontal axis, if the panel is alone


class Chart(NamedTuple):
    """A figure, with a name for files and a caption."""

    key: str
    caption: str
    panels: list[Panel]


def charts_of(experiments: Sequence[Experiment]) -> dict[int, list[Chart]]:
    """Charts by number of the experiment; number 0 has charts of environments with several experiments."""
    charts: dict[int, list[Chart]] = {0: list(_by_environment(experiments))}
    for each in experiments:
        key = paths.safe_name(f"{each.number:03d}-{each.algo}-{each.env}")
        metrics = sorted({name for run in each.runs for row in run.rows for name in row})
        lines = list(_seeds(each, each.score))
        if len(each.counted) > 1 and each.curve:
            lines.append(_middle(each, "#000000", f"IQM of {len(each.counted)} seeds"))
        first = Chart(key, f"{each.score} of {each.title}", [Panel(each.score, lines, _levels([each]))])
        panels = [
            Panel(name, list(_seeds(each, name, _FEWER_POINTS)))
            for name in metrics
            if name not in (each.score, "env_steps", "wall_time_s")
        ]
        charts[each.number] = [first] if lines else []
        if panels:
            charts[each.number].append(Chart(f"{key}-metrics", f"All metrics of {each.title}", panels))
    return charts


def search_chart(folder: Path) -> Chart:
    """The trials of a search, the best value so far, and how much each key matters."""
    record = read_json(folder / paths.SEARCH, SearchRecord)
    trials = [(each.number, each.value, each.state) for each in record.trials if is_usable(each.value)]
    words = " ".join([f"sweep={record.sweep}", *record.words])
    ended = sorted((number, value) for number, value, state in trials if state == "COMPLETE")
    best_of = min if record.objective.startswith("-") else max
    best = list(accumulate(ended, lambda so_far, trial: (trial[0], best_of(so_far[1], trial[1]))))
    metric = record.objective.removeprefix("-").replace("eval/return", "return")
    pruned = [(number, value) for number, value, state in trials if state == "PRUNED"]
    lines = [
        Line(f"{metric} of a trial", ended, COLORS[0], dots=True),
        Line("pruned", pruned, GREY, dots=True),
        Line("best so far", best, COLORS[1]),
    ]
    title = f"{metric} by trial: dots, the best so far, and grey the pruned ones"
    panels = [Panel(title, [line for line in lines if line.points], across="trial")]
    if record.importances:
        panels.append(Panel("importance", [], bars=record.importances))
    return Chart(paths.safe_name(folder.name), f"Search {words}: {len(record.trials)} trials", panels)


def _by_environment(experiments: Sequence[Experiment]) -> Iterator[Chart]:
    kinds: dict[tuple[str, str], list[Experiment]] = {}
    for each in experiments:
        if each.curve:
            kinds.setdefault((each.env, each.score), []).append(each)
    for (env, score), members in kinds.items():
        shown = members[-len(COLORS) :]
        if len(shown) > 1:
            names = [
                f"{each.number}. {each.algo} {(each.by or 'default')[:80]} (n={len(each.counted)})"
                for each in shown
            ]
            lines = [_middle(*line) for line in zip(shown, COLORS, names, strict=False)]
            caption = f"{env}: {score} of {len(shown)} of {len(members)} experiments, IQM over seeds"
            panel = Panel(score, lines, _levels(shown))
            yield Chart(paths.safe_name(f"all-{env}-{score}"), caption, [panel])


def _seeds(experiment: Experiment, metric: str, most: int = _MOST_POINTS) -> Iterator[Line]:
    """A line for each run that logged the metric, grey for runs that are in no statistic."""
    for number, run in enumerate(experiment.runs):
        curve = thinned(points(run, metric), most)
        if curve:
            name, counted = f"seed {run.config['seed']}", run in experiment.counted
            color = COLORS[number % (len(COLORS) - 1)] if counted else GREY
            yield Line(name if counted else f"{name}, not counted: {run.value('status')}", curve, color)


def _middle(experiment: Experiment, color: str, name: str) -> Line:
    """The IQM over seeds, with its interval, which a single seed does not have."""
    curve = experiment.curve
    band = [(each.low, each.high) for _, each in curve] if len(experiment.counted) > 1 else None
    return Line(name, [(step, each.value) for step, each in curve], color, band)


def _levels(experiments: Sequence[Experiment]) -> dict[str, tuple[float, float]]:
    """Returns of the random policy and the range of published ones at as many steps."""
    levels = {}
    for each in experiments:
        standing = each.standing
        if standing is not None and standing.published:
            after = f" at {each.steps:,} steps" if len({other.steps for other in experiments}) > 1 else ""
            band = min(standing.published), max(standing.published)
            levels[f"published, {each.algo.upper()}{after}"] = band
        if standing is not None and standing.random is not None:
            levels["random policy"] = standing.random, standing.random
    return levels


def _widest(panel: Panel) -> tuple[float, float]:
    """The furthest ends of an axis: wider bands leave the panel, or they would press the curves flat."""
    values = [value for line in panel.lines for _, value in line.points]
    values += [end for ends in panel.levels.values() for end in ends]
    low, high = min(values, default=0.0), max(values, default=0.0)
    room = (high - low) / 2 or 1.0
    return low - room, high + room


def page_data(chart: Chart) -> str:
    """The chart for the script of the page, as JSON in which no tag can begin or end."""
    across: dict[tuple[float, ...], int] = {}  # steps, which lines mostly share, and their place in the list

    def drawn(line: Line, dash: bool = False) -> dict[str, Any]:
        steps, values = zip(*line.points, strict=True)
        band = [[*map(_short, end)] for end in zip(*line.band, strict=True)] if line.band else None
        x, y = across.setdefault(steps, len(across)), [*map(_short, values)]
        look = {"color": line.color, "dots": line.dots, "dash": dash}
        return {"name": escaped(line.name), "x": x, "y": y, "band": band, **look}

    panels = []
    for panel in filter(lambda each: each.lines, chart.panels):
        lines = [*map(drawn, panel.lines)]
        ends = {limit(step for line in panel.lines for step, _ in line.points) for limit in (min, max)}
        for name, (low, high) in panel.levels.items():
            level = Line(name, [(end, high) for end in sorted(ends)], GREY, [(low, high)] * len(ends))
            lines.append(drawn(level, dash=True))
        facts = {"title": escaped(panel.title), "across": panel.across, "widest": _widest(panel)}
        panels.append({**facts, "lines": lines})
    # A browser reads neither NaN nor Infinity, and would then draw none of the charts that follow.
    text = json.dumps({"xs": [*across], "panels": panels}, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _short(value: float) -> float:
    """A number with as many digits as can be seen."""
    return float(f"{value:.5g}")


def write(charts: Iterable[Chart], folder: Path, kinds: Sequence[str] = ("png", "svg", "pdf")) -> list[Path]:
    """Write each chart to `folder`, which exists, as `<key>.png` (300 dpi) and the like; the files.

    Equal charts give equal bytes with the same matplotlib.
    """
    facts = {"png": ["Software"], "svg": ["Date", "Creator"], "pdf": ["CreationDate", "Creator", "Producer"]}
    files = []
    for chart, kind in product(charts, kinds):
        files.append(folder / f"{chart.key}.{kind}")
        options = {"format": kind, "dpi": 300, "metadata": dict.fromkeys(facts[kind])}
        replace_file(files[-1], partial(_save, chart, **options))
    return files


def _save(chart: Chart, file: Any, **options: Any) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    count = len(chart.panels)
    rows, columns = -(-count // _COLUMNS), min(_COLUMNS, count)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 4 if count == 1 else 3 if count == 2 else 1.9 * rows))
        for number, panel in enumerate(chart.panels, start=1):
            axes = figure.add_subplot(rows, columns, number, title=escaped(panel.title))
            (_draw_bars if panel.bars else _draw_lines)(axes, panel)
        if count == 1 and panel.lines:
            axes.set_xlabel(panel.across)
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(file, **options)


def _draw_bars(axes: Any, panel: Panel) -> None:
    axes.barh([*map(escaped, panel.bars)][::-1], [*panel.bars.values()][::-1], color=COLORS[0])
    axes.tick_params(axis="y", labelsize=6)


def _draw_lines(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    if all(float(x).is_integer() for line in panel.lines for x, _ in line.points):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    for name, (low, high) in panel.levels.items():
        axes.axhspan(low, high, color=GREY, alpha=0.15, lw=0)
        axes.axhline(high, color=GREY, lw=0.6, ls="--")
        across = axes.get_yaxis_transform()
        axes.text(0.02, high, escaped(name), fontsize=6, va="bottom", transform=across)
    for line in panel.lines:
        steps, values = zip(*line.points, strict=True)
        if line.band:
            axes.fill_between(steps, *zip(*line.band, strict=True), color=line.color, alpha=0.16, lw=0)
        style: dict[str, Any] = {"ls": "", "ms": 4} if line.dots else {}
        style |= {"lw": 1.8 if line.band else 0.7, "marker": "o" if line.dots or len(steps) == 1 else ""}
        axes.plot(steps, values, color=line.color, label=escaped(line.name), **style)
    (low, high), (lowest, highest) = axes.get_ylim(), _widest(panel)
    axes.set_ylim(max(low, lowest), min(high, highest))
