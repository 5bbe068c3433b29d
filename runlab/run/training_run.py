"""One training run: its level, its folder with record and commit, its parts, and the order of its end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from runlab.config.affects_results import modules_of_others
from runlab.config.loading import to_dict, to_yaml
from runlab.config.schema import Config, Device, Products
from runlab.config.secrets import masked
from runlab.config.texts import error_text, few, first_line
from runlab.determinism import checks, computations, switches
from runlab.determinism.levels import influences, on_cpu
from runlab.determinism.libraries import library_versions
from runlab.envs.exits import end_forked
from runlab.envs.make import SEEDED_EPISODES, repeats, seeded_episodes
from runlab.errors import ConfigError, RunError, in_a_line
from runlab.interfaces import Algorithm, Environments
from runlab.machine import machine_facts, package_versions
from runlab.run import paths
from runlab.run.computed import ComputationFacts, first_other
from runlab.run.continuation import Continuation, check_used, cut_back, find_continuation, restore
from runlab.run.files import LineFile, lock, make_durable_folder, replace_text, to_stderr
from runlab.run.git import snapshot
from runlab.run.git.changes import code_of_job
from runlab.run.git.snapshot import GitRecord
from runlab.run.job import Job
from runlab.run.logger import Logger
from runlab.run.observers import RunObservers
from runlab.run.paths import PROJECT
from runlab.run.record import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    DeterminismFacts,
    RunRecord,
    this_process,
    utc_now,
)
from runlab.run.sinks import make_sinks
from runlab.run.sinks.sink import RunFacts
from runlab.run.used_code import CodeWatch, UsedCode


def with_named_choices(job: Job) -> Job:
    """`job` with a named device, and a named way of matrix products on the CPU, in the place of `auto`.

    The recorded configuration of a new run then has the names, and a resume or a rerun on another machine
    uses the same ones.
    """
    config, device = job.config, switches.resolve_device(job.config.device.name)
    if job.resume:
        return job
    level = config.determinism
    if level.products is Products.auto and device.type == "cpu":
        level = replace(level, products=Products[on_cpu(level.products.name)])
    return replace(job, config=replace(config, determinism=level, device=Device[device.type]))


def check_level(config: Config, settings: Mapping[str, Any], algorithm: Algorithm) -> DeterminismFacts:
    """Check every promise of the level of a run; `ConfigError` if one does not hold.

    `settings` were applied before. They are read back from the libraries again.
    """
    promised, level = checks.promised(config.determinism), config.determinism.level.name
    if promised:
        switches.confirm(settings)
    elif changed := switches.changes(settings, now := switches.read_back()):
        to_stderr(f"note: {changed} since the environment was made")
        settings = {**settings, **now}
    passes = checks.passes_of(algorithm, config, promised)
    findings = {name: checks.CHECKS[name](config, passes) for name in promised}
    if "repeats" in findings:
        tried = repeats(config.env)
        findings["repeats"]["env_seed_bits"] = tried.seed_bits
        if not tried.holds:
            cure = "Is there a generator of its own, or a reset() without super().reset(seed=seed)?"
            if repeats(seeded_episodes(config.env)).holds:
                cure = f"It repeats itself with {SEEDED_EPISODES};"
            raise ConfigError(
                f"determinism={level}: two environments {config.env.id} with the same seed and actions gave "
                f"different results.\n{cure} determinism=fast runs it as it is"
            )
    if promised:  # the trial made steps of the environment
        switches.confirm(settings)
    device = switches.resolve_device(config.device.name)
    # The environments were made before: one that uses MuJoCo has imported it.
    digests = computations.digests(device, config.compile, "mujoco" in sys.modules, f"{settings}")
    computed = ComputationFacts(
        definition=computations.definition(), digests=digests, libraries=library_versions(device)
    )
    return DeterminismFacts(level=level, settings=dict(settings), checks=findings, computed=computed)


def _take_all(steps: Sequence[Callable[[], object]], error: BaseException | None) -> None:
    """Take all steps in order, also after one that fails.

    Raises the first failure, unless the run has ended with an `error` already. Others are printed in a line.
    """
    first = error
    for step in steps:
        try:
            step()
        except BaseException as failure:
            if first is None:
                first = failure
            else:
                to_stderr(f"at the end of the run: {first_line(failure)}")
    if first is not None and first is not error:
        raise first


class TrainingRun:
    """A run in progress. As a context manager it ends the run with its block.

    Its methods are called in this order: `prepare`, `begin`, `observe`; `message` at any time.
    """

    def __init__(self, job: Job) -> None:
        """Changes nothing yet."""
        self.config = job.config
        self.algorithm: Algorithm | None = None  # closed when the run ends
        self._job = job
        self._path = Path(job.run_dir)
        self._process = os.getpid()
        self._unlock: Callable[[], None] | None = None
        self._git = GitRecord()  # the snapshot of the code, and its commit once the run has begun
        self._settings: Mapping[str, Any] = {}
        self._code: CodeWatch  # from `prepare` on
        self._used: UsedCode  # from `begin` on
        self._continuation: Continuation | None = None
        self._record: RunRecord | None = None  # of a run that has begun
        self._logger: Logger | None = None
        self._observers: RunObservers | None = None

    def message(self, text: str) -> None:
        """Write a line for the user, at any time."""
        (to_stderr if self._logger is None else self._logger.message)(text)

    def prepare(self) -> None:
        """Take the snapshot of the code; of a resumed run also lock the folder and find the checkpoint.

        Raises `ConfigError` if the run must not resume.
        """
        if self._job.resume:
            self._unlock = lock(self._path)
        if self._job.snapshot is None:
            self._git = snapshot.take_snapshot(PROJECT)
        else:
            # The ref of a sweep's snapshot belongs to the sweep, and a run must not remove it.
            of_sweep = GitRecord(**json.loads(self._job.snapshot) | {"ref": None, "commit": None})
            self._git, edited = code_of_job(PROJECT, of_sweep)
            if edited:
                to_stderr(f"note: edited since the sweep began, and run as it is now: {few(edited)}")
        if self._job.resume:
            self._continuation = find_continuation(self._job, self._git)
        runs_dir = Path(self.config.runs_dir).expanduser()
        others = modules_of_others(self.config.algo.name)
        self._code = CodeWatch(PROJECT, self._git, aside=(self._path, runs_dir), declaring=others)

    def begin(self, algorithm: Algorithm, facts: DeterminismFacts) -> None:
        """Make the folder, or resume in it; from here on the record says how the run ends."""
        self._settings, self._used = facts.settings, self._code.used()
        if self._continuation is None:
            self._record = self._begin(facts)
        else:
            record, part = self._continuation.record, self._continuation.part
            part.changed |= check_used(record, self._git, self._job.accept, self._used)
            if self._continuation.checkpoint is not None:
                restore(algorithm, self._continuation.checkpoint)
            self._record = self._resume(self._continuation, facts.computed)

    def observe(self, algorithm: Algorithm, envs: Environments, stopping: Callable[[], bool]) -> RunObservers:
        """Set up everything that looks at the run; `stopping` says whether it has been asked to end."""
        config, resumed, record = self.config, self._continuation, self._record
        facts = RunFacts(
            run_id=self._job.run_id,
            run_dir=self._path,
            config=to_dict(config),
            overrides=self._job.overrides,
            git=self._git,
            sweep=None if record is None or record.sweep is None else record.sweep.id,
            notify=self.message,
            resumed_at=None if resumed is None else resumed.part.env_steps,
        )
        self._logger = logger = Logger(make_sinks(config.logger, facts), LineFile(self._path / paths.METRICS))
        self._observers = observers = RunObservers(
            config, self._path, algorithm, envs, logger, stopping, self._settings
        )
        for note in self._git.notes():
            logger.message(note)
        if self._code.places:
            logger.message(
                f"code from outside of the repository, of which only a digest is recorded: {self._code}"
            )
        notes = getattr(envs, "notes", [])
        if record is not None and notes:
            record.notes = [*notes]
            record.write(self._path)
        for note in [*notes, *([] if resumed is None else resumed.part.notes)]:
            logger.message(note)
        if resumed is not None:
            observers.resume(None if resumed.checkpoint is None else resumed.checkpoint.state["run"])
        return observers

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End the run; the steps happen in the order of the lines."""
        end_forked(self._process)  # a child that an environment forked does nothing of what follows
        observers, algorithm = self._observers, self.algorithm
        complete = observers is not None and observers.complete
        status = FAILED if error is not None else FINISHED if complete else INTERRUPTED
        steps: list[Callable[[], object]] = []
        if observers is not None and observers.trace is not None:
            steps.append(observers.trace.lines.close)
        if self._logger is not None:
            reached = None if algorithm is None else algorithm.env_steps
            # metrics.jsonl, then W&B and the other sinks
            steps.append(partial(self._logger.close, status, reached))
        if self._record is not None:
            steps.append(partial(self._end, self._record, status, error))  # record.json and the commit
        if algorithm is not None:
            steps.append(algorithm.close)  # environments and their workers
        if self._unlock is not None:
            steps.append(self._unlock)
        _take_all(steps, error)

    def _begin(self, facts: DeterminismFacts) -> RunRecord:
        """Make the folder of a new run, and record it. If the disk refuses that, nothing is left."""
        job, path = self._job, self._path
        with in_a_line(f"run_dir={path} cannot be made"):
            new_folders = make_durable_folder(path)
        if any(each.name != paths.LOCK for each in path.iterdir()):
            raise ConfigError(f"run_dir={path}: is not empty; a run needs a folder of its own")
        self._unlock = lock(path)
        try:
            text = to_yaml(self.config)
            replace_text(path / paths.CONFIG, [text])
            self._git = snapshot.commit_run(PROJECT, self._git, job.run_id, text)
            record = RunRecord(
                id=job.run_id,
                status=RUNNING,
                command_line=job.command,
                working_directory=str(Path.cwd()),
                overrides=job.overrides,
                sweep=job.sweep,
                git=self._git,
                used=self._used,
                determinism=facts,
                environment=influences(os.environ, self.config.compile),
                versions=package_versions(self.config.compile),
                machine=machine_facts(),
                **this_process(),
            )
            record.write(path)
        except OSError as error:
            snapshot.withdraw_run(PROJECT, self._git)
            for each in path.iterdir():
                each.unlink()
            self._unlock()
            self._unlock = None
            with contextlib.suppress(OSError):  # another run may be in the same parent folder
                for folder in new_folders:
                    folder.rmdir()
            raise RunError(f"{path} cannot be written: {error.strerror}; nothing was begun") from error
        return record

    def _resume(self, continuation: Continuation, computed: ComputationFacts) -> RunRecord:
        """Add this part to the record, and remove everything after the checkpoint."""
        record, part = continuation.record, continuation.part
        text, before = to_yaml(self.config), record.git
        self._git = git = snapshot.commit_run(PROJECT, self._git, self._job.run_id, text, before)
        part.commit = git.commit
        if (other := first_other(record.determinism.computed, computed)) is not None:
            part.changed["computation"] = [f"{other.part} {other.a}", f"{other.part} {other.b}"]
            part.notes.append(f"from here on this run (b) computes otherwise than at its start (a): {other}")
        record.status, record.ended_at, record.error, record.final_metrics = RUNNING, None, None, {}
        record.env_steps = None
        if record.used is not None:
            record.used = self._used.joined(record.used)
        record.resumed = [*record.resumed, part]
        if git.commit is not None and (git.commit, git.left_out()) != (before.commit, before.left_out()):
            record.git = git
        with in_a_line(f"the run can resume later, but {self._path} cannot be written now", RunError):
            part.notes += cut_back(self._path, continuation)
            record.write(self._path)
            # Last: if an earlier step fails, a finished run must keep the total that it has reached.
            replace_text(self._path / paths.CONFIG, [text])
        return record

    def _end(self, record: RunRecord, status: str, error: BaseException | None) -> None:
        """Write how the run ended into its record, and commit that as a child of the run's commit."""
        record.status, record.ended_at = status, utc_now()
        text = "" if error is None else f"{type(error).__name__}: {error_text(error)}".splitlines()[0]
        record.error = masked(text) or None  # it may quote an address with a token
        if self.algorithm is not None:
            record.env_steps = self.algorithm.env_steps
        if self._logger is not None:
            record.final_metrics = dict(self._logger.final_metrics)
            record.duration_s = max(record.duration_s or 0.0, self._logger.seconds())
        if record.used is not None:
            record.used = record.used.joined(self._code.used())  # with modules that were imported late
        if self._observers is not None and self._observers.trace is not None:
            record.trace = self._observers.trace.facts()
        try:
            record.write(self._path)
            files, left_out = snapshot.ended_files(self._path)
            outcome = record.outcome(left_out)
            not_recorded = self._git.problem or snapshot.commit_outcome(PROJECT, self._git, outcome, files)
            if not_recorded != record.outcome_not_recorded:
                record.outcome_not_recorded = not_recorded
                record.write(self._path)
        except OSError as failure:
            problem = f"{paths.RECORD} could not be written at the end: {failure.strerror}"
            raise RunError(problem) from failure
