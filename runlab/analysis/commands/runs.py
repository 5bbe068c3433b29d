"""`make runs`: the table of all runs.

A filter is a name that `Run.value` knows and a condition on its value: a value (`env=Hopper`, `note=null`,
`algo.hidden_sizes=[64,64]`; numbers are compared as numbers, everything else as text), a pattern as in file
names (`env=Half*`), several of these with commas, or a comparison (`return='>3000'`, `status='!=finished'`;
texts are compared with texts). A run without such a key matches no condition, `!=` included.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from runlab.analysis.journal import Journal
from runlab.analysis.runs import NOTHING, SHOWN, Run, cell, check_name, load_runs, single_line, text_of
from runlab.config.command_args import argument, file, rest, runs_folder, switch, whole
from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.files import say, strict_json

# The longer signs first: `>=` begins with `>`.
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, kw_only=True)
class Args:
    """Table of all runs: [env='Half*'] [return='>3000'] [sort=-return] [show=algo.gamma].

    KEY=VALUE keeps the runs that have this value: a column of the table, a key of the configuration or the
    record, or a metric. `env=Half*`, `seed=1,2`, `return='>3000'` and `status='!=finished'` work as well.
    `sort=-KEY` puts the highest first, `last=N` keeps the N that began last, `runs_dir=DIR` looks elsewhere.
    `json=true` prints one list, an object for each run: the columns as recorded, those of `show=`, `dirty`
    and the folder as `dir`. `journal=FILE` adds entries about these runs to a file in Markdown, those that
    it lacks.
    """

    sort: str | None = argument(default=None)
    show: str = argument(default="")
    last: int | None = argument(whole(1), None)
    journal: Path | None = argument(file, None)
    runs_dir: Path = argument(runs_folder, Path("runs"))
    json: bool = argument(switch, False)
    filters: list[str] = rest()


def main(args: Args) -> int:
    """Print the table."""
    dirs = {
        path.parent for name in (paths.RECORD, paths.CONFIG) for path in args.runs_dir.glob(f"*/*/{name}")
    }
    every, problems = load_runs(sorted(dirs))
    for problem in problems:
        print(f"note: {single_line(problem)}", file=sys.stderr)
    runs = sorted(every, key=lambda run: (run.record.started_at or "~", run.id))
    for text in args.filters:
        key, _, wanted = (part.strip() for part in text.partition("="))
        if not wanted:
            raise ConfigError(f"{text}: a value is missing after '='")
        check_name(every, key, text)
        runs = [run for run in runs if key in run.values and _matches(run.values[key], wanted, text)]
    runs = runs[-(args.last or 0) :]
    if args.sort is not None:
        check_name(every, args.sort.removeprefix("-"), f"sort={args.sort}")
        runs = _sorted(runs, args.sort)
    more = [name for name in args.show.split(",") if name]
    for name in more:
        check_name(every, name, f"show={name}")
    names = list(dict.fromkeys([*SHOWN, *more]))
    if args.json:
        columns = [*names, "dirty"]
        objects = [{name: run.value(name) for name in columns} | {"dir": str(run.dir)} for run in runs]
        print(strict_json(objects, default=str))
    elif not every:
        print(f"no runs under {args.runs_dir} yet")
    elif not runs:
        print(f"no run fits {' '.join(args.filters)}; there are {len(every)} under {args.runs_dir}")
    else:
        print("\n".join(_lines(runs, names)))
    if args.journal is not None:
        count = Journal(args.journal, args.runs_dir).add(runs)
        say(f"{count} {'entry' if count == 1 else 'entries'} added to {args.journal}", stream=sys.stderr)
    return 0


def _lines(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    """The table as text, a line for each run, however long."""
    table = [list(names), *([cell(run, name) for name in names] for run in runs)]
    columns = list(zip(*table, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(text == NOTHING or _number(text) is not None for text in each[1:]) for each in columns]
    for row in table:
        cells = zip(row, widths, numeric, strict=True)
        yield "  ".join(f"{text:{'>' if right else '<'}{width}}" for text, width, right in cells).rstrip()


def _sorted(runs: Sequence[Run], key: str) -> list[Run]:
    """The runs by a value, numbers below texts, missing values last; `-key` is from high to low."""
    name = key.removeprefix("-")

    def rank(run: Run) -> tuple[int, Any]:
        value = run.values[name]
        return (0, value) if isinstance(value, int | float) else (1, text_of(value))

    present = [run for run in runs if run.value(name) is not None]
    lacking = [run for run in runs if run.value(name) is None]
    return sorted(present, key=rank, reverse=key[0] == "-") + lacking


def _matches(value: Any, text: str, argument: str) -> bool:
    sign = next((sign for sign in _COMPARISONS if text.startswith(sign)), None)
    bound = text.removeprefix(sign or "").strip()
    if sign in (None, "!="):
        return any(_equals(value, part.strip()) for part in (bound, *bound.split(","))) == (sign is None)
    if isinstance(value, str):
        return _COMPARISONS[sign](value, bound)
    numbers = _number(text_of(value)), _number(bound)
    if numbers[1] is None:
        raise ConfigError(f"{argument}: expected a number after {sign}")
    return None not in numbers and _COMPARISONS[sign](*numbers)


def _equals(value: Any, text: str) -> bool:
    shown = text_of(value)
    if not isinstance(value, str) and None not in (numbers := (_number(shown), _number(text))):
        return numbers[0] == numbers[1]
    return shown.replace(" ", "") == text.replace(" ", "") or fnmatchcase(shown, text)


def _number(text: str) -> int | float | None:
    """A number; whole ones exactly, since a float cannot hold every seed."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None
