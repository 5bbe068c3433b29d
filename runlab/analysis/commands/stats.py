"""`make stats`: statistics over seeds, and comparisons of experiments by the returns of their seeds."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from runlab.analysis import stats
from runlab.analysis.experiments import Experiment, close, find_experiments
from runlab.analysis.published import show
from runlab.analysis.runs import load_runs
from runlab.analysis.stats import Interval
from runlab.config.command_args import argument, one_of
from runlab.errors import ConfigError
from runlab.run.read import find_parts


@dataclass(frozen=True, kw_only=True)
class Args:
    """Statistics over seeds: [runs='runs/*/*'] [by=KEY] [statistic=iqm|mean|median].

    Final returns of each experiment, which is all runs that differ only in the seed, and whether it differs
    from the first one in its environment: that of the first of several `runs=A,B`, else of the first
    algorithm by name. `by=KEY` shows the value of a key, and keeps its values apart.
    """

    runs: str = argument(default="runs/*/*")
    by: str | None = argument(default=None)
    statistic: str = argument(one_of(*stats.STATISTICS), "iqm")


def main(args: Args) -> int:
    """Print experiments and comparisons."""
    parts = find_parts(args.runs)
    place = {run_dir: number for number, part in reversed([*enumerate(parts)]) for run_dir in part}
    runs, left = load_runs(dict.fromkeys(run_dir for part in parts for run_dir in part))
    every = find_experiments(runs, args.by)
    left += [line for each in every for line in each.left_out()]
    experiments = [each for each in every if each.counted]
    if not experiments:
        raise ConfigError(f"runs={args.runs}: no finished run with a return; {left[0]}")
    for line in left:
        print(f"left out: {line}", file=sys.stderr)
    blocks = [list(_about(each, args.statistic)) for each in experiments]
    ranked = sorted(experiments, key=lambda each: min(place[run.dir] for run in each.runs))
    first = {each.env: each for each in reversed(ranked)}
    pairs = [(first[each.env], each) for each in experiments if each is not first[each.env]]
    compared = [compare(a, b, args.statistic) for a, b in pairs]
    print("\n\n".join("\n".join(lines) for lines in [*blocks, *compared]))
    if any(len(each.counted) < stats.FEW for each in experiments):
        print(f"\ncaution: {stats.FEW_SEEDS}")
    if len(compared) > 1:
        many = f"each of the {len(compared)} comparisons finds a difference that is none in 1 of 20 cases"
        print(f"\ncaution: {many}")
    return 0


def _about(experiment: Experiment, statistic: str) -> Iterator[str]:
    count, standing, returns = len(experiment.counted), experiment.standing, experiment.returns
    after = f"after {experiment.steps:,} steps"
    if count == 1:
        yield f"{experiment}: 1 seed, return {show(returns[0])} {after}"
    else:
        yield f"{experiment}: {count} seeds, return {after}"
        for name in dict.fromkeys([statistic, *stats.STATISTICS]):
            yield f"  {stats.LABELS[name]:8}{experiment.interval(name)}"
        if count < stats.FEW:
            yield f"  {'returns':8}{', '.join(map(show, returns))}"
        else:
            yield f"  {'range':8}{show(min(returns))} to {show(max(returns))}"
    if standing is not None:
        yield f"  {'others':8}{standing.summary}"
    yield from (f"  caution: {text}" for text in experiment.cautions() if text != stats.FEW_SEEDS)


def compare(a: Experiment, b: Experiment, statistic: str = "iqm") -> list[str]:
    """Lines about the difference of two experiments, and whether its interval excludes zero."""
    difference, label = stats.interval(a.returns, statistic, minus=b.returns), stats.LABELS[statistic]
    counts = len(a.counted), len(b.counted)
    if difference.low > 0 or difference.high < 0:
        turned = Interval(-difference.value, -difference.high, -difference.low)
        first, second, gain = (a, b, difference) if difference.low > 0 else (b, a, turned)
        verb, hint = ("looks", ", a hint and no proof") if min(counts) < stats.FEW else ("is", "")
        verdict = f"{first.name} {verb} better than {second.name}: {label} higher by {gain}{hint}"
    elif math.isnan(difference.low):
        verdict = f"undecided: a single seed has no spread; {label} differs by {show(difference.value)}"
    elif len({*a.returns, *b.returns}) == 1:
        verdict = f"every run of {a.name} and {b.name} has the same score"
    elif difference.low == difference.high == 0:
        verdict = f"undecided: {label} of {a.name} and {b.name} is the same, and single seeds differ"
    else:
        verdict = f"undecided: {label} of {a.name} minus {label} of {b.name} is {difference}"
    lines = [f"{a.name} against {b.name} on {a.env}", f"  {verdict}; {counts[0]} against {counts[1]} seeds"]
    if a.score != b.score:
        kinds = {"eval/return": "evaluations", "episode/return": "training episodes"}
        lines.append(f"  caution: returns of {kinds[a.score]} are compared with those of {kinds[b.score]}")
    if a.task != b.task:
        lines.append("  caution: the environments have other arguments or wrappers, so the tasks may differ")
    if not close(a, b):
        lines.append(f"  caution: they ran for other numbers of steps, {a.steps:,} and {b.steps:,}")
    return lines
