"""`make runs`: the table of all runs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rltemplate.analysis import run_table
from rltemplate.analysis.runs import check_name
from rltemplate.config.command_args import flag, rest, whole, word
from rltemplate.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Table of all runs: [env='Half*'] [return='>3000'] [sort=-return] [show=algo.gamma].

    KEY=VALUE keeps the runs that have this value: a column of the table, a key of the configuration or the
    record, or a metric. `env=Half*`, `seed=1,2`, `return='>3000'` and `status='!=finished'` work as well.
    `sort=-KEY` puts the highest first, `last=N` keeps the N that began last, `runs_dir=DIR` looks elsewhere.
    --json prints one list, an object for each run: the columns as recorded, those of `show=`, `dirty` and the
    folder as `dir`.
    """

    sort: str | None = word(default=None)
    show: str = word(default="")
    last: int | None = word(whole(1), None)
    runs_dir: Path = word(Path, Path("runs"))
    json: bool = flag()
    filters: list[str] = rest()


def main(args: Args) -> int:
    """Print the table."""
    if args.runs_dir != Path("runs") and not args.runs_dir.expanduser().is_dir():
        raise ConfigError(f"runs_dir={args.runs_dir}: there is no such folder")
    every, problems = run_table.find_runs(args.runs_dir.expanduser())
    for problem in problems:
        print(f"note: {problem if problem.isprintable() else repr(problem)}", file=sys.stderr)
    more = [name for name in args.show.split(",") if name]
    for name in more:
        check_name(every, name, f"show={name}")
    names = list(dict.fromkeys([*run_table.SHOWN, *more]))
    runs = run_table.select(every, [_filter(text) for text in args.filters])[-(args.last or 0) :]
    if args.sort is not None:
        chosen = {run.dir for run in runs}
        runs = [run for run in run_table.order(every, args.sort) if run.dir in chosen]
    if args.json:
        print(json.dumps(run_table.objects(runs, names), default=str))
    elif not every:
        print(f"no runs under {args.runs_dir} yet")
    elif not runs:
        print(f"no run fits {' '.join(args.filters)}; there are {len(every)} under {args.runs_dir}")
    else:
        print("\n".join(run_table.lines(runs, names, sys.stdout.isatty())))
    return 0


def _filter(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if not value.strip():
        raise ConfigError(f"{text}: a value is missing after '='")
    return key.strip(), value.strip()
