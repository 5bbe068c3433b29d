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
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from rltemplate.analysis.runs import COLUMNS, MISSING, Run, load_runs, text_of
from rltemplate.run import paths
from rltemplate.run.read import nearest_key
from rltemplate.types import ConfigError

# The usual columns; `dirty` is a star behind the commit.
SHOWN = ("id", "algo", "env", "seed", "level", "status", "steps", "return", "started", "commit")
NOTHING = "-"  # in the place of a value that a run does not have
_BOLD = 1
_COLOURS = {"finished": 32, "failed": 31, "interrupted": 33, "running": 36}
# The longer ones first, for they begin like the others.
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
# A folder that has one of these and no record is a damaged run.
_OF_A_RUN = (paths.CONFIG, paths.METRICS, paths.CHECKPOINTS, paths.TRACE)


def find_runs(runs_dir: Path) -> tuple[list[Run], list[str]]:
    """All runs in `runs_dir/<group>/`, the oldest first, and a line for each damaged one."""
    folders = sorted(folder for folder in runs_dir.glob("*/*") if folder.is_dir())
    known = [folder for folder in folders if (folder / paths.RECORD).exists()]
    runs, problems = load_runs(known)
    damaged = [
        folder
        for folder in folders
        if folder not in known and any((folder / name).exists() for name in _OF_A_RUN)
    ]
    problems += [f"{folder} has no {paths.RECORD}" for folder in damaged]
    return sorted(runs, key=lambda run: (run.record.started_at or "~", run.id)), problems


def select(runs: Sequence[Run], filters: Sequence[tuple[str, str]]) -> list[Run]:
    """The runs that match every filter, each a name and a condition.

    Raises ConfigError, with the nearest name, if none of the runs has a value under a name.
    """
    for key, text in filters:
        _check_name(runs, key, f"{key}={text}")
        _check_bound(runs, key, text)
    return [run for run in runs if all(_matches(run.value(key), text) for key, text in filters)]


def order(runs: Sequence[Run], key: str) -> list[Run]:
    """The runs by a value, numbers before texts and missing values last; `-key` is from high to low.

    Raises ConfigError, with the nearest name, if none of them has it.
    """
    name = key.removeprefix("-")
    _check_name(runs, name, f"sort={key}")
    values = [(run.value(name), run) for run in runs]
    there = [(value, run) for value, run in values if value is not MISSING and value is not None]
    there.sort(key=lambda pair: _rank(pair[0]), reverse=key.startswith("-"))
    return [run for _, run in there] + [run for value, run in values if value is MISSING or value is None]


def columns(runs: Sequence[Run], more: Sequence[str]) -> list[str]:
    """Names of the columns: the usual ones and `more`. Raises ConfigError if no run has one of those."""
    for name in more:
        _check_name(runs, name, f"show={name}")
    return list(dict.fromkeys([*SHOWN, *more]))


def lines(runs: Sequence[Run], names: Sequence[str], colour: bool = False) -> Iterator[str]:
    """The table as text, a line for each run, however long; with `colour` for a terminal."""
    table = [list(names), *([_cell(run, name) for name in names] for run in runs)]
    cells = list(zip(*table, strict=True))  # by column
    widths = [max(map(len, column)) for column in cells]
    numeric = [all(text == NOTHING or _number(text) is not None for text in column[1:]) for column in cells]
    for number, row in enumerate(table):
        padded = []
        for text, width, to_right in zip(row, widths, numeric, strict=True):
            cell = text.rjust(width) if to_right else text.ljust(width)
            code = (_BOLD if number == 0 else _COLOURS.get(text)) if colour else None
            padded.append(f"\x1b[{code}m{cell}\x1b[0m" if code else cell)
        yield "  ".join(padded).rstrip()


def objects(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """The runs for programs: values of the table, `dirty`, and the folder as `dir`; None where missing."""
    found: list[dict[str, Any]] = []
    for run in runs:
        values = {name: run.value(name) for name in dict.fromkeys([*names, "dirty"])}
        found.append({k: None if v is MISSING else v for k, v in values.items()} | {"dir": str(run.dir)})
    return found


# --- Names -----------------------------------------------------------------------------------------------


def _check_name(runs: Sequence[Run], name: str, word: str) -> None:
    """Raise ConfigError unless one of the runs has a single value under the name."""
    found = [value for value in (run.value(name) for run in runs) if value is not MISSING]
    if any(not isinstance(value, Mapping) for value in found) or not runs:
        return
    known = dict.fromkeys(key for run in runs for key in run.keys())  # noqa: SIM118 - not of a dict
    if found:
        below = next((key for key in known if key.startswith(f"{name}.")), None)
        example = f", such as {below}" if below else ""
        raise ConfigError(f"{word}: {name} holds several values; expected one of them{example}")
    near = nearest_key(name, known)
    hint = f"did you mean {near}? " if near else ""
    raise ConfigError(
        f"{word}: no run has {name}; {hint}allowed: {', '.join(COLUMNS)}, and any key of a configuration or "
        "a record, or a metric"
    )


def _check_bound(runs: Sequence[Run], key: str, text: str) -> None:
    """Raise ConfigError if a comparison has nothing behind it, or a text where all values are numbers."""
    comparison, bound = _comparison(text)
    if comparison is None:
        return
    if not bound:
        raise ConfigError(f"{key}={text}: a value is missing after {comparison}")
    if comparison != "!=" and _number(bound) is None:
        values = [run.value(key) for run in runs]
        if not any(isinstance(value, str) for value in values):
            raise ConfigError(f"{key}={text}: expected a number after {comparison}")


# --- Values ----------------------------------------------------------------------------------------------


def _comparison(text: str) -> tuple[str | None, str]:
    sign = next((sign for sign in _COMPARISONS if text.startswith(sign)), None)
    return sign, text.removeprefix(sign or "").strip()


def _matches(value: Any, text: str) -> bool:
    if value is MISSING:
        return False
    comparison, bound = _comparison(text)
    if comparison in (None, "!="):
        equal = any(_equals(value, part) for part in (bound, *_split(bound)))
        return equal == (comparison is None)
    if isinstance(value, str):
        return _COMPARISONS[comparison](value, bound)
    number = _number(bound)
    return _is_number(value) and number is not None and _COMPARISONS[comparison](value, number)


def _split(text: str) -> list[str]:
    """The parts between commas that are not within brackets."""
    return [part.strip() for part in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text)]


def _equals(value: Any, text: str) -> bool:
    if _is_number(value) and (number := _number(text)) is not None:
        return bool(value == number)
    if not isinstance(value, str):
        with contextlib.suppress(yaml.YAMLError, ValueError):  # no value of YAML, but perhaps a pattern
            if text_of(yaml.safe_load(text)) == text_of(value):
                return True
    return text_of(value) == text or fnmatchcase(text_of(value), text)


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


def _cell(run: Run, name: str) -> str:
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
