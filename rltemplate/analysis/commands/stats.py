"""`make stats`: statistics over seeds."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from rltemplate.analysis import seeds, stats
from rltemplate.analysis.runs import load_runs
from rltemplate.config.command_args import flag, one_of, word
from rltemplate.run.read import find_run_dirs
from rltemplate.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Statistics over seeds: [runs='runs/*/*'] [by=KEY] [statistic=iqm|mean|median].

    Final returns by algorithm and environment, and whether two groups on one environment differ.
    """

    runs: str = word(default="runs/*/*")
    by: str | None = word(default=None)
    statistic: str = word(one_of(*stats.STATISTICS), "iqm")
    json: bool = flag()


def main(args: Args) -> int:
    """Print groups and comparisons."""
    runs, damaged = load_runs(find_run_dirs(args.runs))
    if not runs:
        raise ConfigError(f"no run can be read: {damaged[0]}")
    groups, left = seeds.group_runs(runs, args.by)
    compared = seeds.pairs(groups, args.statistic)
    for line in (*damaged, *left):
        print(f"left out: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps(seeds.as_json(groups, compared, [*damaged, *left])))
    else:
        print(seeds.report(groups, compared, args.statistic))
    return 0
