"""Which of many runs, in which order, with what of each: the table of `make runs`.

A filter is a name that `Run.value` knows and what its value must be:

* a value: `env=Hopper`, `algo.gamma=0.99`, `dirty=true`, `note=null`, `algo.hidden_sizes=[64,64]`. Numbers
  are compared as numbers (`total_env_steps=1e6`), everything else as text;
* a pattern with `*`, `?` or `[...]`, as file names have them: `env=Half*`, `id=*seed3*`;
* several of these with commas, one of which must fit: `seed=1,2`;
* a comparison: `return='>3000'`, `total_env_steps='>=1e6'`, `status='!=finished'`. Texts are compared with
  texts, as in `started='>=2026-11-21'`.

A run that has no such value fits none of them, `!=` included.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from rltemplate.analysis.runs import COLUMNS, MISSING, Run, load_runs, text_of
from rltemplate.run import paths
from rltemplate.run.read import nearest_key
from rltemplate.types import ConfigError

# Shown where nothing else is asked for; `dirty` is a star behind the commit.
SHOWN = ("id", "algo", "env", "seed", "level", "status", "steps", "return", "started", "commit")
NOTHING = "-"  # in the place of a value that a run does not have
# The longer ones first, for they begin like the others.
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
# In a folder that is no run any more one of these may be left.
_OF_A_RUN = (paths.CONFIG, paths.METRICS, paths.CHECKPOINTS, paths.TRACE)


def find_runs(runs_dir: Path) -> tuple[list[Run], list[str]]:
    """All runs in `runs_dir/<group>/`, in the order of their beginning, and a line for each damaged one."""
    folders = sorted(folder for folder in runs_dir.glob("*/*") if folder.is_dir())
    known = [folder for folder in folders if (folder / paths.RECORD).exists()]
    runs, problems = load_runs(known)
    problems += [
        f"{folder} has no {paths.RECORD}"
        for folder in folders
        if folder not in known and any((folder / name).exists() for name in _OF_A_RUN)
    ]
    return sorted(runs, key=lambda run: (str(run.record.get("started_at") or "~"), run.id)), problems


def select(runs: Sequence[Run], filters: Sequence[tuple[str, str]]) -> list[Run]:
    """The runs that fit every filter, each a name and what its value must be.

    Raises ConfigError, with the nearest name, if none of the runs has a value under a name.
    """
    for key, text in filters:
        _check_name(runs, key, f"{key}={text}")
        _check_bound(runs, key, text)
    return [run for run in runs if all(_fits(run.value(key), text) for key, text in filters)]


def order(runs: Sequence[Run], key: str) -> list[Run]:
    """The runs by a value, numbers before texts and those without the value last; `-key` is from high to low.

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


def cells(runs: Sequence[Run], names: Sequence[str]) -> list[list[str]]:
    """What the table has in its rows, as text; `-` where a run has no such value."""
    return [[_cell(run, name) for name in names] for run in runs]


def lines(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The table as text, a line for each row, however long; the values stand below the names."""
    table = [names, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(names))]
    right = [is_numeric(rows, i) for i in range(len(names))]
    for row in table:
        padded = (
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        )
        yield "  ".join(padded).rstrip()


def is_numeric(rows: Sequence[Sequence[str]], column: int) -> bool:
    """Whether a column holds numbers, which are easier to compare at the right."""
    texts = [row[column] for row in rows if row[column] != NOTHING]
    return bool(texts) and all(_number(text) is not None for text in texts)


def objects(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """The runs for programs: what the table shows, as it is, with `dirty` and the folder as `dir`.

    All else lies in `dir`, and `show=` takes any of it up here. None where a run has no such value.
    """
    wanted = list(dict.fromkeys([*names, "dirty"]))
    found: list[dict[str, Any]] = []
    for run in runs:
        values = {name: run.value(name) for name in wanted}
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


def _fits(value: Any, text: str) -> bool:
    if value is MISSING:
        return False
    comparison, bound = _comparison(text)
    if comparison is None:
        return _is_one_of(value, text)
    if comparison == "!=":
        return not _is_one_of(value, bound)
    if isinstance(value, str):
        return _COMPARISONS[comparison](value, bound)
    number = _number(bound)
    return _is_number(value) and number is not None and _COMPARISONS[comparison](value, number)


def _is_one_of(value: Any, text: str) -> bool:
    return _is(value, text) or any(_is(value, part) for part in _split(text))


def _split(text: str) -> list[str]:
    """The parts between commas, but for those within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _is(value: Any, text: str) -> bool:
    if _is_number(value):
        number = _number(text)
        if number is not None:
            return bool(value == number)
    if not isinstance(value, str):
        try:
            if text_of(yaml.safe_load(text)) == text_of(value):
                return True
        except (yaml.YAMLError, ValueError):  # no value of YAML, but perhaps a pattern
            pass
    shown = text_of(value)
    return shown == text or (any(sign in text for sign in "*?[") and fnmatchcase(shown, text))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(text: str) -> int | float | None:
    """Exact where it is a whole number: not every seed is a float."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _rank(value: Any) -> tuple[int, Any]:
    """A key that can be compared whatever the values are: numbers by size, then texts."""
    if isinstance(value, int | float):
        return (0, value)
    return (1, text_of(value))


def _cell(run: Run, name: str) -> str:
    value = run.value(name)
    if value is MISSING or value is None:
        return NOTHING
    if name == "started":
        return str(value)[:16].replace("T", " ")
    if name == "commit":
        return f"{value}{'*' if run.value('dirty') else ''}"
    if isinstance(value, float):
        # As many digits as anybody compares returns by, and never in powers of ten below a million.
        return f"{value:.1f}" if 1000 <= abs(value) < 1e6 else f"{value:.5g}"
    text = text_of(value)
    return text if text.isprintable() else repr(text)
