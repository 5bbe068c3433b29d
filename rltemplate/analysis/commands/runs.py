"""`make runs`: the table of all runs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rltemplate.analysis import run_table
from rltemplate.analysis.runs import Run
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
    runs_dir: Path | None = word(Path, None)
    json: bool = flag()
    filters: list[str] = rest()


def main(args: Args) -> int:
    """Print the table."""
    runs_dir = args.runs_dir or Path("runs")
    filters = [_filter(text) for text in args.filters]
    all_runs, problems = _find(runs_dir, asked=args.runs_dir is not None)
    for problem in problems:
        print(f"note: {problem if problem.isprintable() else repr(problem)}", file=sys.stderr)
    names = run_table.columns(all_runs, [name for name in args.show.split(",") if name])
    runs = run_table.select(all_runs, filters)[-(args.last or len(all_runs) or 1) :]
    if args.sort is not None:
        chosen = {run.dir for run in runs}
        runs = [run for run in run_table.order(all_runs, args.sort) if run.dir in chosen]
    if args.json:
        print(json.dumps(run_table.objects(runs, names), default=str))
    elif not all_runs:
        print(f"no runs under {runs_dir} yet")
    elif not runs:
        print(f"no run fits {' '.join(args.filters)}; there are {len(all_runs)} under {runs_dir}")
    else:
        print("\n".join(run_table.lines(runs, names, sys.stdout.isatty())))
    return 0


def _filter(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if not value.strip():
        raise ConfigError(f"{text}: a value is missing after '='")
    return key.strip(), value.strip()


def _find(runs_dir: Path, asked: bool) -> tuple[list[Run], list[str]]:
    try:
        folder = runs_dir.expanduser()
        if folder.is_dir():
            return run_table.find_runs(folder)
    except (OSError, RuntimeError):  # longer than any name, or ~somebody whom this machine does not know
        pass
    if asked:
        raise ConfigError(f"runs_dir={runs_dir}: there is no such folder")
    return [], []
