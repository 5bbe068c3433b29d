"""The figures of a report, made once with Plotly: the page shows them, `export` writes them as PNG and SVG.

Colours are those of Okabe and Ito (2008, Color Universal Design), which people with any common colour
blindness tell apart; experiments in one figure also differ in their dashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from rltemplate.analysis.report.experiments import Experiment, Points
from rltemplate.analysis.targets import show
from rltemplate.run import paths

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")
_GREY = "#5c6570"
_THICK = 2.5
_MOST_POINTS = 200  # of one line
_MOST_PANELS = 24


class Chart(NamedTuple):
    """A figure, with a name for files and a caption."""

    key: str
    caption: str
    figure: Figure

    @property
    def summary(self) -> str:
        """The caption and the last values of thick lines, for people who do not see the figure."""
        thick = [trace for trace in self.figure.data if trace.line.width == _THICK]
        return "; ".join([self.caption, *(f"{line.name} ends at {show(line.y[-1])}" for line in thick)])


def of_experiment(experiment: Experiment) -> Iterator[Chart]:
    """The returns of an experiment, and all other metrics that its runs logged."""
    group = experiment.group
    figure = _returns(group.score, "seed")
    figure.add_traces(list(_seeds(experiment, group.score)), rows=1, cols=1)
    if len(group.runs) > 1:
        _add_middle(figure, experiment, 0, f"IQM of {len(group.runs)} seeds", "IQM")
    for run, value in zip(group.runs, group.returns, strict=True):
        _add_value(figure, str(run.config["seed"]), value, COLORS[0], size=7, opacity=0.6)
    _add_levels(figure, [experiment])
    yield Chart(experiment.key, f"{group.score} of {experiment.title}", figure)
    names = sorted({name for columns in experiment.metrics.values() for name in columns} - {group.score})
    if names:
        grid = _grid(names, lambda name: _seeds(experiment, name))
        yield Chart(f"{experiment.key}-metrics", f"All that was logged: {experiment.title}", grid)


def overview(experiments: Sequence[Experiment]) -> Iterator[Chart]:
    """The learning curves of all experiments, a panel for each."""
    shown = {f"{each.name}, {each.group.env}": each for each in experiments if each.curve}

    def traces(title: str) -> Iterator[Any]:
        yield from _seeds(shown[title], shown[title].group.score)
        yield from _middle(shown[title], 0, title)

    titles = list(shown)[:_MOST_PANELS]
    if len(titles) > 1:
        left = f"; {len(shown) - len(titles)} more are left out" if len(shown) > len(titles) else ""
        yield Chart("overview", f"Learning curves, IQM over seeds{left}", _grid(titles, traces))


def by_environment(experiments: Sequence[Experiment]) -> Iterator[Chart]:
    """For each environment with several experiments, their curves and last returns in one figure."""
    kinds: dict[tuple[str, str], list[Experiment]] = {}
    for each in experiments:
        if each.curve:
            kinds.setdefault((each.group.env, each.group.score), []).append(each)
    for (env, score), here in kinds.items():
        shown = here[-len(COLORS) :]
        if len(shown) > 1:
            figure = _returns(score, "experiment")
            for style, each in enumerate(shown):
                _add_middle(figure, each, style, f"{each.name} (n={len(each.group.runs)})", str(each.number))
            _add_levels(figure, shown)
            left = (
                f"; the {len(here) - len(shown)} before them are left out" if len(here) > len(shown) else ""
            )
            caption = f"{env}: {score} of {len(shown)} experiments, IQM over seeds{left}"
            yield Chart(paths.safe_name(f"all-{env}-{score}"), caption, figure)


def _returns(score: str, over: str) -> Figure:
    """Curves over environment steps on the left, last returns on the right, with one axis of returns."""
    from plotly.subplots import make_subplots

    widths = {"column_widths": [0.72, 0.28], "horizontal_spacing": 0.02}
    figure = make_subplots(1, 2, shared_yaxes=True, **widths)
    margin = {"l": 70, "r": 15, "t": 30, "b": 50}
    figure.update_layout(height=380, width=900, margin=margin, template="plotly_white")
    figure.update_layout(legend={"orientation": "h", "y": -0.2})
    figure.update_xaxes(title_text="environment steps", tickformat="~s", row=1, col=1)
    figure.update_xaxes(title_text=f"last return, by {over}", type="category", row=1, col=2)
    figure.update_yaxes(title_text=score, row=1, col=1)
    return figure


def _grid(titles: Sequence[str], traces: Callable[[str], Iterator[Any]]) -> Figure:
    """Small panels, four in a row."""
    from plotly.subplots import make_subplots

    rows = -(-len(titles) // 4)
    spacing = {"vertical_spacing": 0.3 / rows, "horizontal_spacing": 0.06}
    figure = make_subplots(rows, 4, subplot_titles=[_plain(title) for title in titles], **spacing)
    for place, title in enumerate(titles):
        drawn = [trace.update(showlegend=False) for trace in traces(title)]
        figure.add_traces(drawn, rows=place // 4 + 1, cols=place % 4 + 1)
    margin = {"l": 45, "r": 10, "t": 50, "b": 30}
    figure.update_layout(height=190 * rows + 60, width=900, margin=margin, template="plotly_white")
    figure.update_annotations(font_size=11)
    figure.update_xaxes(tickformat="~s", tickfont_size=9, nticks=4)
    figure.update_yaxes(tickformat=".4~g", tickfont_size=9, nticks=4)
    return figure


def _line(points: Points, name: str, color: str, dash: str, width: float) -> Any:
    from plotly.graph_objects import Scatter

    steps, values = zip(*points, strict=True)
    mode = "lines" if len(points) > 1 else "lines+markers"
    hover = f"%{{x:,}} steps: %{{y:.5~g}}<extra>{_plain(name)}</extra>"
    line = {"color": color, "width": width, "dash": dash}
    opacity = 1 if width == _THICK else 0.55
    return Scatter(
        x=steps, y=values, name=_plain(name), mode=mode, line=line, opacity=opacity, hovertemplate=hover
    )


def _seeds(experiment: Experiment, metric: str) -> Iterator[Any]:
    """A thin line for each run that logged the metric; grey and dotted for runs that are in no statistic."""
    for nr, run in enumerate(experiment.runs):
        points = thinned(experiment.metrics.get(run.id, {}).get(metric, []), _MOST_POINTS)
        if points:
            counted = run in experiment.group.runs
            look = (COLORS[nr % len(COLORS)], "solid") if counted else (_GREY, "dot")
            yield _line(points, experiment.run_name(run), *look, 1)


def _middle(experiment: Experiment, style: int, name: str) -> Iterator[Any]:
    """The IQM over seeds, thick, with the band of its interval."""
    from plotly.graph_objects import Scatter

    color, curve = COLORS[style], experiment.curve
    if len(experiment.group.runs) > 1:
        steps = [step for step, _ in curve]
        ends = [each.high for _, each in curve] + [each.low for _, each in reversed(curve)]
        fill = {"fill": "toself", "fillcolor": color, "opacity": 0.16, "line_width": 0}
        yield Scatter(x=steps + steps[::-1], y=ends, hoverinfo="skip", showlegend=False, **fill)
    yield _line([(step, each.value) for step, each in curve], name, color, DASHES[style], _THICK)


def _add_middle(figure: Figure, experiment: Experiment, style: int, name: str, place: str) -> None:
    """The IQM as a curve on the left, and its last interval on the right."""
    if experiment.curve:
        figure.add_traces(list(_middle(experiment, style, name)), rows=1, cols=1)
    value, low, high = experiment.group.interval()
    ends = {"symmetric": False, "array": [high - value], "arrayminus": [value - low]}
    _add_value(figure, place, value, COLORS[style], error_y=ends, size=11)


def _add_value(figure: Figure, place: str, value: float, color: str, size: int, **look: Any) -> None:
    hover, marker = "%{x}: %{y:.6~g}<extra></extra>", {"color": color, "size": size}
    look |= {"mode": "markers", "marker": marker, "hovertemplate": hover, "showlegend": False}
    figure.add_scatter(x=[place], y=[value], row=1, col=2, **look)


def _add_levels(figure: Figure, experiments: Sequence[Experiment]) -> None:
    """The range of published returns at as many steps as a band, and the random policy as a dotted line."""
    found = {each.group.algo: each.group.standing for each in experiments if each.group.runs}
    levels = {}
    for algo, standing in found.items():
        if standing is not None and standing.published and standing.same_steps:
            low, high = min(standing.returns), max(standing.returns)
            figure.add_hrect(low, high, fillcolor=_GREY, opacity=0.13, line_width=0, layer="below")
            levels[f"published, {algo.upper()}"] = high
        if standing is not None and standing.random is not None:
            levels["random policy"] = standing.random
    if "random policy" in levels:
        figure.add_hline(levels["random policy"], line={"color": _GREY, "dash": "dot", "width": 1.2})
    place = {"x": 0, "xref": "x domain", "xanchor": "left", "yref": "y", "yanchor": "bottom"}
    for text, value in levels.items():
        figure.add_annotation(text=text, y=value, showarrow=False, font_size=10, font_color=_GREY, **place)


def _plain(text: str) -> str:
    """Text in which Plotly finds no HTML."""
    return escape("".join(letter if letter.isprintable() else " " for letter in text), quote=False)


def thinned(points: Points, most: int) -> Points:
    """At most `most` points of a curve: both ends, and of each part the smallest and the largest value."""
    count, parts = len(points), max(1, (most - 2) // 2)
    if count <= most:
        return points
    kept = {0, count - 1}
    for part in range(parts):
        here = range(part * count // parts, (part + 1) * count // parts)
        kept |= {min(here, key=lambda i: points[i][1]), max(here, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]
