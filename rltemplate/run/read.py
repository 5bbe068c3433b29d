"""Run folders, found and read. They may have been moved, damaged or made by an earlier version."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rltemplate.run import paths
from rltemplate.run.record import RunRecord
from rltemplate.types import ConfigError

Row = dict[str, float | None]  # of metrics.jsonl: env_steps, wall_time_s and metrics by name

_LONGEST_ID = 255  # characters; no file system has longer names


def find_run(text: str, runs_dir: Path, key: str = "run") -> Path:
    """The run folder that the word `key=text` names.

    `text` is a folder, an id, a unique part of an id, the run's git ref, `last` for the run that began last,
    or `best` for the finished run with the highest final return. Raises ConfigError.
    """
    folder, runs_dir = _expanded(text), _expanded(str(runs_dir))
    if _is(folder / paths.RECORD, Path.is_file):
        return folder.absolute()
    wanted = text.removeprefix(paths.REF_PREFIX).strip("/")
    records = runs_dir.glob(f"*/*/{paths.RECORD}") if _is(runs_dir, Path.is_dir) else ()
    known = {record.parent.name: record.parent for record in records}
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
    raise ConfigError(f"{key}={text}: {_why_none(folder, runs_dir)}{_instead(wanted, known)}")


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


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~somebody, whom this machine does not know
        return Path(text)


def _is(path: Path, kind: Callable[[Path], bool]) -> bool:
    try:
        return kind(path)
    except OSError:  # longer than any name of a file
        return False


def _why_none(folder: Path, runs_dir: Path) -> str:
    if _is(folder, Path.is_file):
        return "is a file, and no run folder"
    if _is(folder, Path.is_dir):
        return f"is a folder without {paths.RECORD}, and no run folder"
    if not _is(runs_dir, Path.is_dir):
        return f"there is no folder runs_dir={runs_dir}"
    return f"no such run under {runs_dir}"


def _instead(wanted: str, known: Collection[str]) -> str:
    """The id that is nearest to `wanted`, compared as a whole or by its last part."""
    ends = {name[-len(wanted) :]: name for name in sorted(known)} if wanted else {}
    near = difflib.get_close_matches(wanted[:_LONGEST_ID], [*known, *ends], n=1, cutoff=0.75)
    if near:
        return f"; did you mean {ends.get(near[0], near[0])}?"
    return (
        f"; the newest is {max(known)}" if known else "; expected a run's folder, or its id or a part of it"
    )


def find_run_dirs(pattern: str) -> list[Path]:
    """The run folders that match `runs=pattern` or one of its parts. Raises ConfigError for none."""
    parts = [part for part in pattern.split(",") if part] or [pattern]
    return list(dict.fromkeys(run_dir for part in parts for run_dir in _run_dirs(part)))


def _run_dirs(pattern: str) -> list[Path]:
    """Run folders of one pattern, sorted. It matches folders, else ids."""
    found = _matching(pattern, paths.RECORD) or _matching(f"runs/*/{pattern}", paths.RECORD)
    if not found:
        deeper = next((deep for deep in ("*", "*/*") if _matching(pattern, f"{deep}/{paths.RECORD}")), None)
        hint = f"; did you mean runs='{Path(pattern) / deeper}'?" if deeper else ""
        raise ConfigError(f"runs={pattern}: no run folders there{hint}")
    return [path.parent for path in found]


def _matching(pattern: str, below: str) -> list[Path]:
    try:
        wanted = Path(pattern).expanduser()
        root = Path(wanted.anchor or ".")
        return sorted(root.glob(f"{wanted.relative_to(root)}/{below}"))
    except ValueError as error:
        raise ConfigError(f"runs={pattern}: is no pattern of folders, {str(error).lower()}") from None
    except (OSError, RuntimeError):  # longer than any name, or ~somebody whom this machine does not know
        return []


def read_config(run_dir: Path) -> dict[str, Any]:
    """The run's configuration (nested) under present keys. Raises ConfigError if it cannot be read."""
    name = f"{run_dir.name}: {paths.CONFIG}"
    try:
        values = _parsed((run_dir / paths.CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{run_dir.name}: has no {paths.CONFIG}") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{name} cannot be read, {line}{error.problem or error.context}") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read, {_reason(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} holds no configuration")
    return values


def _parsed(text: str) -> Any:
    try:  # libyaml, which PyYAML's wheels have, is ten times as fast
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return yaml.safe_load(text)  # names the mistake and its place better


def parse_row(line: str | bytes) -> Row | None:
    """A line of `metrics.jsonl`; None if it is damaged."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and all(value is None or _is_number(value) for value in row.values())
    return row if whole else None


def rows_so_far(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run's `metrics.jsonl`, up to a torn line. Null is read as NaN."""
    rows: list[dict[str, float]] = []
    with contextlib.suppress(OSError):
        for line in (run_dir / paths.METRICS).read_bytes().splitlines():
            row = parse_row(line)
            if row is None:
                break
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def read_metrics(run_dir: Path) -> Iterator[Row]:
    """The rows of the run's `metrics.jsonl`. Raises ConfigError if it cannot be read."""
    name = f"{run_dir.name}: {paths.METRICS}"
    try:
        lines = (run_dir / paths.METRICS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"{run_dir.name}: has no {paths.METRICS}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read, {_reason(error)}") from None
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is None:
            where = f"{run_dir.name}: line {number} of {paths.METRICS}"
            raise ConfigError(f"{where} is damaged; expected names with numbers")
        yield row


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


def _reason(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
