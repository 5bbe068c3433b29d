"""The folder of one run with its lock, record and commit: made, resumed and ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from rltemplate.config.loading import from_dict, to_yaml
from rltemplate.determinism.levels import influences
from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.run import paths
from rltemplate.run.continuation import Continuation, cut_back
from rltemplate.run.git.snapshot import (
    GitRecord,
    commit_outcome,
    commit_run,
    ended_files,
    withdraw_run,
)
from rltemplate.run.job import Job
from rltemplate.run.lines import to_stderr
from rltemplate.run.lock import RunLock
from rltemplate.run.record import RUNNING, DeterminismFacts, RunRecord, TraceFacts, this_process, utc_now
from rltemplate.types import ConfigError, RunError


class RunFolder:
    """The folder of a run. `git` says where its code is, once it has begun."""

    def __init__(self, job: Job) -> None:
        """The folder of `job`. Changes nothing yet."""
        self.path = Path(job.run_dir)
        self.git = GitRecord()
        self.lock = RunLock(self.path)
        self._job, self._config = job, from_dict(job.config)
        self._record: RunRecord | None = None
        self._began, self._earlier_s = time.monotonic(), 0.0

    def begin(self, snapshot: GitRecord, determinism: DeterminismFacts) -> None:
        """Make the folder of a new run, and record it. A disk that does not take it leaves nothing."""
        job = self._job
        new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir={self.path}: cannot be made, {error.strerror}") from error
        if any(path.name != paths.LOCK for path in self.path.iterdir()):
            raise ConfigError(f"run_dir={self.path}: is not empty; a run needs a folder of its own")
        self.lock.acquire()
        try:
            text = to_yaml(self._config)
            (self.path / paths.CONFIG).write_text(text)
            self.git = commit_run(paths.PROJECT, snapshot, job.run_id, text)
            self._record = RunRecord(
                id=job.run_id,
                status=RUNNING,
                command_line=job.command,
                working_directory=str(Path.cwd()),
                overrides=job.overrides,
                sweep=job.sweep,
                git=self.git,
                determinism=determinism,
                environment=influences(os.environ, self._config.compile),
                versions=package_versions(),
                machine=machine_facts(),
                **this_process(),
            )
            self._record.write(self.path)
        except OSError as error:
            self._rollback(new_folders)
            raise RunError(f"{self.path} cannot be written: {error.strerror}; nothing was begun") from error

    def _rollback(self, new_folders: list[Path]) -> None:
        """Remove everything of a run that could not begin; the lock guards its files."""
        withdraw_run(paths.PROJECT, self.git)
        for path in self.path.iterdir():
            path.unlink()
        self.lock.release()
        with contextlib.suppress(OSError):  # another run may be in the same parent folder
            for folder in new_folders:
                folder.rmdir()

    def check(self) -> None:
        """Raise RunError if the folder was moved or deleted: the run must not make a new one."""
        now = self.lock.moved_to()
        if now:
            raise RunError(
                f"{self.path} was moved to {now} under the run; make resume run={now} goes on there"
            )
        if now is not None:
            raise RunError(f"{self.path} was deleted under the run, and everything in it is lost")

    def resume(self, snapshot: GitRecord, continuation: Continuation) -> None:
        """Add this part to the record, and remove all that lies beyond the checkpoint."""
        self._record = record = continuation.record
        before, text = record.git, to_yaml(self._config)
        self.git = git = commit_run(paths.PROJECT, snapshot, self._job.run_id, text, before)
        part = continuation.part()
        part.command_line, part.commit, part.git_problem = self._job.command, git.commit, git.problem
        record.status, record.ended_at, record.error, record.final_metrics = RUNNING, None, None, {}
        record.resumed = [*record.resumed, part]
        if git.commit is not None and git.commit != before.commit:
            record.git = git
        self._earlier_s = record.duration_s or 0.0
        try:
            cut_back(self.path, self._config, continuation)
            record.write(self.path)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}; it can go on later") from error

    def finish(
        self, status: str, final_metrics: Mapping[str, float], error: str | None, trace: TraceFacts | None
    ) -> None:
        """Write how the run ended into its record, and put that on top of its commit."""
        record = self._record
        assert record is not None
        record.status, record.error, record.trace = status, error, trace
        record.final_metrics, record.ended_at = dict(final_metrics), utc_now()
        record.duration_s = self._earlier_s + time.monotonic() - self._began
        try:
            record.write(self.path)
            files, left_out = ended_files(self.path)
            outcome = record.outcome(left_out)
            record.outcome_not_recorded = commit_outcome(paths.PROJECT, self.git, outcome, files)
            if record.outcome_not_recorded is not None:
                record.write(self.path)
        except OSError as failure:
            problem = f"{paths.RECORD} could not be written at the end: {failure.strerror}"
            if error is None:
                raise RunError(problem) from failure
            to_stderr(problem)  # what ended the run is already being raised
