"""The share of intervals that hold the truth: `python results/coverage.py [N] > results/coverage.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.analysis import stats

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
SEEDS = (3, 5, 10, 20, 50)
_POPULATION = 400_000  # runs that stand for all there could be


def _failing(share: float) -> Draw:
    """Runs near 1, of which a share fails and ends near 0."""
    return lambda rng, shape: np.where(rng.random(shape) < share, 0.0, 1.0) + 0.1 * rng.standard_normal(shape)


# Like final returns: even, with a tail, with a long one, and with seeds that fail.
POPULATIONS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "gamma, shape 2": lambda rng, shape: rng.gamma(2.0, 1.0, shape),
    "lognormal, sigma 1": lambda rng, shape: rng.lognormal(0.0, 1.0, shape),
    "one seed in five fails": _failing(0.2),
    "every other seed fails": _failing(0.5),
}


def coverage(population: str, statistic: str, seeds: int, repetitions: int) -> tuple[float, float]:
    """The share of the intervals of `stats` that hold the truth, and that of the percentile bootstrap.

    The standard error of a share near 0.95 is 0.007 with 1,000 repetitions.
    """
    rng = np.random.default_rng(0)
    draw, of = POPULATIONS[population], stats.STATISTICS[statistic]
    truth = float(of(draw(rng, (_POPULATION,))))
    held = np.zeros(2)
    for i in range(repetitions):
        runs = draw(rng, (seeds,))
        drawn = np.random.default_rng(i)
        plain = bootstrap((runs,), of, n_resamples=1000, method="percentile", rng=drawn).confidence_interval
        for method, (low, high) in enumerate((stats.interval(list(runs), statistic)[1:], plain)):
            held[method] += low <= truth <= high
    return float(held[0] / repetitions), float(held[1] / repetitions)


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f}" if 0.93 <= share <= 0.97 else f"*{100 * share:.1f}*"


def main(repetitions: int) -> None:
    """Print the table, row by row."""
    print("# How often a 95 % interval holds the truth\n")
    print(f"Per cent of {repetitions:,} drawn sets of scores, ours / the percentile bootstrap; italics are")
    print("outside 93 to 97. The truth is the statistic of the whole population. Made by")
    print("`python results/coverage.py`.\n")
    print(f"| scores | statistic | {' | '.join(f'{n} seeds' for n in SEEDS)} |")
    print(f"| --- | --- | {' | '.join('---' for _ in SEEDS)} |")
    for population in POPULATIONS:
        for statistic in stats.STATISTICS:
            cells = [
                " / ".join(map(_per_cent, coverage(population, statistic, n, repetitions))) for n in SEEDS
            ]
            print(f"| {population} | {statistic} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
