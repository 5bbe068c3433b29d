"""Statistics of the final returns of several seeds, with intervals that are wide enough for few seeds.

Statistics are the mean, the median, and the IQM, the mean of the middle half (Agarwal et al. 2021, arXiv
2108.13264). With 3 to 10 seeds the percentile bootstrap contains the true value too rarely: resampling n
values shows only (n - 1) / n of their variance, and its quantile is normal instead of Student's. Used
instead:

* for the mean: Student's t interval, and Welch's for a difference;
* for IQM and median, from 5 seeds on: the expanded percentile interval (Hesterberg 2015, "What Teachers
  Should Know About the Bootstrap", The American Statistician 69:371), quantiles at Phi(-sqrt(n/(n-1)) t);
* for IQM and median of fewer seeds, where no quantile reaches beyond the data: t times the bootstrap's
  standard error times sqrt(n/(n-1)).

results/coverage.md has how often they contain the true value. Higher scores are better. Equal scores give
equal intervals, and no global generator is used.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from runlab.analysis.published import show

LABELS = {"iqm": "IQM", "mean": "mean", "median": "median"}
FEW = 5  # seeds; Henderson et al. 2018 and Agarwal et al. 2021 show how little fewer seeds can prove
FEW_SEEDS = f"with fewer than {FEW} seeds the spread itself is little more than a guess"
_ENOUGH_FOR_QUANTILES = 5
_RESAMPLES = 2000
_CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A value and its 95 % interval, whose ends are NaN for a single seed."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{show(self.value)} (no interval)"
        return f"{show(self.value)} ({show(self.low)} to {show(self.high)})"


def _mean(scores: Any, axis: int = -1) -> Any:
    """The mean; of equal scores it is this score: the sum of ten is rounded otherwise than that of five."""
    scores = np.asarray(scores, float)
    return np.clip(scores.mean(axis), scores.min(axis), scores.max(axis))


def _iqm(scores: Any, axis: int = -1) -> Any:
    ordered = np.sort(np.moveaxis(np.asarray(scores, float), axis, -1))
    cut = ordered.shape[-1] // 4
    return _mean(ordered[..., cut : ordered.shape[-1] - cut])


STATISTICS: dict[str, Callable[..., Any]] = {"iqm": _iqm, "mean": _mean, "median": np.median}


def interval(
    values: Sequence[float], statistic: str = "iqm", minus: Sequence[float] | None = None
) -> Interval:
    """A statistic of one score per seed, or its difference from the statistic of `minus`, and its interval.

    Raises ValueError for no or non-finite scores.
    """
    from scipy import stats

    scores = [np.asarray(group, float) for group in (values, minus) if group is not None]
    if not all(group.size and np.isfinite(group).all() for group in scores):
        raise ValueError("expected finite scores, at least one in each group")
    of, signs = STATISTICS[statistic], (1, -1)
    value = float(sum(sign * of(group) for sign, group in zip(signs, scores, strict=False)))
    sizes = np.array([len(group) for group in scores])
    if sizes.min() < 2:
        return Interval(value, math.nan, math.nan)
    if statistic == "mean" and any(map(np.ptp, scores)):
        one = len(scores) == 1
        with warnings.catch_warnings(action="ignore"):  # one of the groups may have equal scores
            test = stats.ttest_1samp(*scores, 0.0) if one else stats.ttest_ind(*scores, equal_var=False)
        return Interval(value, *map(float, test.confidence_interval(_CONFIDENCE)))
    # The draws of scipy.stats.bootstrap, which also computes intervals that are not needed here.
    resampled = [
        of(np.random.default_rng(i).choice(group, (_RESAMPLES, len(group))), axis=-1)
        for i, group in enumerate(scores)
    ]
    variances = np.array([each.var(ddof=1) if np.ptp(each) else 0.0 for each in resampled])
    if not (variances**2).any():  # the middle half of the seeds is one value, but for less than 1e-80
        return Interval(value, value, value)
    freedom = variances.sum() ** 2 / (variances**2 / (sizes - 1)).sum()  # Welch and Satterthwaite
    unseen = math.sqrt((variances * sizes / (sizes - 1)).sum() / variances.sum())
    reach = float(stats.t.ppf((1 + _CONFIDENCE) / 2, freedom)) * unseen
    total = sum(sign * each for sign, each in zip(signs, resampled, strict=False))
    if sizes[variances > 0].min() < _ENOUGH_FOR_QUANTILES:
        error = float(np.std(total, ddof=1))
        return Interval(value, value - reach * error, value + reach * error)
    tail = float(stats.norm.sf(reach))
    low, high = np.quantile(total, [tail, 1 - tail])
    return Interval(value, float(low), float(high))
