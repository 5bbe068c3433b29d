"""One run: the composition root and the only training loop.

This is the only module that knows both what learns and what observes. It never asks which algorithm or
environment it has. The end of an iteration is the only place where anything is logged, evaluated, filmed or
saved, so that all of these share one clock.

`TrainingRun` is what is opened and written for the run, and how it ends; `run` is its process: signals, and
the settings of libraries.
"""

from __future__ import annotations

import gc
import os
import signal

if __name__ == "__main__":
    # Importing torch takes a second, in which there is nothing to save and Ctrl-C should say nothing. Nothing
    # that is imported is garbage: looking for some takes a sixth of the start.
    signal.signal(signal.SIGINT, lambda *_, leave=os._exit: leave(130))
    gc.disable()

import contextlib
import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rltemplate.analysis import targets
from rltemplate.analysis.journal import write_run
from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.loading import (
    about_added,
    from_dict,
    load_recorded,
    to_dict,
)
from rltemplate.config.schema import (
    Config,
    Device,
    Products,
    TraceDetail,
    VideoRenderer,
)
from rltemplate.determinism import checks, denormals, kernels, switches
from rltemplate.determinism.machine import cpp_compiler
from rltemplate.envs.envs import (
    Envs,
    EnvSpec,
    make_env,
    uses_mujoco,
)
from rltemplate.envs.global_rng import foreign_state, restore_foreign_state, seed_foreign_code
from rltemplate.learning.engine import Engine
from rltemplate.rng import Streams, env_seeds
from rltemplate.run import exits, paths
from rltemplate.run.checkpoint import (
    Checkpoint,
    Checkpoints,
    list_checkpoints,
    load_experience,
    newest_checkpoint,
)
from rltemplate.run.continuation import Continuation, check_same_run, find_continuation
from rltemplate.run.evaluate import Evaluator
from rltemplate.run.finite import first_not_finite
from rltemplate.run.folder import RunFolder
from rltemplate.run.git.snapshot import Snapshot, take_snapshot
from rltemplate.run.job import PROJECT, Job
from rltemplate.run.lines import LineFile, to_stderr
from rltemplate.run.logger import Logger
from rltemplate.run.record import DeterminismFacts
from rltemplate.run.sinks.registry import make_sinks
from rltemplate.run.sinks.sink import RunFacts
from rltemplate.run.trace import OLD_TRACE, Trace
from rltemplate.run.video.recorder import VideoRecorder
from rltemplate.types import (
    OBSERVER_KEYS,
    STOP_SIGNALS,
    Algorithm,
    ConfigError,
    IterationResult,
    Probe,
    RunError,
)

if TYPE_CHECKING:
    import numpy as np

FINISHED, FAILED, REFUSED = 0, 1, 2

# What an iteration gave, after how many environment steps it began, and how many seconds it took.
AfterIteration = Callable[[IterationResult, int, float], None]

# Bound for environments without a time limit of their own, which a good policy might never leave.
LONGEST_EVALUATION = 10_000

# A scheduler signals all processes of a job, of which one may pass the signal on to another: what comes again
# so soon is the same request, unless somebody presses Ctrl-C twice.
_SAME_REQUEST_S = 2.0
# Seconds between attempts to get out of a compiler.
_ABANDON_EVERY_S = 0.5


class Stop:
    """A request to end after the present iteration; a later one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self.compiling = False  # in an iteration that may take a minute, and before which nothing was learned

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stop]:
        """Take signals as requests while the block runs; what was to be ignored (nohup) stays so."""
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._request) for number in heard}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def abandoning(self, compiling: bool) -> Iterator[None]:
        """While `compiling`, leave the block with the first request, instead of when the iteration ends.

        What is raised in a destructor or a callback is lost there, and a compiler has many of both. So it is
        raised again and again until the block is left.
        """
        before = signal.signal(signal.SIGALRM, self._insist)
        try:
            with contextlib.suppress(_Abandoned):
                self.compiling = compiling
                try:
                    yield
                finally:
                    self.compiling = False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    @property
    def exit_status(self) -> int:
        """Of a process that was asked to end: 130 for Ctrl-C, 143 for everything else."""
        return 128 + (signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
            # From now on even a process that is busy elsewhere than in Python ends with the next one.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if self.compiling:
                signal.setitimer(signal.ITIMER_REAL, _ABANDON_EVERY_S, _ABANDON_EVERY_S)
                raise _Abandoned
        elif now - self._since > _SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _insist(self, _number: int, _frame: FrameType | None) -> None:
        if self.compiling:
            raise _Abandoned


class _Abandoned(BaseException):
    """The iteration is given up. No Exception, because compilers catch these."""


class _CutShort(Exception):
    """An evaluation or a video was given up because the run has been asked to end."""


def build_algorithm(config: Config) -> tuple[Algorithm, Envs]:
    """Environments and algorithm of a configuration; `ConfigError` if they do not fit each other."""
    if config.compile and cpp_compiler() is None:
        raise ConfigError(
            "compile=true needs a C++ compiler (apt install g++); use compile=false without one"
        )
    streams = Streams(config.seed, switches.resolve_device(config.device.name))
    num_envs = config.env.num_envs
    seeds = env_seeds(config.seed, "env", num_envs)
    envs = Envs(env_spec(config), num_envs, seeds, config.env.num_workers)
    module, name = ALGORITHMS[config.algo.name].implementation.split(":")
    implementation = getattr(importlib.import_module(module), name)
    try:
        algorithm = implementation(config.algo, envs, streams, config.total_env_steps, Engine(config.compile))
    except ConfigError:
        envs.close()
        raise
    return algorithm, envs


def env_spec(config: Config) -> EnvSpec:
    """What the environment part of a configuration means to Gymnasium."""
    return EnvSpec(config.env.id, config.env.max_episode_steps, config.env.kwargs)


def load_policy(run_dir: Path, note: Callable[[str], None] = to_stderr) -> tuple[Config, Algorithm, Envs]:
    """The configuration of a run and its newest policy, ready to act in a process of its own."""
    config, added = load_recorded(run_dir / paths.CONFIG)
    if added:
        note(about_added(run_dir.name, config, added))
    checkpoint = newest_checkpoint(
        run_dir, lambda text: note(f"{text}; an older one is taken"), experience=False
    )
    if checkpoint is None:
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    check_same_run(checkpoint.config, config, checkpoint.path.name, (*OBSERVER_KEYS, "total_env_steps"))
    env = dataclasses.replace(config.env, num_envs=1, num_workers=0)
    algorithm, envs = build_algorithm(dataclasses.replace(config, env=env, compile=False, device=Device.cpu))
    # Streams belong to the device that trained, and a policy that is only looked at needs none of them.
    algorithm.load_state_dict({**checkpoint.state, "streams": {}})
    return config, algorithm, envs


class Observers:
    """Everything that looks at a run: logging, evaluation, video, trace and checkpoints."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        algorithm: Algorithm,
        envs: Envs,
        logger: Logger,
        stop: Stop,
        since: Checkpoint | None = None,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """`since` is the checkpoint from which the run goes on.

        `check_folder` is called before anything is written, and raises RunError if the folder has gone.
        """
        self.config = config
        self.run_dir = run_dir
        self.algorithm = algorithm
        self.logger = logger
        self.stop = stop
        self.check_folder = check_folder
        self.complete = False  # whether the last iteration was observed to its end
        self.final_metrics: dict[str, float] = {}
        self.trace: Trace | None = None
        self.iterations = 0
        self._codec = envs.codec
        spec = envs.spec  # which can be sent to another process, unlike the environments
        self._evaluator = Evaluator(lambda: make_env(spec), envs.codec)
        self._video = VideoRecorder(
            lambda render_mode, **extra: make_env(spec, render_mode, **extra),
            lambda obs: self._codec.decode_action(self._act(self._codec.encode_obs([obs])))[0],
            seed=config.seed,
            note=logger.message,
            fps=config.video_fps,
            size=config.video_size,
            renderers=None if config.video_renderer is VideoRenderer.auto else [config.video_renderer.name],
        )
        self._checkpoints = Checkpoints(run_dir, to_dict(config), config.checkpoints_kept, since)
        self._training_s = 0.0  # time spent in iterations since the last log point
        self._before = 0  # environment steps before the last iteration
        self._logged_steps = 0
        self.saved_steps = algorithm.env_steps

    def after_iteration(self, result: IterationResult, before: int, seconds: float) -> None:
        """All that is done with an iteration that began after `before` steps. RunError if it was not finite.

        A checkpoint is written before anything else is tried, so that trouble there costs no weights.
        """
        self.check_folder()
        self.logger.observe(result)
        self.iterations += 1
        self._before = before
        self._training_s += seconds
        if self.trace is not None:
            self.trace.end_iteration(self.algorithm, result.probes)
        self._check_finite(result)
        if self._due(self.config.checkpoint_every):
            self._save()
        self._look()

    def go_on(self, continuation: Continuation) -> None:
        """Stand where the run stood, and do what it did not come to."""
        state = continuation.run_state
        if self.trace is not None:
            iterations, chain = (0, "0" * 32) if state is None else (state["iterations"], state["chain"])
            if not self.trace.go_on(iterations, chain):
                self.logger.message(
                    f"{paths.TRACE} does not reach to the checkpoint: a new one begins behind iteration "
                    f"{iterations - 1:,}, and what there is stays in {OLD_TRACE}"
                )
        if state is None:
            return
        for row in continuation.rows:
            self._remember(row)
        steps, rows = self.algorithm.env_steps, continuation.rows
        # The last thing before the end may have been the row of this very step.
        logged = rows[-1] if rows and rows[-1]["env_steps"] == steps else None
        self.iterations, self._before = int(state["iterations"]), int(state["before"])
        self.logger.load_state_dict(state["logger"], logged)
        if logged is None:
            self._training_s, self._logged_steps = state["training_s"], int(state["logged_steps"])
            self._look()
            return
        self._logged_steps = steps
        with contextlib.suppress(_CutShort):
            if self._due(self.config.video_every) and not paths.video_path(self.run_dir, steps).exists():
                self._film()
            self.complete = self._last

    def interrupted(self) -> None:
        """Keep what a run that ends early has. Its next row waits until it goes on."""
        if self.config.checkpoint_every and self.saved_steps < self.algorithm.env_steps:
            self._save()

    def close(self) -> None:
        """Release what was opened."""
        self._evaluator.close()
        if self.trace is not None:
            self.trace.close()

    @property
    def _last(self) -> bool:
        return self.algorithm.env_steps >= self.config.total_env_steps

    def _due(self, every: int) -> bool:
        """Whether one of the multiples of `every` was passed in the last iteration; all is due at the end."""
        return every > 0 and (self._last or self.algorithm.env_steps // every > self._before // every)

    def _look(self) -> None:
        """Evaluate, log and film, as far as it is due; all of it at the end of the run."""
        with contextlib.suppress(_CutShort):
            evaluation = self._evaluate() if self._due(self.config.eval_every) else {}
            self.check_folder()
            if evaluation or self._last or self._due(self.config.log_every):
                self._log(evaluation)
            if self._due(self.config.video_every):
                self._film()
            self.complete = self._last

    def _act(self, obs: np.ndarray) -> np.ndarray:
        if self.stop.signal is not None:
            raise _CutShort
        return self.algorithm.act(obs)

    def _evaluate(self) -> dict[str, float]:
        """Fresh episodes for each evaluation, the same whatever else was evaluated before."""
        config = self.config
        seeds = env_seeds(config.seed, "evaluation", config.eval_episodes, self.algorithm.env_steps)
        return self._evaluator.run(self._act, seeds, LONGEST_EVALUATION).metrics()

    def _film(self) -> None:
        steps = self.algorithm.env_steps
        path = self._video.record(paths.video_path(self.run_dir, steps), steps)
        if path is not None:
            self.logger.video(path, steps)

    def _log(self, evaluation: Mapping[str, float]) -> None:
        steps = self.algorithm.env_steps
        # The speed of training alone; what observers take shows in wall_time_s.
        speed = (steps - self._logged_steps) / max(self._training_s, 1e-9)
        self._training_s, self._logged_steps = 0.0, steps
        self._remember(self.logger.log(steps, {**evaluation, "time/steps_per_second": speed}))

    def _remember(self, row: Mapping[str, float | None]) -> None:
        """The last value of every metric."""
        named = {name: value for name, value in row.items() if name not in ("env_steps", "wall_time_s")}
        self.final_metrics.update({name: value for name, value in named.items() if value is not None})

    def _check_finite(self, result: IterationResult) -> None:
        """Raise RunError where NaN or infinity has come up: nothing that follows would be worth anything."""
        found = first_not_finite(result)
        if found is None:
            return
        self._log({})
        steps, good = self.algorithm.env_steps, list_checkpoints(self.run_dir)
        also = f" (and then {', '.join(found.others[:4])})" if found.others else ""
        kept = (
            f"the last checkpoint before it is {good[-1].name}" if good else "there is no earlier checkpoint"
        )
        trace = f"; its fingerprints are the last line of {paths.TRACE}" if self.trace is not None else ""
        raise RunError(
            f"{found.item} became {found.value} at {found.place}{also} in iteration {self.iterations - 1}, "
            f"environment steps {self._before:,} to {steps:,}\n{kept}{trace}"
        )

    def _save(self) -> None:
        """Write a checkpoint; a disk that does not take it costs a note, and at its end the run."""
        algorithm, steps = self.algorithm, self.algorithm.env_steps
        state = algorithm.state_dict() | {"progress": algorithm.progress(), "foreign": foreign_state()}
        state["run"] = {
            "iterations": self.iterations,
            "before": self._before,
            "training_s": self._training_s,
            "logged_steps": self._logged_steps,
            "logger": self.logger.state_dict(),
            "chain": "0" * 32 if self.trace is None else self.trace.chain,
        }
        # A checkpoint must not outlive what leads to it.
        self.logger.sync()
        if self.trace is not None:
            self.trace.sync()
        try:
            self._checkpoints.save(steps, state, algorithm.experience)
            self.saved_steps = steps
        except OSError as error:
            good = list_checkpoints(self.run_dir)
            last = f"the last one is {good[-1].name}" if good else "there is none yet"
            problem = f"the checkpoint after {steps:,} steps could not be written, {error.strerror}; {last}"
            if self._last or self.stop.signal is not None:
                raise RunError(problem) from error
            self.logger.message(problem)


def make_trace(config: Config, run_dir: Path) -> Trace | None:
    """The fingerprints of the run, at the detail that is asked for."""
    if config.trace is TraceDetail.off:
        return None
    device = switches.resolve_device(config.device.name).type
    return Trace(run_dir, config.trace.name, config.algo.name, device)


def go_on(algorithm: Algorithm, config: Config, checkpoint: Checkpoint) -> int:
    """Continue from a checkpoint, bit for bit; the number of iterations that had ended there.

    What only observes may be configured otherwise than in the run that made it.
    """
    state = checkpoint.state
    check_same_run(checkpoint.config, config, checkpoint.path.name, OBSERVER_KEYS)
    algorithm.load_state_dict(state)
    progress = state["progress"]
    added = int(progress.get("added", 0))
    held = algorithm.experience(0)  # nothing, but of what size
    first = 0 if held is None else max(0, added - held.capacity)
    algorithm.load_progress(progress, load_experience(checkpoint, first, 0 if held is None else added))
    restore_foreign_state(state["foreign"])
    return int(state["run"]["iterations"])


def trial(config: Config, algorithm: Algorithm) -> checks.Trial:
    """The run of a configuration, to be tried."""
    return checks.Trial(
        switches=config.determinism,
        passes=algorithm.forward_passes(),
        device=switches.resolve_device(config.device.name),
        products=kernels.in_force()["products"],
        # Environments of others may use MuJoCo without saying so; the first one has been made by now.
        physics=uses_mujoco(config.env.id) or "mujoco" in sys.modules,
    )


def settled(job: Job) -> Job:
    """`job` with the way of matrix products by name, where its level leaves that open and it has not begun.

    So it stands in the configuration that is recorded, and whoever runs that again takes the same way. Says
    so if it is not the usual one.
    """
    config = from_dict(job.config)
    level, device = config.determinism, switches.resolve_device(config.device.name)
    if level.products is not Products.auto or device.type != "cpu" or job.resume:
        return job
    switches.apply(level, config.num_threads, config.compile, config.device.name)
    chosen = str(kernels.in_force()["products"])
    if chosen == "padded":
        seed_foreign_code(config.seed)
        here = dataclasses.replace(config, env=dataclasses.replace(config.env, num_workers=0))
        algorithm, _ = build_algorithm(here)
        try:
            chosen, problem = checks.choose_products(trial(config, algorithm))
        finally:
            algorithm.close()
        if problem is not None:
            to_stderr(f"determinism.products=auto: {problem}; {chosen} is taken")
    named = dataclasses.replace(config, determinism=dataclasses.replace(level, products=Products[chosen]))
    return dataclasses.replace(job, config=to_dict(named))


def check_level(config: Config, algorithm: Algorithm) -> dict[str, Any]:
    """What the run's level promises, tried here and now; `ConfigError` if it does not hold."""
    tried = trial(config, algorithm)
    return {name: checks.CHECKS[name](tried) for name in checks.promised(tried)}


class TrainingRun:
    """A run: what learns, what observes it, where that is kept, and how it ends."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        """Builds the algorithm; `ConfigError` if it does not fit. Nothing of the run is written yet."""
        self.config = from_dict(job.config)
        self.folder = folder
        self.continuation: Continuation | None = None
        self.observers: Observers | None = None
        self._job = job
        self._begun = False
        self._logger: Logger | None = None
        self._outcome: dict[str, Any] = {"status": "failed", "final_metrics": {}, "error": None}
        seed_foreign_code(self.config.seed)
        self.algorithm, self._envs = build_algorithm(self.config)

    def restore(self, continuation: Continuation) -> None:
        """Stand where the run is to go on. Changes no file."""
        self.continuation = continuation
        if continuation.checkpoint is not None:
            go_on(self.algorithm, self.config, continuation.checkpoint)

    def begin(self, snapshot: Snapshot, facts: DeterminismFacts) -> None:
        """Make the folder, or go on in it; from here on the record says how the run ends."""
        if self.continuation is None:
            self.folder.begin(snapshot, facts)
        else:
            self.folder.go_on(snapshot, self.continuation)
        self._begun = True

    def observe(self, stop: Stop) -> Observers:
        """Set up everything that looks at the run, and do what an earlier part of it did not come to."""
        config, run_dir = self.config, self.folder.path
        lines = LineFile(run_dir / paths.METRICS)
        self._logger = logger = Logger(make_sinks(config.logger, self._facts()), lines)
        since = None if self.continuation is None else self.continuation.checkpoint
        self.observers = observers = Observers(
            config, run_dir, self.algorithm, self._envs, logger, stop, since, self.folder.check
        )
        self._outcome["final_metrics"] = observers.final_metrics
        observers.trace = make_trace(config, run_dir)
        if observers.trace is not None:
            observers.trace.warn_through(logger.message)
        self.algorithm.probe = observers.trace or Probe()
        assert self.folder.git is not None
        if self.folder.git.problem is not None:
            logger.message(f"code not recorded: {self.folder.git.problem}")
        if self.continuation is not None:
            for note in self.continuation.notes:
                logger.message(note)
            observers.go_on(self.continuation)
        if config.compile:
            logger.message("compiling: the first update may take a minute")
        return observers

    def keep(self) -> None:
        """The loop is over: keep what there is."""
        assert self.observers is not None
        if not self.observers.complete:
            self.observers.interrupted()

    def conclude(self) -> None:
        """The loop is over, or was given up, and nothing went wrong."""
        assert self.observers is not None
        self._outcome["status"] = "finished" if self.observers.complete else "interrupted"

    def fail(self, error: BaseException) -> None:
        """Have the record say what ended the run."""
        text = exits.told(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        self._outcome["error"] = text.splitlines()[0]

    def close(self) -> None:
        """End the run: each step is taken whatever becomes of the ones before."""
        steps: list[Callable[[], None]] = []
        outcome = self._outcome
        if self.observers is not None:
            if self.observers.trace is not None:
                outcome["trace"] = self.observers.trace.facts()
            steps.append(self.observers.close)
        if self._logger is not None:
            steps.append(partial(self._logger.close, outcome["status"], outcome["final_metrics"]))
        if self._begun:
            steps.append(partial(self.folder.finish, **outcome))
        steps += [self.algorithm.close, self.folder.release]
        if self._begun and self._job.journal and self.config.logger.journal:
            runs_dir = Path(self.config.runs_dir).expanduser()
            steps.append(partial(write_run, self.folder.path, runs_dir, PROJECT))
        with contextlib.ExitStack() as ending:  # which takes the last one first
            for step in reversed(steps):
                ending.callback(step)

    def _facts(self) -> RunFacts:
        """What sinks are told of the run."""
        config, run_dir = self.config, self.folder.path
        sweep = self._job.sweep
        if self.continuation is not None:  # a job of a sweep may go on by itself
            sweep = self.continuation.record.sweep
        assert self.folder.git is not None
        return RunFacts(
            run_id=self._job.run_id,
            run_dir=run_dir,
            title=f"{config.algo.name} on {config.env.id}, seed {config.seed}",
            total_env_steps=config.total_env_steps,
            config=to_dict(config),
            git=asdict(self.folder.git),
            group=None if sweep is None else sweep.id,
            tags=[config.algo.name, config.env.id, config.determinism.level.name],
            notify=self._tell,
            resumed_at=None if self.continuation is None else self.continuation.env_steps,
            standing=lambda env_steps, value: _standing(config, env_steps, value),
        )

    def _tell(self, text: str) -> None:
        to_stderr(text) if self._logger is None else self._logger.message(text)


def train(algorithm: Algorithm, total_env_steps: int, stop: Stop, after: AfterIteration) -> None:
    """The loop; `after` looks at each iteration."""
    while stop.signal is None and algorithm.env_steps < total_env_steps:
        denormals.keep()  # observers load libraries too
        before, started = algorithm.env_steps, time.perf_counter()
        result = algorithm.train_iteration()
        seconds = time.perf_counter() - started
        stop.compiling = False
        after(result, before, seconds)


def run(job: Job) -> int:
    """Do the job, and return its exit status."""
    job = settled(job)
    config = from_dict(job.config)
    settings = switches.apply(config.determinism, config.num_threads, config.compile, config.device.name)
    folder, training = RunFolder(job), None
    try:
        continuation = None
        if job.resume:
            folder.take()
            snapshot = _snapshot(job)
            continuation = find_continuation(job, snapshot)
        training = TrainingRun(job, folder)
        settings = switches.confirm(settings)
        tried = check_level(config, training.algorithm)
        if continuation is None:
            snapshot = _snapshot(job)
        else:
            training.restore(continuation)
        facts = DeterminismFacts(
            level=config.determinism.level.name, settings=dict(settings), checks=dict(tried)
        )
        # Until here nothing of the run has been written or changed.
    except BaseException:
        folder.release() if training is None else training.close()
        raise
    stop = Stop()
    with stop.listening():
        try:
            training.begin(snapshot, facts)
            observers = training.observe(stop)
            with stop.abandoning(config.compile):
                train(training.algorithm, config.total_env_steps, stop, observers.after_iteration)
                training.keep()
            training.conclude()
        except BaseException as error:
            training.fail(error)
            raise
        finally:
            training.close()
    return FINISHED if observers.complete or stop.signal is None else stop.exit_status


def _snapshot(job: Job) -> Snapshot:
    return take_snapshot(PROJECT) if job.snapshot is None else Snapshot.from_json(job.snapshot)


def _standing(config: Config, env_steps: int, value: float) -> str | None:
    """Where a mean return of evaluations stands among published ones, None if nothing can be said."""
    found = targets.standing_of(to_dict(config), env_steps, value)
    return None if found is None else found.text


def main() -> int:
    """The process of a run, which finds its job in the environment; returns the exit status."""
    try:
        with exits.seen():
            return run(Job.from_environment())
    except (ConfigError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, ConfigError) else FAILED
    except SystemExit as error:  # of an environment or a library; this code never raises it
        print(f"error: {exits.told(error)}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    gc.freeze()  # a full collection in mid-training need not look at what was imported
    gc.enable()
    status = FAILED
    try:
        status = main()
    finally:
        exits.hold(status)
    sys.exit(status)
