"""Scores over several environments, after Agarwal et al. 2021 (arXiv 2108.13264).

Returns are normalised: 0 is the random policy, 1 the median of the published returns for the algorithm at
about as many steps. Experiments of one algorithm with the same differences from the recipe are one group.
Intervals are a percentile bootstrap over the seeds of each environment, as in the paper: with few seeds they
are too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from runlab.analysis.experiments import Experiment, close
from runlab.analysis.stats import STATISTICS, Interval

_RESAMPLES = 2000
_LEAST = 2  # environments


class Together(NamedTuple):
    """A value of one group, or of two, over environments."""

    name: str
    envs: list[str]
    value: Interval


def scores(experiments: Sequence[Experiment]) -> Iterator[Together]:
    """The IQM of the normalised scores of each experiment with several environments."""
    for name, members in _by_name(experiments).items():
        returns = {each.env: values for each in members if (values := _normalised(each))}
        if len(returns) >= _LEAST:
            value = _interval(lambda parts: STATISTICS["iqm"](np.concatenate(parts)), [*returns.values()])
            same = len({*map(len, returns.values())}) == 1  # or names get the numbers: each run counts once
            envs = [env if same else f"{env} ({len(values)} seeds)" for env, values in returns.items()]
            yield Together(name, envs, value)


def improvements(experiments: Sequence[Experiment]) -> Iterator[Together]:
    """The probability that a run of one experiment has a higher return than one of another."""
    for (a, ours), (b, theirs) in combinations(_by_name(experiments).items(), 2):
        mine, others = ({each.env: each for each in side} for side in (ours, theirs))
        pairs = [
            (each, other)
            for env, each in mine.items()
            if (other := others.get(env)) is not None
            and each.score == other.score
            and each.task == other.task
            and close(each, other)
        ]
        if len(pairs) >= _LEAST:
            parts = [y.returns for _, y in pairs] + [x.returns for x, _ in pairs]
            value = _interval(_probability, parts)
            yield Together(f"{b} better than {a}", [each.env for each, _ in pairs], value)


def _probability(parts: Sequence[Any]) -> float:
    half = len(parts) // 2
    higher = [
        np.heaviside(np.subtract.outer(x, y), 0.5).mean()
        for x, y in zip(parts[:half], parts[half:], strict=True)
    ]
    return float(np.mean(higher))


def _by_name(experiments: Sequence[Experiment]) -> dict[str, list[Experiment]]:
    groups: dict[str, list[Experiment]] = {}
    for each in experiments:
        if each.counted:
            groups.setdefault(f"{each.algo} {each.by or 'default'}", []).append(each)
    return groups


def _normalised(experiment: Experiment) -> list[float]:
    standing = experiment.standing
    if standing is None or standing.random is None or not standing.published:
        return []
    par = float(np.median(standing.published))
    if par <= standing.random:  # as in MountainCar with too few steps: nothing to normalise by
        return []
    return [(value - standing.random) / (par - standing.random) for value in experiment.returns]


def _interval(of: Callable[[Sequence[Any]], float], parts: Sequence[Sequence[float]]) -> Interval:
    value, low, high = map(float, resampled(of, parts))
    return Interval(value, *((low, high) if max(map(len, parts)) > 1 else (math.nan, math.nan)))


def resampled(of: Callable[[Sequence[Any]], Any], parts: Sequence[Sequence[float]]) -> tuple[Any, Any, Any]:
    """A statistic of the scores of each environment (a number or an array), and the ends of its interval."""
    values = [np.asarray(part, float) for part in parts]
    rng = np.random.default_rng(0)
    drawn = [of([rng.choice(part, len(part)) for part in values]) for _ in range(_RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return of(values), low, high
