"""Comparison of experiments by the returns of their seeds: `make stats`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rltemplate.analysis import stats
from rltemplate.analysis.experiments import Experiment
from rltemplate.analysis.stats import Interval
from rltemplate.analysis.targets import show

MOST_PAIRED = (
    8  # experiments in one environment of which every two are compared; of more, each with the first
)


@dataclass(frozen=True, slots=True)
class Pair:
    """The comparison of two experiments in one environment.

    `difference` is that of the statistic, a minus b; `better` is 'a' or 'b' if its interval leaves out 0.
    `improvement` is the probability that a run of a scores higher than one of b.
    """

    a: str
    b: str
    env: str
    seeds: list[int]
    difference: Interval
    improvement: Interval
    better: str | None
    verdict: str
    cautions: list[str]


def pairs(experiments: Sequence[Experiment], statistic: str = "iqm") -> Iterator[Pair]:
    """Comparisons within each environment."""
    for env in dict.fromkeys(each.env for each in experiments):
        here = [each for each in experiments if each.env == env]
        several = len(here) <= MOST_PAIRED
        for a, b in itertools.combinations(here, 2) if several else ((here[0], b) for b in here[1:]):
            yield compare(a, b, statistic)


def compare(a: Experiment, b: Experiment, statistic: str = "iqm") -> Pair:
    """The difference of two experiments, and a verdict if their seeds can tell it from zero."""
    found, label = stats.difference(a.returns, b.returns, statistic), stats.LABELS[statistic]
    counts, better = [len(a.counted), len(b.counted)], None
    cautions = stats.caution(*counts)
    if found.low > 0 or found.high < 0:
        better = "a" if found.value > 0 else "b"
        first, second = (a, b) if better == "a" else (b, a)
        gain = found if better == "a" else Interval(-found.value, -found.high, -found.low)
        verb, hint = ("looks", ", a hint and no proof") if min(counts) < stats.FEW else ("is", "")
        verdict = f"{first.name} {verb} better than {second.name}: {label} higher by {gain}{hint}"
    elif math.isnan(found.low):
        verdict = f"cannot be told: a single seed has no spread; {label} differs by {show(found.value)}"
    elif found.low == found.high == 0:
        verdict = f"every run of {a.name} and {b.name} has the same score"
    else:
        verdict = f"cannot be told: {label} of {a.name} minus that of {b.name} is {found}"
    if max(a.steps, b.steps) > 1.05 * min(a.steps, b.steps):
        cautions.append(f"they ran for other numbers of steps, {a.steps:,} and {b.steps:,}")
    improvement = stats.probability_of_improvement(a.returns, b.returns)
    return Pair(a.name, b.name, a.env, counts, found, improvement, better, verdict, cautions)


def report(experiments: Sequence[Experiment], compared: Sequence[Pair], statistic: str = "iqm") -> str:
    """Experiments and comparisons for a terminal."""
    parts = [*(_about(each, statistic) for each in experiments), *map(_about_pair, compared)]
    if len(compared) > 1:
        parts.append(
            f"caution: of {len(compared)} comparisons, about one in twenty finds a difference by chance alone"
        )
    return "\n\n".join(parts)


def _about(experiment: Experiment, statistic: str) -> str:
    count = len(experiment.counted)
    lines = [f"{experiment}: {count} seed{'s' * (count != 1)}, return after {experiment.steps:,} steps"]
    names = dict.fromkeys([statistic, *stats.STATISTICS])
    lines += [f"  {stats.LABELS[name]:8}{experiment.interval(name)}" for name in names]
    lines.append(f"  {'range':8}{show(min(experiment.returns))} to {show(max(experiment.returns))}")
    if experiment.standing is not None:
        lines.append(f"  {'target':8}mean {show(experiment.standing.value)}; {experiment.standing.summary}")
    return "\n".join([*lines, *(f"  caution: {text}" for text in experiment.cautions())])


def _about_pair(pair: Pair) -> str:
    value, low, high = pair.improvement
    lines = [
        f"{pair.a} against {pair.b} on {pair.env}",
        f"  {pair.verdict}; {' against '.join(map(str, pair.seeds))} seeds",
        f"  P({pair.a} > {pair.b}) {value:.2f} ({low:.2f} to {high:.2f})",
    ]
    return "\n".join([*lines, *(f"  caution: {text}" for text in pair.cautions)])
