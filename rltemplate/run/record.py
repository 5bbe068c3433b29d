"""Records of runs (`record.json`: code, machine, outcome) and of sweeps (`sweep.json`).

Each file has one writer. It is replaced in one step, and is strict JSON: numbers that are not finite become
null. Times are UTC; `duration_s` comes from a clock that cannot be set back.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rltemplate.interfaces import ConfigError
from rltemplate.run.git.snapshot import GitRecord
from rltemplate.run.lines import replace_text, strict_json
from rltemplate.run.paths import RECORD, SWEEP_INDEX

SCHEMA_VERSION = 1
RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"

# Command line, host and process are left out of an outcome, which is pushed with the run's ref.
_PRIVATE = ("command_line", "working_directory", "pid", "hostname", "sweep", "outcome_not_recorded")


@dataclass(slots=True, kw_only=True)
class SweepMembership:
    """The sweep that a run belongs to."""

    id: str = ""
    dir: str = ""
    job: int = 0  # its number


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
    """One resume of a run: its checkpoint, the interruption before it, and changes since the run began."""

    started_at: str | None = None
    pid: int | None = None
    hostname: str | None = None
    command_line: list[str] = field(default_factory=list)
    env_steps: int = 0
    checkpoint: str | None = None
    interruption: str | None = None
    error: str | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commit: str | None = None


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
    env_steps: int | None = None  # at its end
    final_metrics: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None
    trace: TraceFacts | None = None
    resumed: list[ResumedPart] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    sweep: SweepMembership | None = None
    git: GitRecord = field(default_factory=GitRecord)
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
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> RunRecord:
        """The record in `text`, called `name` in errors. Keys of other versions are left out."""
        try:
            values = json.loads(text)
            if (schema := values.get("schema")) != SCHEMA_VERSION:
                raise ConfigError(f"{name} has schema {schema!r}; this version reads schema {SCHEMA_VERSION}")
            for key, kind in _NESTED.items():
                if values.get(key) is not None:
                    values[key] = _known(kind, values[key])
            values["resumed"] = [_known(ResumedPart, part) for part in values.get("resumed") or []]
            return _known(cls, values)  # type: ignore[no-any-return]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{name} is damaged: {error}") from None

    def write(self, run_dir: Path) -> None:
        """Put the record in place in one step. Raises OSError if the disk does not take it."""
        replace_text(run_dir / RECORD, [strict_json(asdict(self), indent=2), "\n"])

    def outcome(self, left_out: Mapping[str, str]) -> str:
        """The record as JSON for the run's ref, which is read where there is no run folder.

        `left_out` says, by name, why a file does not lie beside it.
        """
        values = {**asdict(self), "left_out": dict(left_out)}
        for part in (values, *values["resumed"]):
            for name in _PRIVATE:
                part.pop(name, None)
        return strict_json(values, indent=2) + "\n"


_NESTED = {"sweep": SweepMembership, "git": GitRecord, "determinism": DeterminismFacts, "trace": TraceFacts}


def _known(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass from its known fields that have a value; missing ones get their defaults."""
    names = {each.name for each in fields(kind)}
    return kind(**{key: part for key, part in values.items() if key in names and part is not None})


def this_process() -> dict[str, Any]:
    """The fields of a record, or of a resumed part, about the process that writes it."""
    return {"started_at": utc_now(), "pid": os.getpid(), "hostname": platform.node()}


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(slots=True, kw_only=True)
class SweepJob:
    """A job of a sweep: not started, running, finished, failed, interrupted, or refused."""

    job: int
    overrides: list[str]
    run_id: str | None = None
    run_dir: str | None = None  # relative to the folder of the sweep, which may be moved with its runs
    status: str = "not started"
    exit_status: int | None = None
    final_return: float | None = None
    problem: str | None = None

    def run(self, folder: Path) -> Path | None:
        """Folder of the job's run, where `folder` is that of the sweep."""
        return None if self.run_dir is None else Path(os.path.normpath(folder / self.run_dir))

    def write(self, folder: Path) -> None:
        replace_text(folder / f"job_{self.job}.json", [strict_json(asdict(self), indent=2), "\n"])


@dataclass(slots=True, kw_only=True)
class SweepRecord:
    """A sweep; `jobs` are read from their own files, and written here as well when the sweep has ended."""

    id: str
    words: list[str]  # overrides that identify the sweep; their order numbers the jobs
    num_jobs: int
    commands: list[list[str]]  # one for each start
    start_time: str
    versions: dict[str, str]  # of packages, at the last start
    snapshot: GitRecord  # of the code, at the last start
    jobs_beside: int = 1  # jobs at once on this machine, at the last start
    accept: bool = False  # runs may go on with changed code and libraries
    changed: dict[str, list[str]] = field(default_factory=dict)  # what was accepted at the last start
    status: str = "running"
    end_time: str | None = None
    jobs: list[SweepJob] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> SweepRecord:
        """The record of the sweep in `folder`. Raises ConfigError for one of another version."""
        try:
            values = json.loads((folder / SWEEP_INDEX).read_text(encoding="utf-8"))
            values["snapshot"] = _known(GitRecord, values.get("snapshot", {}))
            texts = [path.read_text(encoding="utf-8") for path in folder.glob("job_*.json")]
            values["jobs"] = sorted((SweepJob(**json.loads(text)) for text in texts), key=lambda job: job.job)
            return cls(**values)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{folder / SWEEP_INDEX} is damaged, or of another version: {error}") from None

    def write(self, folder: Path) -> None:
        replace_text(folder / SWEEP_INDEX, [strict_json(asdict(self), indent=2), "\n"])
