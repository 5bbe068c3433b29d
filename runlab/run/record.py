"""Records of runs (`record.json`: code, machine, outcome) and of sweeps (`sweep.json`).

Each file has one writer. It is replaced in one step, and is strict JSON: numbers that are not finite become
null. Times are UTC; `duration_s` comes from a clock that cannot be set back.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from runlab.errors import ConfigError
from runlab.machine import COMPILER
from runlab.run.computed import ComputationFacts
from runlab.run.files import replace_text, strict_json
from runlab.run.git.snapshot import GitRecord
from runlab.run.paths import RECORD, SEARCH, SWEEP_INDEX
from runlab.run.used_code import UsedCode
from runlab.run.validation import Line, Missing, parse_json, read_json, read_text, typed

SCHEMA_VERSION = 1
RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"

# The id of a run becomes a part of paths and of refs.
RunId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\Z")]
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
    """The level of a run, its settings as read back from the libraries, checks, and known computations."""

    level: Line = ""
    settings: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)
    computed: ComputationFacts = field(default_factory=ComputationFacts)


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
    changed: dict[str, list[Any]] = field(default_factory=dict)  # old and new value, or names, by key
    notes: list[str] = field(default_factory=list)
    commit: str | None = None


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One run. Facts that an older version did not record have their defaults."""

    schema: int = SCHEMA_VERSION
    id: RunId
    status: Line
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
    used: UsedCode | None = None
    notes: list[str] = field(default_factory=list)  # what its environments cannot do
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
            return cls.parse(read_text(path), str(path))
        except Missing:
            raise ConfigError(f"{run_dir} is no run folder: it has no {RECORD}") from None

    @classmethod
    def parse(cls, text: str, name: str) -> RunRecord:
        """The record in `text`, called `name` in errors. Keys of other versions are left out."""
        values = parse_json(text, name)
        if isinstance(values, dict):
            if (schema := values.get("schema")) != SCHEMA_VERSION:
                raise ConfigError(
                    f"{name} has schema {str(schema)[:20]}; this version reads schema {SCHEMA_VERSION}"
                )
            values = _without_nulls(values)
            values |= {key: _without_nulls(values[key]) for key in _NESTED if key in values}
        record = typed(values, cls, name)
        # Earlier versions had the compiler among the settings.
        if compiler := record.determinism.settings.pop("cpp_compiler", None):
            record.versions.setdefault(COMPILER, str(compiler))
        return record

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


_NESTED = ("sweep", "git", "used", "determinism", "trace")


def _without_nulls(values: Any) -> Any:
    """A mapping without its nulls, which an earlier version wrote for facts that have a default now."""
    return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


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
    run_id: Line | None = None
    run_dir: str | None = None  # relative to the folder of the sweep, which may be moved with its runs
    status: Line = "not started"
    exit_status: int | None = None
    final_return: float | None = None
    problem: str | None = None

    @classmethod
    def read(cls, path: Path) -> SweepJob:
        """The job in a file. Raises ConfigError for a damaged one."""
        return read_json(path, cls)

    def run(self, folder: Path) -> Path | None:
        """Folder of the job's run, where `folder` is that of the sweep."""
        return None if self.run_dir is None else Path(os.path.normpath(folder / self.run_dir))

    def write(self, folder: Path) -> None:
        replace_text(folder / f"job_{self.job}.json", [strict_json(asdict(self), indent=2), "\n"])


@dataclass(slots=True, kw_only=True)
class SearchTrial:
    """A trial of a search that has ended: `state` is Optuna's, COMPLETE or PRUNED."""

    number: int
    state: str
    value: float | None
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SearchRecord:
    """A search (`search.json`): its arguments, trials, and how much each key matters, once it has ended."""

    words: list[str]
    sweep: str
    trials: list[SearchTrial]
    importances: dict[str, float]
    objective: str = "eval/return"  # with a minus in front, the lowest is best

    def write(self, folder: Path) -> None:
        replace_text(folder / SEARCH, [strict_json(asdict(self), indent=1)])


@dataclass(slots=True, kw_only=True)
class SweepRecord:
    """A sweep; `jobs` are read from their own files, and written here as well when the sweep has ended."""

    id: RunId  # the ids of its runs begin with it
    words: list[str]  # overrides that identify the sweep; their order numbers the jobs
    num_jobs: int
    commands: list[list[str]]  # one for each start
    start_time: str
    versions: dict[str, str]  # of packages, at the last start
    snapshot: GitRecord  # of the code, at the last start
    jobs_beside: int = 1  # jobs at once on this machine, at the last start
    accept: bool = False  # runs may resume with changed code and libraries
    changed: dict[str, list[str]] = field(default_factory=dict)  # what was accepted at the last start
    status: str = "running"
    end_time: str | None = None
    jobs: list[SweepJob] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> SweepRecord:
        """The record of the sweep in `folder`. Raises ConfigError for a missing or damaged one."""
        record = read_json(folder / SWEEP_INDEX, cls)
        record.jobs = sorted(map(SweepJob.read, folder.glob("job_*.json")), key=lambda job: job.job)
        return record

    def write(self, folder: Path) -> None:
        replace_text(folder / SWEEP_INDEX, [strict_json(asdict(self), indent=2), "\n"])
