"""One training run: its folder, its parts, and the order in which it ends."""

from __future__ import annotations

import contextlib
import posix
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rltemplate.config.loading import from_dict, to_dict
from rltemplate.envs.envs import Envs
from rltemplate.run import exits, paths
from rltemplate.run.continuation import Continuation, find_continuation, restore
from rltemplate.run.folder import RunFolder
from rltemplate.run.git.snapshot import GitRecord, take_snapshot
from rltemplate.run.job import PROJECT, Job
from rltemplate.run.lines import LineFile, to_stderr
from rltemplate.run.logger import Logger
from rltemplate.run.observers import Observers
from rltemplate.run.record import FAILED, FINISHED, INTERRUPTED, DeterminismFacts
from rltemplate.run.signals import Stop
from rltemplate.run.sinks.registry import make_sinks
from rltemplate.run.sinks.sink import RunFacts, Standing
from rltemplate.types import Algorithm


class TrainingRun:
    """A run that is being made. Its methods are called in the order in which they stand here."""

    def __init__(self, job: Job, write_journal: Callable[[Path], None]) -> None:
        """Changes nothing yet. `write_journal` gets the folder of a run that has ended."""
        self.config = from_dict(job.config)
        self._job = job
        self._write_journal = write_journal
        self._folder = RunFolder(job)
        self._snapshot: GitRecord | None = None
        self._continuation: Continuation | None = None
        self._algorithm: Algorithm | None = None
        self._logger: Logger | None = None
        self._observers: Observers | None = None
        self._begun = False
        self._status = FAILED
        self._error: str | None = None

    def find_checkpoint(self) -> None:
        """Lock the folder of a resumed run, and find its checkpoint; `ConfigError` if it must not resume."""
        if self._job.resume:
            self._folder.take()
            self._snapshot = self._take_snapshot()
            self._continuation = find_continuation(self._job, self._snapshot)

    def own(self, algorithm: Algorithm) -> None:
        """Close `algorithm` when the run ends."""
        self._algorithm = algorithm

    def begin(self, algorithm: Algorithm, facts: DeterminismFacts) -> None:
        """Make the folder, or resume in it; from here on the record says how the run ends."""
        if self._continuation is not None and self._continuation.checkpoint is not None:
            restore(algorithm, self.config, self._continuation.checkpoint)
        if self._continuation is None:
            self._snapshot = self._take_snapshot()
            self._folder.begin(self._snapshot, facts)
        else:
            assert self._snapshot is not None
            self._folder.resume(self._snapshot, self._continuation)
        self._begun = True

    def observe(self, algorithm: Algorithm, envs: Envs, stop: Stop, standing: Standing) -> Observers:
        """Set up everything that looks at the run. `standing` places a return among published ones."""
        config, run_dir = self.config, self._folder.path
        assert self._folder.git is not None
        sinks = make_sinks(config.logger, self._facts(standing))
        self._logger = logger = Logger(sinks, LineFile(run_dir / paths.METRICS))
        since = None if self._continuation is None else self._continuation.checkpoint
        self._observers = observers = Observers(
            config, run_dir, algorithm, envs, logger, stop, since, self._folder.check
        )
        if self._folder.git.problem is not None:
            logger.message(f"code not recorded: {self._folder.git.problem}")
        if self._continuation is not None:
            for note in self._continuation.notes:
                logger.message(note)
            observers.resume(self._continuation)
        if config.compile:
            logger.message("compiling: the first update may take a minute")
        return observers

    def finish(self) -> None:
        """The loop is over and nothing went wrong."""
        assert self._observers is not None
        self._observers.finish()
        self._status = FINISHED if self._observers.complete else INTERRUPTED

    def interrupt(self, stop: Stop) -> None:
        """End the run and its process, from within a compiler, which would swallow an exception."""
        self._status = INTERRUPTED
        try:
            self.close()
        finally:
            sys.stdout.flush()
            posix._exit(stop.exit_status)

    def fail(self, error: BaseException) -> None:
        """Let the record name the error that ended the run."""
        text = exits.told(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        self._error = text.splitlines()[0]

    def close(self) -> None:
        """End the run in this order; each step is taken whatever becomes of the steps before it."""
        seen = self._observers
        metrics = {} if seen is None else seen.final_metrics
        trace = None if seen is None or seen.trace is None else seen.trace.facts()
        journal = self._begun and self._job.journal and self.config.logger.journal
        steps: list[Callable[[], None] | None] = [
            None if seen is None else seen.close,
            None if self._logger is None else partial(self._logger.close, self._status, metrics),
            partial(self._folder.finish, self._status, metrics, self._error, trace) if self._begun else None,
            None if self._algorithm is None else self._algorithm.close,
            self._folder.release,
            partial(self._write_journal, self._folder.path) if journal else None,
        ]
        with contextlib.ExitStack() as ending:  # which takes the last step first
            for step in filter(None, reversed(steps)):
                ending.callback(step)

    def _take_snapshot(self) -> GitRecord:
        text = self._job.snapshot
        return take_snapshot(PROJECT) if text is None else GitRecord.from_json(text)

    def _facts(self, standing: Standing) -> RunFacts:
        """The run as sinks show it."""
        config, resumed = self.config, self._continuation
        sweep = self._job.sweep if resumed is None else resumed.record.sweep  # a job may resume by itself
        assert self._folder.git is not None
        return RunFacts(
            run_id=self._job.run_id,
            run_dir=self._folder.path,
            title=f"{config.algo.name} on {config.env.id}, seed {config.seed}",
            total_env_steps=config.total_env_steps,
            config=to_dict(config),
            git=asdict(self._folder.git),
            group=None if sweep is None else sweep.id,
            tags=[config.algo.name, config.env.id, config.determinism.level.name],
            notify=lambda text: to_stderr(text) if self._logger is None else self._logger.message(text),
            resumed_at=None if resumed is None else resumed.env_steps,
            standing=standing,
        )
