"""The charts of an experiment, and of several in one environment. Statistics come from `analysis.stats`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from rltemplate.analysis import stats, targets
from rltemplate.analysis.figures import Chart, Dot, Line, Reference, thinned
from rltemplate.analysis.report.experiments import Experiment, Points
from rltemplate.analysis.runs import Run
from rltemplate.run import paths

MOST_POINTS = 500  # of a large chart's line, about one for each pixel of a phone and two of a column of text
MOST_SMALL = 200  # of a small chart's
_MOST_INTERVALS = 100  # along a curve; each is a bootstrap
_MOST_TOGETHER = 7  # experiments in one chart, as many as there are colours
_THRESHOLDS = 60  # of a performance profile
MIDDLE = "IQM"  # interquartile mean
_FIRST = ("episode/return", "eval/length", "episode/length", "policy/entropy")
_NOT_DRAWN = ("wall_time_s",)


class Middle(NamedTuple):
    """The middle of the seeds along a curve: steps, and the statistic with the ends of its interval."""

    steps: list[int]
    values: list[float]
    low: list[float]
    high: list[float]
    seeds: list[int]


def middle_of(experiment: Experiment) -> Middle | None:
    """The middle of the counted seeds at the steps that they share; None if no seed has a score."""
    per_seed = [
        list(zip(*experiment.metrics[run.dir][experiment.score], strict=True))
        for run, _, _ in experiment.finals()
    ]
    if not per_seed:
        return None
    shared = sorted(set.intersection(*({step for step, _ in points} for points in per_seed)))
    if len(shared) > _MOST_INTERVALS:
        last = len(shared) - 1
        shared = [shared[i * last // (_MOST_INTERVALS - 1)] for i in range(_MOST_INTERVALS)]
    chosen = set(shared)
    points = [[point for point in each if point[0] in chosen] for each in per_seed]
    found = stats.curve(points, statistic="iqm")
    if not found or (len(points) > 1 and not all(isfinite(sum(each)) for _, each, _ in found)):
        return None  # no step that all share, or returns whose spread no number can hold
    return Middle(
        [step for step, _, _ in found],
        [each.value for _, each, _ in found],
        [each.low for _, each, _ in found],
        [each.high for _, each, _ in found],
        [count for _, _, count in found],
    )


def standing_of(experiment: Experiment) -> targets.Standing | None:
    """How the middle of the last scores stands against published and random returns; None if nobody knows."""
    finals = experiment.finals()
    if not finals or experiment.score != "eval/return":
        return None
    value = stats.interval([value for _, _, value in finals], statistic="iqm").value
    return targets.standing_of(finals[0][0].config, max(steps for _, steps, _ in finals), value)


def references_of(experiment: Experiment) -> list[Reference]:
    """The levels of a random policy, and of the lowest and highest published return of the algorithm."""
    standing = standing_of(experiment)
    if standing is None:
        return []
    levels = [("random policy", standing.random)]
    if standing.same_steps:  # returns at another number of steps say nothing about these
        levels += [("published, lowest", standing.floor), ("published, highest", standing.top)]
    if standing.same_steps and standing.floor == standing.top:
        levels[1:] = [("published", standing.floor)]
    return [Reference(float(value), name) for name, value in levels if value is not None]


def learning_curve(experiment: Experiment, middle: Middle | None) -> Chart | None:
    """Every seed thin, and where several have finished their middle thick, with its interval.

    None if no run has logged a return.
    """
    lines = []
    for style, run in enumerate(experiment.runs):
        points = experiment.metrics.get(run.dir, {}).get(experiment.score)
        if points is not None:
            steps, values = thinned(*points, MOST_POINTS)
            label = "" if len(experiment.counted) > 1 else name_of(run, experiment)
            lines.append(Line(name_of(run, experiment), steps, values, style + 1, label))
    seeds = len(experiment.finals())
    if middle is not None and seeds > 1:
        name = f"{MIDDLE} of {seeds} seeds"
        lines.append(Line(name, middle.steps, middle.values, 0, name, True, middle.low, middle.high))
    if not lines:
        return None
    return Chart(
        f"{experiment.key}-curve",
        experiment.title,
        f"{experiment.score} over environment steps",
        experiment.score,
        _curve_summary(experiment, middle),
        lines=lines,
        references=references_of(experiment),
    )


def _curve_summary(experiment: Experiment, middle: Middle | None) -> str:
    what = f"{experiment.score} of {experiment.title} over environment steps"
    seeds = len(experiment.finals())
    if middle is None:
        return f"{what}. No run of it has finished."
    step, value = middle.steps[-1], middle.values[-1]
    if seeds == 1:
        return f"{what}, 1 seed. It ends at {number(value)} after {step:,} steps."
    return (
        f"{what}. The interquartile mean of {seeds} seeds goes from {number(middle.values[0])} after "
        f"{middle.steps[0]:,} steps to {number(value)} after {step:,}; "
        f"interval {number(middle.low[-1])} to {number(middle.high[-1])}."
    )


def spread(experiment: Experiment) -> Chart | None:
    """Each seed's last score, and the interval of their middle; None without any."""
    finals = experiment.finals()
    if not finals:
        return None
    dots = [
        Dot(f"seed {run.config['seed']}", value, experiment.runs.index(run) + 1) for run, _, value in finals
    ]
    middle = None
    if len(finals) > 1:
        interval = stats.interval([value for _, _, value in finals], statistic="iqm")
        if isfinite(sum(interval)):
            middle = (MIDDLE, *interval)
    values = sorted(value for _, _, value in finals)
    summary = (
        f"Last {experiment.score} of each of {len(finals)} seeds, "
        f"from {number(values[0])} to {number(values[-1])}."
    )
    title = f"{experiment.title}: each seed"
    # Lines far away would press the seeds together, which are what this chart is about.
    low, high = values[0], values[-1]
    reach = max(high - low, 0.05 * max(abs(low), abs(high))) * 2
    near = [each for each in references_of(experiment) if low - reach <= each.value <= high + reach]
    caption = f"last {experiment.score} of each seed"
    return Chart(
        f"{experiment.key}-seeds", title, caption, f"last {experiment.score}", summary, (), dots, middle, near
    )


def metric_charts(experiment: Experiment) -> Iterator[Chart]:
    """A chart of each metric that the runs have logged, but for the score, which has its own."""
    names = {name for columns in experiment.metrics.values() for name in columns}
    names -= {experiment.score, *_NOT_DRAWN}
    order = {name: place for place, name in enumerate(_FIRST)}
    for name in sorted(names, key=lambda name: (order.get(name, len(_FIRST)), name)):
        lines = []
        for style, run in enumerate(experiment.runs):
            points: Points | None = experiment.metrics.get(run.dir, {}).get(name)
            if points is not None:
                steps, values = thinned(*points, MOST_SMALL)
                lines.append(
                    Line(name_of(run, experiment), steps, values, style + 1, _short_name(run, experiment))
                )
        ends = sorted(line.values[-1] for line in lines)
        said = f"{len(lines)} run{'s' * (len(lines) > 1)}"
        summary = f"{name} of {said}; it ends at {number(ends[0])}"
        summary += "." if len(ends) == 1 else f" to {number(ends[-1])}."
        title = f"{experiment.title}: {name}"
        key = f"{experiment.key}-{paths.safe_name(name)}"
        yield Chart(key, title, name, name, summary, lines=lines)


def comparisons(experiments: Sequence[Experiment], middles: dict[int, Middle | None]) -> Iterator[Chart]:
    """For each environment with several experiments that have scores, their middles in one chart."""
    by_env: dict[tuple[str, str], list[Experiment]] = defaultdict(list)
    for each in experiments:
        if middles.get(each.number) is not None:
            by_env[each.env, each.score].append(each)
    for (env, score), here in by_env.items():
        if len(here) < 2:
            continue
        shown = here[-_MOST_TOGETHER:]
        lines = []
        for style, each in enumerate(shown):
            middle = middles[each.number]
            assert middle is not None
            seeds = len(each.finals())
            name = _name_among(each, seeds)
            band = (middle.low, middle.high) if seeds > 1 else ((), ())
            label = f"{each.number}. {each.algo.upper()}"
            lines.append(Line(name, middle.steps, middle.values, style, label, True, *band))
        left = len(here) - len(shown)
        summary = f"Interquartile means over seeds of {len(shown)} experiments on {env}: " + "; ".join(
            f"{line.name} ends at {number(line.values[-1])}" for line in lines
        )
        summary += f". The {left} before them are left out." if left else "."
        key = paths.safe_name(f"all-{env}-{score}")
        yield Chart(key, env, env, score, summary, lines=lines, references=_shared_references(shown))


def profiles(experiments: Sequence[Experiment]) -> Iterator[Chart]:
    """For each environment with several experiments of more than one seed, their performance profiles.

    That is the fraction of seeds whose last score is above a threshold, for every threshold (Agarwal et al.
    2021, arXiv 2108.13264, section 4). It shows what a mean hides, such as one seed that fails.
    """
    by_env: dict[tuple[str, str], list[Experiment]] = defaultdict(list)
    for each in experiments:
        if len(each.finals()) > 1:
            by_env[each.env, each.score].append(each)
    for (env, score), here in by_env.items():
        shown = here[-_MOST_TOGETHER:]
        scores = [[value for _, _, value in each.finals()] for each in shown]
        low, high = min(map(min, scores)), max(map(max, scores))
        if len(here) < 2 or not isfinite(high - low) or low == high:
            continue
        margin = 0.02 * (high - low)  # so that every profile begins at all seeds and ends at none
        width = high - low + 2 * margin
        thresholds = [low - margin + width * i / (_THRESHOLDS - 1) for i in range(_THRESHOLDS)]
        lines = []
        for style, (each, values) in enumerate(zip(shown, scores, strict=True)):
            profile = stats.performance_profile(values, thresholds)
            name = _name_among(each, len(values))
            lines.append(Line(name, thresholds, profile.fraction, style, "", True, profile.low, profile.high))
        summary = (
            f"Fraction of seeds whose last {score} is above a threshold, {len(shown)} experiments on {env}"
        )
        summary += ": " + "; ".join(
            f"half of {line.name} reach {number(sorted(values)[len(values) // 2])}"
            for line, values in zip(lines, scores, strict=True)
        )
        key, caption = paths.safe_name(f"profile-{env}-{score}"), f"{env}: performance profiles"
        over = f"threshold of the last {score}"
        yield Chart(key, caption, caption, "fraction of seeds above", f"{summary}.", lines=lines, over=over)


def _name_among(experiment: Experiment, seeds: int) -> str:
    """An experiment in the legend of a chart of several."""
    label = f", {experiment.label}" if experiment.label else ""
    return f"{experiment.number}. {experiment.algo.upper()}{label} (n={seeds})"


def _shared_references(experiments: Iterable[Experiment]) -> list[Reference]:
    """The levels of all, but those that only one algorithm or length of training has."""
    each = [set(references_of(experiment)) for experiment in experiments]
    return sorted(set.intersection(*each)) if each else []


def name_of(run: Run, experiment: Experiment) -> str:
    """The run by its seed; where that is not enough or not all, with its status or the end of its id."""
    name = f"seed {run.config['seed']}"
    status = run.record.get("status")
    if status != "finished":
        return f"{name}, {status}"
    if run not in experiment.counted:
        return f"{name}, earlier ({run.id[-6:]})"
    return name


def _short_name(run: Run, experiment: Experiment) -> str:
    return str(run.config["seed"]) + ("" if run in experiment.counted else "*")


def number(value: float) -> str:
    """A value for a sentence, with as many digits as tell something."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
