"""`record.json`: what a run was, on what it ran and how it ended.

The file is whole at any moment (written aside, then put in place) and strict JSON: numbers that JSON does
not have become null. Times are UTC; `duration_s` comes from a clock that nobody can set.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from rltemplate.run.lines import replace_text
from rltemplate.run.paths import RECORD
from rltemplate.types import ConfigError

SCHEMA_VERSION = 1
RUNNING = "running"
FINAL_STATUSES = ("finished", "failed", "interrupted")

# What an outcome says: how the run ended, and what it takes to make the run again and compare.
_OUTCOME = (
    *("schema", "id", "status", "error", "started_at", "ended_at", "duration_s", "final_metrics", "trace"),
    *("overrides", "config_digest", "git", "determinism", "environment", "versions", "machine"),
)
_RESUMED = (
    *("started_at", "env_steps", "checkpoint", "interruption", "error", "changed", "notes"),
    *("commit", "git_problem"),
)


class Record:
    """The record of a run that is under way in this process."""

    def __init__(self, run_dir: Path, fields: dict[str, Any], earlier_s: float = 0.0) -> None:
        """Use `create` or `resume`."""
        self._path = run_dir / RECORD
        self._fields = fields
        self._earlier_s = earlier_s
        self._began = time.monotonic()
        self._write()

    @classmethod
    def create(cls, run_dir: Path, fields: Mapping[str, Any]) -> Record:
        """Begin the record of a new run with what every record has and with `fields`, which go first.

        Raises FileExistsError if the folder has a record already.
        """
        if (run_dir / RECORD).exists():
            raise FileExistsError(f"{run_dir / RECORD} exists already")
        began = {
            "schema": SCHEMA_VERSION,
            "id": run_dir.name,
            "status": RUNNING,
            "command_line": list(sys.orig_argv),
            "working_directory": str(Path.cwd()),
            **_process(),
            "ended_at": None,
            "duration_s": None,
            "final_metrics": None,
            "error": None,
            "trace": None,
            "resumed": [],
        }
        return cls(run_dir, began | dict(fields))

    @classmethod
    def resume(cls, run_dir: Path, fields: Mapping[str, Any]) -> Record:
        """Go on with the record of a run that ended early.

        The first start stays as it is; this one is added to `resumed`, with `fields`. `duration_s` goes on
        from what was counted. Raises ConfigError if there is no usable record.
        """
        record = read_record(run_dir)
        earlier_s = record.get("duration_s") or 0.0
        again = {**_process(), "command_line": list(sys.orig_argv), **fields}
        record |= {"status": RUNNING, "ended_at": None, "error": None, "final_metrics": None}
        record["resumed"] = [*record.get("resumed", []), again]
        return cls(run_dir, record, earlier_s)

    def update(self, **fields: Any) -> None:
        """Set `fields` and the time counted so far, and write the file."""
        self._fields |= fields
        self._fields["duration_s"] = self._earlier_s + time.monotonic() - self._began
        self._write()

    def finish(
        self,
        status: str,
        final_metrics: Mapping[str, Any],
        error: str | None = None,
        trace: Mapping[str, Any] | None = None,
    ) -> None:
        """The run is over.

        `status` is one of FINAL_STATUSES, `error` one line about a failure, `trace` the digest of everything
        that was computed.
        """
        if status not in FINAL_STATUSES:
            raise ValueError(f"{status!r} is no final status, but {', '.join(FINAL_STATUSES)} are")
        ended = {"status": status, "final_metrics": dict(final_metrics), "error": error, "trace": trace}
        self.update(**ended, ended_at=_now())

    def outcome(self, left_out: Mapping[str, str] | None = None) -> str:
        """How the run ended as JSON, for those who have its commit and not its folder.

        `left_out` says, by name, why a file does not lie beside it. Command line, host and process stay out.
        """
        chosen = {name: self._fields[name] for name in _OUTCOME if name in self._fields}
        resumed = self._fields.get("resumed") or []
        chosen["resumed"] = [{name: part[name] for name in _RESUMED if name in part} for part in resumed]
        chosen["left_out"] = dict(left_out or {})
        return json.dumps(_plain(chosen), indent=2, allow_nan=False) + "\n"

    def _write(self) -> None:
        text = json.dumps(_plain(self._fields), indent=2, allow_nan=False) + "\n"
        replace_text(self._path, [text])


def check_alone(record: Mapping[str, Any]) -> None:
    """Raise ConfigError for a run that an earlier version trained in one process with other seeds."""
    if record.get("together") is not None:
        ref = (record.get("git") or {}).get("ref")
        raise ConfigError(
            f"{record.get('id')}: was trained together with other seeds, which this version cannot do; use "
            f"the code of that run, git worktree add --detach FOLDER {ref}"
        )


def read_record(run_dir: Path) -> dict[str, Any]:
    """The record of the run in `run_dir`. Raises ConfigError if there is none or it cannot be read."""
    path = run_dir / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{run_dir} is no run folder: it has no {RECORD}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path} is no record: it holds no JSON object")
    if record.get("schema") != SCHEMA_VERSION:
        found = record.get("schema")
        raise ConfigError(f"{path} has schema {found!r}, but this version reads schema {SCHEMA_VERSION}")
    return record


def _process() -> dict[str, Any]:
    return {"started_at": _now(), "pid": os.getpid(), "hostname": platform.node()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: Any) -> Any:
    """`value` in JSON's types. Raises TypeError for what has no obvious form there."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if hasattr(value, "item"):  # a number of numpy or torch
        return _plain(value.item())
    raise TypeError(f"{type(value).__name__} has no place in {RECORD}: {value!r}")
