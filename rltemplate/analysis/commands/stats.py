"""`make stats`: statistics over seeds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rltemplate.analysis import seeds, stats
from rltemplate.analysis.runs import load_runs
from rltemplate.config.command_args import flag, one_of, whole, word
from rltemplate.run.read import find_run_dirs
from rltemplate.types import ConfigError

SEEDS = (3, 5, 10, 20, 50)
ONLY_COVERAGE, ONLY_RUNS = ("out", "repetitions"), ("runs", "by", "statistic", "json")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Statistics over seeds: [runs='runs/*/*'] [by=KEY] [statistic=iqm|mean|median].

    Final returns by algorithm and environment, and whether two groups on one environment differ.
    `coverage=true [out=FILE] [repetitions=N]` measures instead how often the intervals hold the truth, on
    drawn scores whose distribution is known.
    """

    runs: str | None = word(default=None)
    by: str | None = word(default=None)
    statistic: str | None = word(one_of(*stats.STATISTICS), None)
    coverage: str = word(one_of("true", "false"), "false")
    out: str | None = word(default=None)
    repetitions: int | None = word(whole(10), None)
    json: bool = flag()


def main(args: Args) -> int:
    """Print groups and comparisons, or the table of coverage."""
    wanted = args.coverage == "true"
    for key in ONLY_RUNS if wanted else ONLY_COVERAGE:
        if getattr(args, key):
            raise ConfigError(f"{key}: {'leave out coverage=true' if wanted else 'is for coverage=true'}")
    if wanted:
        return _coverage(args)
    runs, damaged = load_runs(find_run_dirs(args.runs or "runs/*/*"))
    if not runs:
        raise ConfigError(f"no run can be read: {damaged[0]}")
    groups, left = seeds.group_runs(runs, args.by)
    statistic = args.statistic or "iqm"
    compared = seeds.pairs(groups, statistic)
    for line in (*damaged, *left):
        print(f"left out: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps(seeds.as_json(groups, compared, [*damaged, *left])))
    else:
        print(seeds.report(groups, compared, statistic))
    return 0


def _coverage(args: Args) -> int:
    out = None if args.out is None else Path(args.out).expanduser()
    if out is not None:
        try:
            out.open("a").close()  # minutes before there is something to write
        except OSError as error:
            raise ConfigError(f"out={out}: cannot be written, {error.strerror}") from error
    lines = list(_table(args.repetitions or 1000))
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _table(repetitions: int) -> Iterator[str]:
    """The lines of the table, which are printed as they come."""
    methods = " / ".join(stats.METHODS)
    head = [
        "# How often a 95 % interval holds the truth",
        "",
        f"Per cent of {repetitions:,} drawn sets of scores, {methods} (the plain percentile bootstrap);",
        "what is outside 93 to 97 is in italics. The truth is the statistic of the whole population. Five",
        "tasks differ in place and spread. Made by `make stats coverage=true out=results/coverage.md`.",
        "",
        f"| scores | tasks | statistic | {' | '.join(f'{n} seeds' for n in SEEDS)} |",
        f"| --- | --- | --- | {' | '.join('---' for _ in SEEDS)} |",
    ]
    for line in head:
        print(line)
    yield from head
    for tasks in (1, 5):
        for population in stats.POPULATIONS:
            for statistic in stats.STATISTICS:
                cells = []
                for n in SEEDS:
                    held = stats.coverage(population, statistic, n, tasks=tasks, repetitions=repetitions)
                    cells.append(" / ".join(_per_cent(held[method]) for method in stats.METHODS))
                line = f"| {population} | {tasks} | {statistic} | {' | '.join(cells)} |"
                print(line, flush=True)
                yield line


def _per_cent(share: float) -> str:
    text = f"{100 * share:.1f}"
    return text if 0.93 <= share <= 0.97 else f"*{text}*"
