"""One training run: its folder, its parts, and the order in which it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rltemplate.config.loading import from_dict, to_dict
from rltemplate.envs.envs import Envs
from rltemplate.run import paths
from rltemplate.run.continuation import Continuation, find_continuation, restore
from rltemplate.run.folder import RunFolder
from rltemplate.run.git.snapshot import GitRecord, take_snapshot
from rltemplate.run.job import PROJECT, Job
from rltemplate.run.lines import LineFile, to_stderr
from rltemplate.run.logger import Logger
from rltemplate.run.observers import Observers
from rltemplate.run.record import FAILED, FINISHED, INTERRUPTED, DeterminismFacts
from rltemplate.run.signals import Stop
from rltemplate.run.sinks import make_sinks
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
        self._snapshot = GitRecord()
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
            self._folder.lock.acquire()
        text = self._job.snapshot
        self._snapshot = take_snapshot(PROJECT) if text is None else GitRecord.from_json(text)
        if self._job.resume:
            self._continuation = find_continuation(self._job, self._snapshot)

    def own(self, algorithm: Algorithm) -> None:
        """Close `algorithm` when the run ends."""
        self._algorithm = algorithm

    def begin(self, algorithm: Algorithm, facts: DeterminismFacts) -> None:
        """Make the folder, or resume in it; from here on the record says how the run ends."""
        continuation = self._continuation
        if continuation is None:
            self._folder.begin(self._snapshot, facts)
        else:
            if continuation.checkpoint is not None:
                restore(algorithm, self.config, continuation.checkpoint)
            self._folder.resume(self._snapshot, continuation)
        self._begun = True

    def observe(self, algorithm: Algorithm, envs: Envs, stop: Stop, standing: Standing) -> Observers:
        """Set up everything that looks at the run. `standing` places a return among published ones."""
        config, run_dir, resumed = self.config, self._folder.path, self._continuation
        sinks = make_sinks(config.logger, self._facts(standing))
        self._logger = logger = Logger(sinks, LineFile(run_dir / paths.METRICS))
        since, check_folder = None if resumed is None else resumed.checkpoint, self._folder.check
        self._observers = observers = Observers(
            config, run_dir, algorithm, envs, logger, stop, since, check_folder
        )
        if self._folder.git.problem is not None:
            logger.message(f"code not recorded: {self._folder.git.problem}")
        if resumed is not None:
            for note in resumed.notes:
                logger.message(note)
            observers.resume(resumed.run_state)
        if config.compile:
            logger.message("compiling: the first update may take a minute")
        return observers

    def finish(self) -> None:
        """The loop is over and nothing went wrong."""
        assert self._observers is not None
        self._observers.finish()
        self._status = FINISHED if self._observers.complete else INTERRUPTED

    def fail(self, error: BaseException) -> None:
        """Let the record name the error that ended the run."""
        self._error = f"{type(error).__name__}: {error}".splitlines()[0]

    def close(self) -> None:
        """End the run in this order; each step is taken whatever becomes of the steps before it."""
        observers, metrics = self._observers, {} if self._logger is None else self._logger.final_metrics
        trace = None if observers is None or observers.trace is None else observers.trace.facts()
        journal = self._begun and self._job.journal and self.config.logger.journal
        steps: list[Callable[[], None] | None] = [
            None if observers is None else observers.close,
            None if self._logger is None else partial(self._logger.close, self._status),
            partial(self._folder.finish, self._status, metrics, self._error, trace) if self._begun else None,
            None if self._algorithm is None else self._algorithm.close,
            self._folder.lock.release,
            partial(self._write_journal, self._folder.path) if journal else None,
        ]
        with contextlib.ExitStack() as ending:  # which takes the last step first
            for step in filter(None, reversed(steps)):
                ending.callback(step)

    def _facts(self, standing: Standing) -> RunFacts:
        """The run as sinks show it."""
        config, resumed = self.config, self._continuation
        sweep = self._job.sweep if resumed is None else resumed.record.sweep  # a job may resume by itself
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
