"""The share of intervals that hold the truth: `python results/coverage.py [N] > results/coverage.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import bootstrap

from runlab.analysis import stats

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
SEEDS = ((3,), (5,), (10,), (20,), (50,))
PAIRS = ((3, 3), (5, 5), (10, 10), (20, 20), (3, 20), (5, 20))  # seeds of two experiments
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


def coverage(
    population: str, statistic: str, sizes: tuple[int, ...], repetitions: int
) -> tuple[float, float]:
    """The share of the intervals of `stats` that hold the truth, and that of the percentile bootstrap.

    With two sizes the interval is that of a difference, and the truth is zero. The standard error of a
    share near 0.95 is 0.007 with 1,000 repetitions.
    """
    rng = np.random.default_rng(0)
    draw, of = POPULATIONS[population], stats.STATISTICS[statistic]
    truth = float(of(draw(rng, (_POPULATION,)))) if len(sizes) == 1 else 0.0
    held = np.zeros(2)
    for i in range(repetitions):
        groups = [draw(rng, (size,)).tolist() for size in sizes]
        ours = stats.interval(groups[0], statistic, groups[1] if len(groups) > 1 else None)
        drawn = np.random.default_rng(i)
        plain = bootstrap(groups, _difference(of), n_resamples=1000, method="percentile", rng=drawn)
        for method, (low, high) in enumerate((ours[1:], plain.confidence_interval)):
            held[method] += low <= truth <= high
    return float(held[0] / repetitions), float(held[1] / repetitions)


def _difference(of: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The statistic of the first group, less that of the second one where there is one."""
    return lambda *groups, axis: of(groups[0], axis=axis) - sum(of(group, axis=axis) for group in groups[1:])


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f}" if 0.93 <= share <= 0.97 else f"*{100 * share:.1f}*"


def main(repetitions: int) -> None:
    """Print the table, row by row."""
    print("# How often a 95 % interval holds the truth\n")
    print(f"Per cent of {repetitions:,} drawn sets of scores, ours / the percentile bootstrap; italics are")
    print("outside 93 to 97. The truth is the statistic of the whole population. Made by")
    print("`python results/coverage.py`.\n")
    _table([f"{n} seeds" for (n,) in SEEDS], SEEDS, repetitions)
    print("\nThe same for the difference of two experiments whose scores come from one population:\n")
    _table([f"{n} and {m} seeds" for n, m in PAIRS], PAIRS, repetitions)


def _table(heads: list[str], sizes: Sequence[tuple[int, ...]], repetitions: int) -> None:
    print(f"| scores | statistic | {' | '.join(heads)} |")
    print(f"| --- | --- | {' | '.join('---' for _ in heads)} |")
    for population in POPULATIONS:
        for statistic in stats.STATISTICS:
            shares = (coverage(population, statistic, size, repetitions) for size in sizes)
            cells = [" / ".join(map(_per_cent, pair)) for pair in shares]
            print(f"| {population} | {statistic} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
