"""Run folders, found and read. They may have been moved, damaged or made by an earlier version."""

from __future__ import annotations

import contextlib
import difflib
import glob
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rltemplate.run import paths
from rltemplate.run.record import RunRecord
from rltemplate.types import ConfigError

Row = dict[str, float | None]  # of metrics.jsonl: env_steps, wall_time_s and metrics by name


def find_run(text: str, runs_dir: Path, key: str = "run") -> Path:
    """The run folder that the argument `key=text` names.

    `text` is a folder, an id, a unique part of an id, the run's git ref, `last` for the run that began last,
    or `best` for the finished run with the highest final return. Raises ConfigError.
    """
    wanted = text.removeprefix(paths.REF_PREFIX).strip("/")
    try:
        folder, runs_dir = Path(text).expanduser(), runs_dir.expanduser()
        if (folder / paths.RECORD).is_file():
            return folder.absolute()
        is_there = folder.exists()
        known = {record.parent.name: record.parent for record in runs_dir.glob(f"*/*/{paths.RECORD}")}
    except (OSError, RuntimeError) as error:  # longer than any name, or ~somebody without a home here
        raise ConfigError(f"{key}={text[:100]}: no such run, {error.args[-1]}") from None
    if wanted in known:
        return known[wanted].absolute()
    if text in ("last", "best"):
        recorded = _recorded(known.values())
        if not recorded:
            raise ConfigError(f"{key}={text}: no run under {runs_dir} has a readable record")
        return (_last(recorded) if text == "last" else _best(recorded, key)).absolute()
    matches = sorted(name for name in known if wanted and wanted in name)
    if len(matches) == 1:
        return known[matches[0]].absolute()
    if matches:
        last = ", ".join(matches[-3:])
        raise ConfigError(
            f"{key}={text}: in the ids of {len(matches)} runs, the last are {last}; use more of it"
        )
    if is_there:
        raise ConfigError(f"{key}={text}: is no run folder, it has no {paths.RECORD}")
    raise ConfigError(f"{key}={text}: no such run under {runs_dir}; {_instead(wanted, known)}")


def _last(records: Mapping[Path, RunRecord]) -> Path:
    return max(records, key=lambda run_dir: (records[run_dir].started_at or "", run_dir.name))


def _best(records: Mapping[Path, RunRecord], key: str) -> Path:
    """The finished run with the highest final return, which is said in a line with its rivals."""
    returns = {
        run_dir: value
        for run_dir, record in records.items()
        if record.status == "finished" and (value := final_return(record)) is not None
    }
    if not returns:
        raise ConfigError(f"{key}=best: no finished run has a return")
    best = max(returns, key=lambda run_dir: returns[run_dir])
    groups = ", ".join(sorted({run_dir.parent.name for run_dir in returns}))
    among = f"the highest final return of {len(returns)} finished runs ({groups})"
    print(f"note: {key}=best is {best.name} with {returns[best]:.6g}, {among}", file=sys.stderr)
    return best


def _recorded(run_dirs: Iterable[Path]) -> dict[Path, RunRecord]:
    """The records that can be read, by folder."""
    records = {}
    for run_dir in run_dirs:
        with contextlib.suppress(ConfigError):
            records[run_dir] = RunRecord.read(run_dir)
    return records


def final_return(record: RunRecord) -> float | None:
    """The mean return of the last evaluation, or of the last episodes where there was none."""
    value = record.final_metrics.get("eval/return", record.final_metrics.get("episode/return"))
    return value if _is_number(value) else None


def _instead(wanted: str, known: Collection[str]) -> str:
    """The id that is nearest to `wanted`, compared as a whole or by its last part."""
    ends = {name[-len(wanted) :]: name for name in sorted(known)} if wanted else {}
    near = difflib.get_close_matches(wanted[:100], [*known, *ends], n=1, cutoff=0.75)
    if near:
        return f"did you mean {ends.get(near[0], near[0])}?"
    return f"the newest is {max(known)}" if known else "expected a run's folder, or its id or a part of it"


def find_run_dirs(pattern: str) -> list[Path]:
    """The run folders that match `runs=pattern` or one of its parts: folders, else ids, each part sorted.

    Raises ConfigError for a part that matches none.
    """
    found: dict[Path, None] = {}
    for part in pattern.split(","):
        matched = _runs_in(part) or _runs_in(f"runs/*/{part}")
        if not matched:
            deeper = next((deep for deep in (f"{part}/*", f"{part}/*/*") if _runs_in(deep)), None)
            hint = f"; did you mean runs='{deeper}'?" if deeper else ""
            raise ConfigError(f"runs={part}: no run folders there{hint}")
        found |= dict.fromkeys(matched)
    return list(found)


def _runs_in(pattern: str) -> list[Path]:
    pattern = os.path.expanduser(f"{pattern}/{paths.RECORD}")  # noqa: PTH111 - never raises
    return [Path(name).parent for name in sorted(glob.glob(pattern))]  # noqa: PTH207 - absolute ones too


def read_config(run_dir: Path) -> dict[str, Any]:
    """The run's configuration (nested) under present keys. Raises ConfigError if it cannot be read."""
    try:
        # libyaml, which PyYAML's wheels have, is ten times as fast.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        values = yaml.load((run_dir / paths.CONFIG).read_text(encoding="utf-8"), Loader=loader)
    except FileNotFoundError:
        raise ConfigError(f"{run_dir.name}: has no {paths.CONFIG}") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{run_dir.name}: {paths.CONFIG} cannot be read, {said}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{run_dir.name}: {paths.CONFIG} holds no configuration")
    return values


def read_metrics(run_dir: Path) -> list[Row]:
    """The rows of the run's `metrics.jsonl` up to a torn last line; none if the run wrote no row.

    Raises ConfigError if the file cannot be read.
    """
    name = f"{run_dir.name}: {paths.METRICS}"
    try:
        lines = (run_dir / paths.METRICS).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{name} cannot be read, {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if (row := parse_row(line)) is None:
            raise ConfigError(f"{name}: line {number} is damaged; expected names with numbers")
        rows.append(row)
    return rows


def parse_row(line: bytes) -> Row | None:
    """A line of `metrics.jsonl`; None if it is damaged."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and all(value is None or _is_number(value) for value in row.values())
    return row if whole else None


def rows_so_far(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run that may have none yet. Null is read as NaN."""
    return [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in read_metrics(run_dir)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def nearest_key(wrong: str, values: Mapping[str, Any]) -> str | None:
    """The dotted key with a single value that is most like `wrong`, or has the same last part."""
    keys = [key for key, _ in leaves(values)]
    same_end = [key for key in keys if key.rpartition(".")[2] == wrong.rpartition(".")[2]]
    return next(iter([*same_end, *difflib.get_close_matches(wrong[:100], keys, n=1)]), None)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Single values with their dotted keys."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
