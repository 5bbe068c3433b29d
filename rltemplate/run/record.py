"""`record.json`: what a run was, on what it ran and how it ended.

The file is whole at any moment (written aside, then put in place) and strict JSON: numbers that JSON does
not have become null. Times are UTC; `duration_s` comes from a clock that nobody can set.
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rltemplate.run.git.snapshot import GitRecord
from rltemplate.run.lines import replace_text
from rltemplate.run.paths import RECORD
from rltemplate.types import ConfigError

SCHEMA_VERSION = 1
RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"
FINAL_STATUSES = (FINISHED, FAILED, INTERRUPTED)

# Command line, host and process are left out of an outcome, which is pushed with the run's ref.
_PRIVATE = ("command_line", "working_directory", "pid", "hostname", "sweep", "outcome_not_recorded")
_PRIVATE_OF_A_PART = ("command_line", "pid", "hostname", "config_digest", "interrupted_at")


@dataclass(slots=True, kw_only=True)
class SweepMembership:
    """The sweep that a run belongs to: its id, its folder and the number of the job."""

    id: str = ""
    dir: str = ""
    job: int = 0


@dataclass(slots=True, kw_only=True)
class DeterminismFacts:
    """The level of a run, its settings as read back from the libraries, and the checks that were made."""

    level: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TraceFacts:
    """The chain digest at the end of a run's trace, and the number of iterations in it."""

    digest: str = ""
    iterations: int = 0


@dataclass(slots=True, kw_only=True)
class ResumedPart:
    """One resume of a run: from where, after what, and what had changed since the run began."""

    started_at: str | None = None
    pid: int | None = None
    hostname: str | None = None
    command_line: list[str] = field(default_factory=list)
    env_steps: int = 0
    checkpoint: str | None = None
    interruption: str | None = None
    error: str | None = None
    interrupted_at: str | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commit: str | None = None
    git_problem: str | None = None
    config_digest: str | None = None


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One run. Facts that an older version did not record have their defaults."""

    schema: int = SCHEMA_VERSION
    id: str
    status: str
    command_line: list[str] = field(default_factory=list)
    working_directory: str | None = None
    started_at: str | None = None
    pid: int | None = None
    hostname: str | None = None
    ended_at: str | None = None
    duration_s: float | None = None
    final_metrics: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None
    trace: TraceFacts | None = None
    resumed: list[ResumedPart] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    sweep: SweepMembership | None = None
    git: GitRecord = field(default_factory=GitRecord)
    config_digest: str | None = None  # of the configuration that decides the run
    determinism: DeterminismFacts = field(default_factory=DeterminismFacts)
    environment: dict[str, str] = field(default_factory=dict)  # variables that may change bits
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    outcome_not_recorded: str | None = None  # why the run's ref does not hold its end
    left_out: dict[str, str] = field(default_factory=dict)  # files that its ref does not hold, and why

    @classmethod
    def read(cls, run_dir: Path) -> RunRecord:
        """The record of the run in a folder. Raises ConfigError if there is none or it is damaged."""
        path = run_dir / RECORD
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{run_dir} is no run folder: it has no {RECORD}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        return cls.parse(text, str(path), run_dir.name)

    @classmethod
    def parse(cls, text: str, name: str, run_id: str | None = None) -> RunRecord:
        """The record in `text`, called `name` in errors; `run_id` is its id where it does not say its own."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{name} is no record: it holds no JSON object")
        if (schema := values.get("schema")) != SCHEMA_VERSION:
            raise ConfigError(f"{name} has schema {schema!r}, but this version reads schema {SCHEMA_VERSION}")
        known = values if run_id is None else {"id": run_id, **values}
        return _parsed(cls, known, f"{name}: ")  # type: ignore[no-any-return]

    def write(self, run_dir: Path) -> None:
        """Put the record in place in one step. Raises OSError if the disk does not take it."""
        replace_text(run_dir / RECORD, [_strict_json(asdict(self))])

    def outcome(self, left_out: Mapping[str, str]) -> str:
        """The record as JSON for the run's ref, which is read where there is no run folder.

        `left_out` says, by name, why a file does not lie beside it.
        """
        chosen = {**asdict(self), "left_out": dict(left_out)}
        for part in chosen["resumed"]:
            for name in _PRIVATE_OF_A_PART:
                del part[name]
        return _strict_json({name: value for name, value in chosen.items() if name not in _PRIVATE})


def this_process() -> dict[str, Any]:
    """The fields of a record, or of a resumed part, about the process that writes it."""
    return {"started_at": utc_now(), "pid": os.getpid(), "hostname": platform.node()}


def utc_now() -> str:
    """The time as records have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _strict_json(value: Any) -> str:
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """`value` with None in the place of NaN and infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _parsed(kind: Any, value: Any, name: str) -> Any:
    """A value read from JSON as the type `kind`. Raises ConfigError if it is of another one."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # always T | None
        return None if value is None else _parsed(inner[0], value, name)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, Mapping):
        hints = _hints(kind)
        # Older versions wrote null where there was nothing yet.
        given = {key: part for key, part in value.items() if key in hints and part is not None}
        if lacking := [key for key in ("id", "status") if kind is RunRecord and key not in given]:
            raise ConfigError(f"{name.rstrip(': ')} has no {lacking[0]}")
        return kind(**{key: _parsed(hints[key], part, f"{name}{key}.") for key, part in given.items()})
    if origin in (list, dict) and isinstance(value, origin):
        parts = value.values() if origin is dict else value
        if inner[-1] is Any or all(type(part) is inner[-1] for part in parts):
            return value  # most parts are plain, and there are hundreds
    if origin is list and isinstance(value, list):
        return [_parsed(inner[0], part, name) for part in value]
    if origin is dict and isinstance(value, Mapping):
        return {key: _parsed(inner[1], part, f"{name}{key}.") for key, part in value.items()}
    plain = {float: float | int, int: int, str: str, bool: bool}.get(kind, dict)  # a TypedDict is a dict
    if kind is Any or (isinstance(value, plain) and (kind is bool or not isinstance(value, bool))):
        return value
    raise ConfigError(f"{name.rstrip('.')} is damaged: {str(value)[:60]!r} is not what stands there")
