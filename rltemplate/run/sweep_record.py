"""Files of a sweep: `sweep.json` of the process that looks after it, and a `job_<n>.json` of each job.

Each file has one writer, who replaces it as a whole.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rltemplate.run.git.snapshot import GitRecord
from rltemplate.run.lines import replace_text
from rltemplate.run.paths import SWEEP_INDEX
from rltemplate.types import ConfigError


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
        """Replace the file of the job."""
        replace_text(folder / f"job_{self.job}.json", [json.dumps(asdict(self), indent=2), "\n"])


@dataclass(slots=True, kw_only=True)
class SweepRecord:
    """A sweep; `jobs` are read from their own files, and written here as well when the sweep has ended."""

    id: str
    words: list[str]  # overrides that say which sweep it is, in the order that numbers its jobs
    num_jobs: int | None  # None: the sweeper decides while it runs
    commands: list[list[str]]  # one for each time that it was started
    start_time: str
    versions: dict[str, str]  # of packages, at the last start
    snapshot: GitRecord  # of the code, at the last start
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
            values["snapshot"] = GitRecord(**values.get("snapshot", {}))
            texts = [path.read_text(encoding="utf-8") for path in folder.glob("job_*.json")]
            values["jobs"] = sorted((SweepJob(**json.loads(text)) for text in texts), key=lambda job: job.job)
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{folder / SWEEP_INDEX} is damaged, or of another version: {error}") from None

    def write(self, folder: Path) -> None:
        """Replace `sweep.json`."""
        replace_text(folder / SWEEP_INDEX, [json.dumps(asdict(self), indent=2), "\n"])
