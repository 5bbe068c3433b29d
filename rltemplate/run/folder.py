"""The folder of one run with its lock, record and commit: made, resumed and ended."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from rltemplate.config.loading import from_dict, to_dict, to_yaml
from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.determinism.variables import influences
from rltemplate.run import paths
from rltemplate.run.continuation import (
    Continuation,
    config_digest,
    cut_back,
    take,
)
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
        self.git: GitRecord | None = None
        self._job, self._config = job, from_dict(job.config)
        self._lock = RunLock(self.path)
        self._record: RunRecord | None = None
        self._began, self._earlier_s = time.monotonic(), 0.0
        self._made: list[Path] = []

    # --- A new run ---------------------------------------------------------------------------------------

    def begin(self, snapshot: GitRecord, determinism: DeterminismFacts) -> None:
        """Make the folder of a new run, and record it. A disk that does not take it leaves nothing."""
        self._make()
        try:
            text = to_yaml(self._config)
            self.git = commit_run(paths.PROJECT, snapshot, self._job.run_id, text)
            (self.path / paths.CONFIG).write_text(text)
            self._record = self._first_record(determinism)
            self._record.write(self.path)
        except OSError as error:
            self.rollback()
            raise RunError(f"{self.path} cannot be written: {error.strerror}; nothing was begun") from error

    def rollback(self) -> None:
        """Remove everything of a run that could not begin; the lock guards its files."""
        if self.git is not None:
            withdraw_run(paths.PROJECT, self.git)
        self._remove()

    def _make(self) -> None:
        """Make the folder, or take an empty one, and lock it."""
        # Parents that have to be made too, the innermost first.
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir={self.path}: cannot be made, {error.strerror}") from error
        if any(self.path.iterdir()):
            raise ConfigError(f"run_dir={self.path}: is not empty; a run needs a folder of its own")
        try:
            self._lock.acquire()
        except OSError as error:
            self._remove()
            raise RunError(f"{self.path} cannot be written: {error.strerror}; nothing was begun") from error
        if any(path.name != paths.LOCK for path in self.path.iterdir()):
            raise ConfigError(
                f"run_dir={self.path}: is in use by another run; a run needs a folder of its own"
            )

    def _remove(self) -> None:
        for path in self.path.iterdir():
            path.unlink()
        self._lock.release()
        for folder in self._made:
            folder.rmdir()

    def _first_record(self, determinism: DeterminismFacts) -> RunRecord:
        job = self._job
        assert self.git is not None
        return RunRecord(
            id=job.run_id,
            status=RUNNING,
            command_line=job.command,
            working_directory=str(Path.cwd()),
            overrides=job.overrides,
            sweep=job.sweep,
            git=self.git,
            config_digest=config_digest(to_dict(self._config)),
            determinism=determinism,
            environment=influences(os.environ, self._config.compile),
            versions=package_versions(),
            machine=machine_facts(),
            **this_process(),
        )

    # --- A resumed run -----------------------------------------------------------------------------------

    def take(self) -> None:
        """Lock the folder of an existing run, or raise ConfigError with one line."""
        take(self._lock, self.path)

    def check(self) -> None:
        """Raise RunError if the folder was moved or deleted: the run must not make a new one."""
        now = self._lock.moved_to()
        if now:
            raise RunError(
                f"{self.path} was moved to {now} under the run; make resume run={now} goes on there"
            )
        if now is not None:
            raise RunError(f"{self.path} was deleted under the run, and everything in it is lost")

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def resume(self, snapshot: GitRecord, continuation: Continuation) -> None:
        """Add this part to the record, and remove all that lies beyond the checkpoint."""
        self._record = record = continuation.record
        before = record.git
        text = to_yaml(self._config)
        self.git = git = commit_run(paths.PROJECT, snapshot, self._job.run_id, text, before)
        part = continuation.part()
        part.command_line, part.commit, part.git_problem = self._job.command, git.commit, git.problem
        part.config_digest = config_digest(to_dict(self._config))  # of the text that is written now
        record.status, record.ended_at, record.error, record.final_metrics = RUNNING, None, None, {}
        record.resumed = [*record.resumed, part]
        self._earlier_s = record.duration_s or 0.0
        try:
            record.write(self.path)
            cut_back(self.path, self._config, continuation)
            if git.commit is not None and git.commit != before.commit:
                record.git = git
                self._write()
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}; it can go on later") from error

    # --- Its end -----------------------------------------------------------------------------------------

    def _write(self) -> None:
        assert self._record is not None
        self._record.duration_s = self._earlier_s + time.monotonic() - self._began
        self._record.write(self.path)

    def finish(
        self,
        status: str,
        final_metrics: Mapping[str, float],
        error: str | None = None,
        trace: TraceFacts | None = None,
    ) -> None:
        """Write how the run ended into its record, and put that on top of its commit."""
        record = self._record
        assert record is not None
        assert self.git is not None
        record.status, record.error, record.trace = status, error, trace
        record.final_metrics, record.ended_at = dict(final_metrics), utc_now()
        try:
            self._write()
            files, left_out = ended_files(self.path)
            record.outcome_not_recorded = commit_outcome(
                paths.PROJECT, self.git, record.outcome(left_out), files
            )
            if record.outcome_not_recorded is not None:
                self._write()
        except OSError as failure:
            problem = f"{paths.RECORD} could not be written at the end: {failure.strerror}"
            if error is None:
                raise RunError(problem) from failure
            to_stderr(problem)  # what ended the run is already being raised
