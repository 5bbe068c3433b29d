"""`make stats`: statistics over seeds."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rltemplate.analysis import seeds, stats
from rltemplate.analysis.differences import changed_files
from rltemplate.analysis.experiments import find_experiments
from rltemplate.analysis.runs import load_runs
from rltemplate.config.command_args import one_of, word
from rltemplate.run.read import find_run_dirs
from rltemplate.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Statistics over seeds: [runs='runs/*/*'] [by=KEY] [statistic=iqm|mean|median].

    Final returns of each experiment, which is all runs that differ only in the seed, and whether two
    experiments in one environment differ. `by=KEY` shows the value of a key, and keeps its values apart.
    """

    runs: str = word(default="runs/*/*")
    by: str | None = word(default=None)
    statistic: str = word(one_of(*stats.STATISTICS), "iqm")


def main(args: Args) -> int:
    """Print experiments and comparisons."""
    runs, left = load_runs(find_run_dirs(args.runs))
    every = find_experiments(runs, changed_files, args.by)
    left += [line for each in every for line in each.left_out()]
    experiments = [each for each in every if each.counted]
    if not experiments:
        raise ConfigError(f"runs={args.runs}: no finished run with a return; {left[0]}")
    compared = list(seeds.pairs(experiments, args.statistic))
    for line in left:
        print(f"left out: {line}", file=sys.stderr)
    print(seeds.report(experiments, compared, args.statistic))
    return 0
