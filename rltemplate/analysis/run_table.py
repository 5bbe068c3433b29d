"""The table of `make runs`: selection, order and columns of recorded runs.

A filter is a name that `Run.value` knows and a condition on its value:

* a value: `env=Hopper`, `algo.gamma=0.99`, `dirty=true`, `note=null`, `algo.hidden_sizes=[64,64]`. Numbers
  are compared as numbers (`total_env_steps=1e6`), everything else as text;
* a pattern with `*`, `?` or `[...]`, as in file names: `env=Half*`, `id=*seed3*`;
* several of these with commas, one of which must match: `seed=1,2`;
* a comparison: `return='>3000'`, `total_env_steps='>=1e6'`, `status='!=finished'`. Texts are compared with
  texts, as in `started='>=2026-11-21'`.

A run without such a value matches no condition, `!=` included.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rltemplate.analysis.runs import MISSING, Run, check_name, load_runs, text_of
from rltemplate.run import paths

# The usual columns; `dirty` is a star behind the commit.
SHOWN = ("id", "algo", "env", "seed", "level", "status", "steps", "return", "started", "commit")
NOTHING = "-"  # in the place of a value that a run does not have
_COLOURS = {"finished": 32, "failed": 31, "interrupted": 33, "running": 36}
# The longer ones first, for they begin like the others.
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def find_runs(runs_dir: Path) -> tuple[list[Run], list[str]]:
    """All runs in `runs_dir/<group>/`, the oldest first, and a line for each damaged one."""
    names = (paths.RECORD, paths.CONFIG)
    folders = sorted({path.parent for name in names for path in runs_dir.glob(f"*/*/{name}")})
    runs, problems = load_runs(folders)
    return sorted(runs, key=lambda run: (run.record.started_at or "~", run.id)), problems


def select(runs: Sequence[Run], filters: Sequence[tuple[str, str]]) -> list[Run]:
    """The runs that match every filter, each a name and a condition.

    Raises ConfigError, with the nearest name, if none of the runs has a value under a name.
    """
    for key, text in filters:
        check_name(runs, key, f"{key}={text}")
    return [run for run in runs if all(_matches(run.value(key), text) for key, text in filters)]


def order(runs: Sequence[Run], key: str) -> list[Run]:
    """The runs by a value, numbers before texts and missing values last; `-key` is from high to low.

    Raises ConfigError, with the nearest name, if none of them has it.
    """
    name = key.removeprefix("-")
    check_name(runs, name, f"sort={key}")
    known = [run for run in runs if run.value(name) not in (MISSING, None)]
    found = sorted(known, key=lambda run: _rank(run.value(name)), reverse=key.startswith("-"))
    return found + [run for run in runs if run.value(name) in (MISSING, None)]


def lines(runs: Sequence[Run], names: Sequence[str], colour: bool = False) -> Iterator[str]:
    """The table as text, a line for each run, however long; with `colour` for a terminal."""
    table = [list(names), *([cell(run, name) for name in names] for run in runs)]
    columns = list(zip(*table, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(text == NOTHING or _number(text) is not None for text in each[1:]) for each in columns]
    for number, row in enumerate(table):
        padded = []
        for text, width, to_right in zip(row, widths, numeric, strict=True):
            shown = text.rjust(width) if to_right else text.ljust(width)
            code = (1 if number == 0 else _COLOURS.get(text)) if colour else None  # 1 is bold
            padded.append(f"\x1b[{code}m{shown}\x1b[0m" if code else shown)
        yield "  ".join(padded).rstrip()


def objects(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """The runs for programs: values of the table, `dirty`, and the folder as `dir`; None where missing."""
    found: list[dict[str, Any]] = []
    for run in runs:
        values = {name: run.value(name) for name in dict.fromkeys([*names, "dirty"])}
        found.append({k: None if v is MISSING else v for k, v in values.items()} | {"dir": str(run.dir)})
    return found


def cell(run: Run, name: str) -> str:
    """A value as the table shows it."""
    value = run.value(name)
    if value is MISSING or value is None:
        return NOTHING
    if name == "started":
        return str(value)[:16].replace("T", " ")
    if name == "commit":
        return f"{value}{'*' if run.value('dirty') else ''}"
    if isinstance(value, float):
        # The digits by which returns are compared, and no powers of ten below a million.
        return f"{value:.1f}" if 1000 <= abs(value) < 1e6 else f"{value:.5g}"
    text = text_of(value)
    return text if text.isprintable() else repr(text)


def _matches(value: Any, text: str) -> bool:
    if value is MISSING:
        return False
    sign = next((sign for sign in _COMPARISONS if text.startswith(sign)), None)
    bound = text.removeprefix(sign or "").strip()
    if sign in (None, "!="):
        # The parts between commas that are not within brackets.
        parts = [part.strip() for part in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", bound)]
        return any(_equals(value, part) for part in (bound, *parts)) == (sign is None)
    if isinstance(value, str):
        return _COMPARISONS[sign](value, bound)
    number = _number(bound)
    return _is_number(value) and number is not None and _COMPARISONS[sign](value, number)


def _equals(value: Any, text: str) -> bool:
    if _is_number(value) and (number := _number(text)) is not None:
        return bool(value == number)
    shown = text_of(value)
    return shown.replace(" ", "") == text.replace(" ", "") or fnmatchcase(shown, text)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(text: str) -> int | float | None:
    """A whole number exactly, for not every seed is a float."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None


def _rank(value: Any) -> tuple[int, Any]:
    """A sort key for values of any type: numbers by size, then texts."""
    return (0, value) if isinstance(value, int | float) else (1, text_of(value))
