"""The folder of one run, with its lock, its record and its commit: begun, gone on with, and ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rltemplate.config.loading import from_dict, to_dict, to_yaml
from rltemplate.run import paths
from rltemplate.run.continuation import (
    Continuation,
    config_digest,
    cut_back,
    take,
)
from rltemplate.run.git.snapshot import (
    GitRecord,
    Snapshot,
    commit_outcome,
    commit_run,
    continue_run,
    ended_files,
    withdraw_run,
)
from rltemplate.run.job import Job
from rltemplate.run.lines import to_stderr
from rltemplate.run.lock import RunLock
from rltemplate.run.record import Record
from rltemplate.types import ConfigError, RunError


class RunFolder:
    """What is kept of a run. `git` says where its code is, once it has begun."""

    def __init__(self, job: Job) -> None:
        """The folder of `job`. Changes nothing yet."""
        self.path = Path(job.run_dir)
        self.git: GitRecord | None = None
        self._job, self._config = job, from_dict(job.config)
        self._lock = RunLock(self.path)
        self._snapshot = Snapshot()
        self._record: Record | None = None
        self._made: list[Path] = []

    # --- A new run ---------------------------------------------------------------------------------------

    def begin(self, snapshot: Snapshot, facts: Mapping[str, Any]) -> None:
        """Make the folder of a new run, and record what it is. A disk that does not take it leaves nothing.

        `facts` are those of its process, for the record.
        """
        self._snapshot = snapshot
        self._make()
        try:
            text = to_yaml(self._config)
            self.git = commit_run(snapshot, self._job.run_id, text)
            (self.path / paths.CONFIG).write_text(text)
            self._record = Record.create(self.path, {**self._facts(), **facts})
        except OSError as error:
            self.withdraw()
            raise RunError(f"{self.path} cannot be written: {error.strerror}; nothing was begun") from error

    def withdraw(self) -> None:
        """Leave nothing of a run that could not begin; the lock says that all that is there is its own."""
        if self.git is not None:
            withdraw_run(self._snapshot, self.git)
        self._remove()

    def _make(self) -> None:
        """Have an empty folder for this process alone."""
        # Those that have to be made for it, the innermost first.
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

    def _facts(self) -> dict[str, Any]:
        job, git = self._job, self.git
        assert git is not None
        return {
            "id": job.run_id,
            "status": "running",
            "command_line": job.command,
            "overrides": job.overrides,
            "sweep": None if job.sweep is None else asdict(job.sweep),
            "git": asdict(git),
            "config_digest": config_digest(to_dict(self._config)),
        }

    # --- A run that goes on ------------------------------------------------------------------------------

    def take(self) -> None:
        """Have the folder of a run that is there, or raise ConfigError with one line."""
        take(self._lock, self.path)

    def check(self) -> None:
        """Raise RunError if it is no longer where it was: the run must not go on in a new one."""
        now = self._lock.moved_to()
        if now:
            raise RunError(
                f"{self.path} was moved to {now} under the run; make resume run={now} goes on there"
            )
        if now is not None:
            raise RunError(f"{self.path} was deleted under the run, and everything in it is lost")

    def release(self) -> None:
        """Let others have it."""
        self._lock.release()

    def go_on(self, snapshot: Snapshot, continuation: Continuation) -> None:
        """Cut off what lies beyond the checkpoint, and go on with the record of a run and with its commit.

        A disk that does not take it loses nothing: what is cut off follows from what stays.
        """
        self._snapshot = snapshot
        before = GitRecord.from_dict(continuation.record["git"])
        self.git = git = continue_run(snapshot, before, self._job.run_id, to_yaml(self._config))
        facts = {"command_line": self._job.command, **continuation.facts(), "commit": git.commit}
        facts |= {"git_problem": git.problem} if git.problem else {}
        facts["config_digest"] = config_digest(to_dict(self._config))  # of the text that is written now
        try:
            self._record = Record.resume(self.path, facts)
            cut_back(self.path, self._config, continuation)
            if git.commit is not None and git.commit != before.commit:
                self._record.update(git=asdict(git))
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}; it can go on later") from error

    # --- Its end -----------------------------------------------------------------------------------------

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """How the run ended, in its record and on top of its commit."""
        assert self._record is not None
        assert self.git is not None
        try:
            self._record.finish(**outcome)
            files, left_out = ended_files(self.path)
            problem = commit_outcome(self._snapshot, self.git, self._record.outcome(left_out), files)
            if problem is not None:
                self._record.update(outcome_not_recorded=problem)
        except OSError as error:
            problem = f"{paths.RECORD} could not be written at the end: {error.strerror}"
            if outcome["error"] is None:
                raise RunError(problem) from error
            to_stderr(problem)  # and what ended the run is said by whoever raised it
