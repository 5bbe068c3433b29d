"""Run folders, found and read. They may have been moved, damaged or made by an earlier version."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from runlab.config.texts import choose, nearest
from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.manifest import list_checkpoints, read_manifest
from runlab.run.record import FINISHED, RunRecord
from runlab.run.validation import Line, Missing, parse_yaml, read_bytes, read_text, typed

LAST = "last"  # in `checkpoint=`: the newest
Row = dict[str, float]  # of metrics.jsonl: env_steps, wall_time_s and metrics by name
_ROW = msgspec.json.Decoder(dict[str, Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | None])
_MAX_CONFIG_BYTES = 4_000_000
_MAX_METRICS_BYTES = 2_000_000_000


class _Algo(TypedDict):
    name: Line


class _Env(TypedDict):
    id: Line
    kwargs: NotRequired[dict[str, Any] | None]
    wrappers: NotRequired[dict[str, Any] | None]
    training_wrappers: NotRequired[dict[str, Any] | None]
    max_episode_steps: NotRequired[int | None]


class _Determinism(TypedDict):
    level: Line


class RecordedConfig(TypedDict):
    """The part of a configuration, of any version, that every reader of runs needs."""

    seed: int
    algo: _Algo
    env: _Env
    determinism: _Determinism
    total_env_steps: int
    logger: NotRequired[dict[str, Any]]


def find_run(text: str, runs_dir: Path, key: str = "run") -> Path:
    """The run folder that the argument `key=text` names.

    `text` is a folder, an id, a unique part of an id, the run's git ref, `last` for the run that began last,
    or `best` for the finished run with the highest final return. Raises ConfigError.
    """
    wanted = text.removeprefix(paths.REF_PREFIX).strip("/")
    folder, runs_dir = (Path(os.path.expanduser(path)) for path in (text, runs_dir))  # noqa: PTH111
    if os.path.isfile(folder / paths.RECORD):  # noqa: PTH113 - never raises, as expanduser above
        return folder.absolute()
    runs = {record.parent.name: record.parent for record in runs_dir.glob(f"*/*/{paths.RECORD}")}
    if wanted not in runs and text in ("last", "best"):
        return _last_or_best(text, list(runs.values()), f"{key}={text}: no run under {runs_dir}").absolute()
    matches = [wanted] if wanted in runs else sorted(name for name in runs if wanted and wanted in name)
    if len(matches) == 1:
        return runs[matches[0]].absolute()
    if matches:
        problem = f"in the ids of {len(matches)} runs, the last are {', '.join(matches[-3:])}; use more of it"
    elif os.path.exists(folder):  # noqa: PTH110 - never raises
        problem = f"is no run folder, it has no {paths.RECORD}"
    else:
        newest = "expected a run's folder, its id or a part of it"
        if runs:
            written = {name: (run_dir / paths.RECORD).stat().st_mtime for name, run_dir in runs.items()}
            newest = f"the newest is {max(written, key=written.__getitem__)}"
        problem = f"no such run under {runs_dir}; {nearest(wanted, runs.keys()).strip() or newest}"
    raise ConfigError(f"{key}={text[:100]}: {problem}")


def raw_config(run_dir: Path, note: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The values of a run's `config.yaml`, nested; if it is lost, those in its newest whole manifest.

    `note` gets a line about a lost one. Raises ConfigError in a line if neither can be read.
    """
    path = run_dir / paths.CONFIG
    try:
        values = parse_yaml(read_text(path, most=_MAX_CONFIG_BYTES), str(path))
        typed(values, RecordedConfig, str(path))
    except ConfigError as error:
        for checkpoint in reversed(list_checkpoints(run_dir)):
            with contextlib.suppress(ConfigError):
                values = read_manifest(checkpoint).config
                typed(values, RecordedConfig, str(checkpoint))
                note(f"{error}; the configuration in {checkpoint.name} is taken")
                return values
        raise
    return values  # type: ignore[no-any-return]


def _last_or_best(text: str, run_dirs: list[Path], none: str) -> Path:
    """The run that began last, or the finished one with the highest final return, which is printed."""
    values: dict[Path, Any] = {}
    for run_dir in run_dirs:
        with contextlib.suppress(ConfigError):
            record = RunRecord.read(run_dir)
            final = record.final_metrics.get("eval/return", record.final_metrics.get("episode/return"))
            if text == "last":
                values[run_dir] = record.started_at or ""
            elif record.status == FINISHED and final is not None:
                values[run_dir] = final
    if not values:
        lacking = "has a readable record" if text == "last" else "has finished with a return"
        raise ConfigError(f"{none} {lacking}")
    chosen = max(values, key=lambda run_dir: (values[run_dir], run_dir.name))
    if text == "best":
        groups = ", ".join(sorted({run_dir.parent.name for run_dir in values}))
        among = f"the highest final return of {len(values)} finished runs ({groups})"
        print(f"note: best is {chosen.name} with {values[chosen]:.6g}, {among}", file=sys.stderr)
    return chosen


def find_run_dirs(pattern: str) -> list[Path]:
    """The run folders that match `runs=pattern` or one of its parts (`find_parts`), each once."""
    return list(dict.fromkeys(run_dir for part in find_parts(pattern) for run_dir in part))


def find_parts(pattern: str) -> list[list[Path]]:
    """The run folders of each part of `runs=pattern`: folders, else ids, each part sorted.

    A pattern that matches as a whole is one part: a comma may belong to a path. Raises ConfigError for a
    part that matches none.
    """
    parts = list[list[Path]]()
    for part in [pattern] if "," in pattern and _runs_in(pattern) else pattern.split(","):
        matched = _runs_in(part) or _runs_in(f"runs/*/{part}")
        if not matched:
            deeper = next((deep for deep in (f"{part}/*", f"{part}/*/*") if _runs_in(deep)), None)
            hint = f"; did you mean runs='{deeper}'?" if deeper else ""
            raise ConfigError(f"runs={part}: no run folders there{hint}")
        parts.append(matched)
    return parts


def _runs_in(pattern: str) -> list[Path]:
    pattern = os.path.expanduser(f"{pattern}/{paths.RECORD}")  # noqa: PTH111 - never raises
    # First as a pattern. If nothing matches, brackets may be parts of names.
    records = glob.glob(pattern) or glob.glob(pattern.replace("[", "[[]"))  # noqa: PTH207 - absolute ones too
    return [Path(name).parent for name in sorted(records)]


def read_metrics(run_dir: Path) -> list[Row]:
    """The rows of the run's `metrics.jsonl` up to a torn last line; none if the run wrote no row.

    Null means a number that is not finite, and is read as NaN. Raises ConfigError if the file cannot
    be read.
    """
    name = f"{run_dir.name}: {paths.METRICS}"
    try:
        lines = read_bytes(run_dir / paths.METRICS, name, _MAX_METRICS_BYTES).split(b"\n")[:-1]
    except Missing:
        return []
    rows = []
    for number, row in enumerate(map(parse_row, lines), start=1):
        if row is None:
            raise ConfigError(
                f"{name}: line {number:,} is damaged; expected env_steps and other names with numbers"
            )
        rows.append({key: math.nan if value is None else value for key, value in row.items()})
    return rows


def best_steps(run_dir: Path, *more: int) -> int | None:
    """Environment steps of the kept checkpoint with the highest `eval/return`, the first of several such.

    Rows after `more` steps count as well. None without an evaluation at any of them.
    """
    kept = {*map(paths.steps_of, list_checkpoints(run_dir)), *more}
    returns = {int(row["env_steps"]): row.get("eval/return", math.nan) for row in read_metrics(run_dir)}
    found = [steps for steps, value in returns.items() if steps in kept and not math.isnan(value)]
    return max(found, key=returns.__getitem__, default=None)


def no_checkpoint(run_dir: Path) -> ConfigError:
    """The answer to who asks for the policy of a run without a checkpoint."""
    never = raw_config(run_dir).get("checkpoint_every") == 0
    return ConfigError(
        f"{run_dir} has no checkpoint{': it ran with checkpoint_every=0' if never else ' yet'}"
    )


def chosen_checkpoints(run_dir: Path, wanted: str, *more: str) -> list[Path]:
    """The checkpoints that `checkpoint=` names, the oldest first; each name in `more` names all of them."""
    if not (checkpoints := list_checkpoints(run_dir)):
        raise no_checkpoint(run_dir)
    choices = {LAST: checkpoints[-1:], "best": [], **dict.fromkeys(more, checkpoints)}
    choices |= {str(paths.steps_of(path)): [path] for path in checkpoints}
    if wanted == "best":
        best = best_steps(run_dir) if raw_config(run_dir).get("keep_best") else None
        if best is None:
            raise ConfigError(
                f"checkpoint=best: {run_dir.name} has kept none; it needs keep_best=true in training"
            )
        wanted = str(best)
    if wanted not in choices:
        raise ConfigError(f"checkpoint={wanted}: {choose(wanted, choices)}")
    return choices[wanted]


def parse_row(line: bytes) -> dict[str, float | None] | None:
    """A line of `metrics.jsonl`; None if it is damaged."""
    try:
        row = _ROW.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return row if isinstance(row.get("env_steps"), int) else None


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Single values with their dotted keys. Wrappers are one value, because their order counts."""
    for name, value in values.items():
        if value and f"{prefix}{name}" in ("env.wrappers", "env.training_wrappers"):
            yield f"{prefix}{name}", [{wrapper: arguments} for wrapper, arguments in value.items()]
        elif isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
