"""One run: the composition root and the only training loop.

This is the only module that knows both what learns and what observes. It never asks which algorithm or
environment it has. The end of an iteration is the only place where anything is logged, evaluated, filmed or
saved, so that all of these share one clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rltemplate import kernels
from rltemplate.algos import ALGORITHMS
from rltemplate.config import Config, Device, TraceDetail, from_dict, load_config, to_dict, to_yaml
from rltemplate.envs import Envs, EnvSpec, make_env, uses_mujoco
from rltemplate.foreign_rng import foreign_state, restore_foreign_state, seed_foreign_code
from rltemplate.launch import PROJECT, Job
from rltemplate.rng import Streams, env_seeds
from rltemplate.run import checks, determinism, paths
from rltemplate.run.checkpoint import load_checkpoint, load_experience, save_checkpoint
from rltemplate.run.evaluate import Evaluator
from rltemplate.run.faults import VARIABLE as FAULT
from rltemplate.run.faults import Fault, parse_fault
from rltemplate.run.logger import JsonlWriter, Logger
from rltemplate.run.machine import machine_facts, package_versions
from rltemplate.run.record import Record
from rltemplate.run.sinks import RunFacts, make_sinks
from rltemplate.run.snapshot import GitRecord, Snapshot, commit_outcome, commit_run, take_snapshot
from rltemplate.run.trace import Trace
from rltemplate.run.video import VideoRecorder
from rltemplate.types import Algorithm, ConfigError, IterationResult, Probe

if TYPE_CHECKING:
    import numpy as np

FINISHED, REFUSED = 0, 2

# What an iteration reported, the environment steps before it, and how many seconds it took.
AfterIteration = Callable[[IterationResult, int, float], None]

# Bound for environments without a time limit of their own, which a good policy might never leave.
LONGEST_EVALUATION = 10_000
_KEPT_CHECKPOINTS = 3


class Stop:
    """A request to end after the present iteration; the signal's second arrival ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stop]:
        """Take Ctrl-C, termination and a closed terminal as requests while the block runs."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._request) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


class _CutShort(Exception):
    """An evaluation or a video was given up because the run has been asked to end."""


def build_algorithm(config: Config) -> tuple[Algorithm, Envs]:
    """Environments and algorithm of a configuration; `ConfigError` if they do not fit each other."""
    if config.compile and not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        raise ConfigError(
            "compile=true needs a C++ compiler (apt install g++); use compile=false without one"
        )
    streams = Streams(config.seed, determinism.resolve_device(config.device.name))
    num_envs = config.env.num_envs
    envs = Envs(env_spec(config), num_envs, env_seeds(config.seed, "env", num_envs), config.env.async_envs)
    module, name = ALGORITHMS[config.algo.name].implementation.split(":")
    implementation = getattr(importlib.import_module(module), name)
    try:
        algorithm = implementation(config.algo, envs, streams, config.total_env_steps, config.compile)
    except ConfigError:
        envs.close()
        raise
    return algorithm, envs


def env_spec(config: Config) -> EnvSpec:
    """What the environment part of a configuration means to Gymnasium."""
    return EnvSpec(config.env.id, config.env.max_episode_steps, config.env.kwargs)


def load_policy(run_dir: Path) -> tuple[Config, Algorithm, Envs]:
    """The configuration of a run and its newest policy, ready to act in a process of its own."""
    config = load_config(run_dir / paths.CONFIG)
    state = load_checkpoint(run_dir)
    env = dataclasses.replace(config.env, num_envs=1, async_envs=False)
    algorithm, envs = build_algorithm(dataclasses.replace(config, env=env, compile=False, device=Device.cpu))
    # Streams belong to the device that trained, and a policy that is only looked at needs none of them.
    algorithm.load_state_dict({**state, "streams": {}})
    return config, algorithm, envs


class Observers:
    """Everything that looks at a run: logging, evaluation, video and checkpoints."""

    def __init__(
        self, config: Config, run_dir: Path, algorithm: Algorithm, envs: Envs, logger: Logger, stop: Stop
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.algorithm = algorithm
        self.logger = logger
        self.stop = stop
        self.complete = False  # whether the last iteration was observed to its end
        self.final_metrics: dict[str, float] = {}
        self.trace: Trace | None = None
        self._codec = envs.codec
        self._evaluator = Evaluator(lambda: make_env(envs.spec), envs.codec)
        self._video = VideoRecorder(
            lambda render_mode, **extra: make_env(envs.spec, render_mode, **extra),
            lambda obs: self._codec.decode_action(self._act(self._codec.encode_obs([obs])))[0],
            seed=config.seed,
            note=logger.message,
        )
        self._training_s = 0.0  # time spent in iterations since the last log point
        self._logged_steps = self._saved_steps = algorithm.env_steps
        self._kept_experience = 0  # transitions that are on the disk
        self.iterations = 0

    def after_iteration(self, result: IterationResult, before: int, seconds: float) -> None:
        """Do what became due between the steps `before` and now; everything at the end of the run."""
        config, steps = self.config, self.algorithm.env_steps
        self.logger.observe(result)
        self.iterations += 1
        if self.trace is not None:
            self.trace.end_iteration(steps, result.probes)
        self._training_s += seconds
        last = steps >= config.total_env_steps

        def due(every: int) -> bool:
            return every > 0 and (steps // every > before // every or last)

        if due(config.checkpoint_every):  # first, so that trouble in what follows costs no weights
            self._save()
        with contextlib.suppress(_CutShort):
            evaluation = self._evaluate() if due(config.eval_every) else {}
            if evaluation or last or due(config.log_every):
                self._log(evaluation)
            if due(config.video_every):
                path = self._video.record(paths.video_path(self.run_dir, steps), steps)
                if path is not None:
                    self.logger.video(path, steps)
            self.complete = last

    def interrupted(self) -> None:
        """Keep what a run that ends early has: its last row and a checkpoint."""
        if self._logged_steps < self.algorithm.env_steps:
            self._log({})
        if self.config.checkpoint_every and self._saved_steps < self.algorithm.env_steps:
            self._save()

    def close(self) -> None:
        """Release what was opened."""
        self._evaluator.close()
        if self.trace is not None:
            self.trace.close()

    def _act(self, obs: np.ndarray) -> np.ndarray:
        if self.stop.signal is not None:
            raise _CutShort
        return self.algorithm.act(obs)

    def _evaluate(self) -> dict[str, float]:
        """Fresh episodes for each evaluation, the same whatever else was evaluated before."""
        config = self.config
        seeds = env_seeds(config.seed, "evaluation", config.eval_episodes, self.algorithm.env_steps)
        return self._evaluator.run(self._act, seeds, LONGEST_EVALUATION).metrics()

    def _log(self, evaluation: Mapping[str, float]) -> None:
        steps = self.algorithm.env_steps
        # The speed of training alone; what observers take shows in wall_time_s.
        speed = (steps - self._logged_steps) / max(self._training_s, 1e-9)
        self._training_s, self._logged_steps = 0.0, steps
        self.final_metrics.update(self.logger.log(steps, {**evaluation, "time/steps_per_second": speed}))

    def _save(self) -> None:
        algorithm = self.algorithm
        self._saved_steps = algorithm.env_steps
        state = algorithm.state_dict()
        state |= {"progress": algorithm.progress(), "foreign": foreign_state(), "iterations": self.iterations}
        experience = algorithm.experience(self._kept_experience)
        save_checkpoint(self.run_dir, self._saved_steps, state, _KEPT_CHECKPOINTS, experience)
        if experience is not None:
            self._kept_experience = experience.last


def make_trace(config: Config, run_dir: Path) -> Trace | None:
    """The fingerprints of the run, at the detail that is asked for."""
    if config.trace is TraceDetail.off:
        return None
    device = determinism.resolve_device(config.device.name).type
    return Trace(run_dir, config.trace.name, config.algo.name, device)


def watched(trace: Trace | None) -> tuple[Probe, Fault | None]:
    """The probe that an algorithm is given, with the fault in front of it that a test may ask for."""
    probe = trace or Probe()
    wanted = os.environ.get(FAULT)
    if wanted is None:
        return probe, None
    fault = Fault(probe, wanted)
    return fault, fault


def go_on(algorithm: Algorithm, run_dir: Path, checkpoint: Path) -> int:
    """Continue from a checkpoint, bit for bit; the number of iterations that had ended there."""
    state = load_checkpoint(run_dir, checkpoint)
    if "progress" not in state:
        raise ConfigError(f"{checkpoint}: was made by an earlier version, without the state of environments")
    algorithm.load_state_dict(state)
    progress = state["progress"]
    held = algorithm.experience(0)
    added = int(progress.get("added", 0))
    first = 0 if held is None else max(0, added - held.capacity)
    algorithm.load_progress(progress, {} if held is None else load_experience(run_dir, first, added))
    restore_foreign_state(state["foreign"])
    return int(state["iterations"])


def trial(config: Config, algorithm: Algorithm) -> checks.Trial:
    """The run of a configuration, to be tried."""
    return checks.Trial(
        switches=config.determinism,
        passes=algorithm.forward_passes(),
        device=determinism.resolve_device(config.device.name),
        products=kernels.in_force()["products"],
        # Environments of others may use MuJoCo without saying so; the first one has been made by now.
        physics=uses_mujoco(config.env.id) or "mujoco" in sys.modules,
    )


def check_level(config: Config, algorithm: Algorithm) -> dict[str, Any]:
    """What the run's level promises, tried here and now; `ConfigError` if it does not hold."""
    tried = trial(config, algorithm)
    return {name: checks.CHECKS[name](tried) for name in checks.promised(tried)}


def train(algorithm: Algorithm, total_env_steps: int, stop: Stop, after: AfterIteration) -> None:
    """The loop."""
    while algorithm.env_steps < total_env_steps and stop.signal is None:
        before, started = algorithm.env_steps, time.perf_counter()
        result = algorithm.train_iteration()
        after(result, before, time.perf_counter() - started)


def run(job: Job) -> int:
    """Do the job, and return its exit status."""
    config = from_dict(job.config)
    settings = determinism.apply(config.determinism, config.num_threads, config.compile, config.device.name)
    seed_foreign_code(config.seed)
    algorithm, envs = build_algorithm(config)
    try:
        tried = check_level(config, algorithm)
        if FAULT in os.environ:
            parse_fault(os.environ[FAULT])
            if config.compile:
                raise ConfigError(f"{FAULT}: a compiled update cannot be reached; use compile=false")
        # From here on nothing refuses, and until here nothing has been written.
    except BaseException:
        algorithm.close()
        raise
    stop, observers = Stop(), None
    outcome: dict[str, Any] = {"status": "failed", "final_metrics": {}, "error": None}
    # On the way out each step is taken whatever becomes of the others, the last entered first.
    with stop.listening(), contextlib.ExitStack() as ending:
        ending.callback(algorithm.close)
        run_dir = _make_run_dir(Path(job.run_dir))
        (run_dir / paths.CONFIG).write_text(to_yaml(config))
        snapshot = _snapshot(job)
        git = commit_run(snapshot, job.run_id, to_yaml(config))
        record = Record.create(run_dir, _first_facts(job, config, git, settings, tried))
        ending.callback(lambda: _finish(record, outcome, snapshot, git))
        try:
            logger = _make_logger(job, config, run_dir, git)
            ending.callback(lambda: logger.close(outcome["status"], outcome["final_metrics"]))
            observers = Observers(config, run_dir, algorithm, envs, logger, stop)
            ending.callback(observers.close)
            outcome["final_metrics"] = observers.final_metrics
            observers.trace = make_trace(config, run_dir)
            algorithm.probe, fault = watched(observers.trace)
            if git.problem is not None:
                logger.message(f"code not recorded: {git.problem}")
            train(algorithm, config.total_env_steps, stop, observers.after_iteration)
            if fault is not None and not fault.done:
                raise RuntimeError(f"{FAULT}={os.environ[FAULT]}: the run met no such item")
            if not observers.complete:
                observers.interrupted()
            outcome["status"] = "finished" if observers.complete else "interrupted"
        except BaseException as raised:
            outcome["error"] = f"{type(raised).__name__}: {raised}".splitlines()[0]
            raise
        finally:
            if observers is not None and observers.trace is not None:
                outcome["trace"] = observers.trace.facts()
    assert observers is not None
    return FINISHED if observers.complete or stop.signal is None else 128 + stop.signal


def _make_run_dir(run_dir: Path) -> Path:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: cannot be made, {error.strerror}") from error
    if any(run_dir.iterdir()):
        raise ConfigError(f"run_dir={run_dir}: is not empty; a run needs a folder of its own")
    return run_dir


def _snapshot(job: Job) -> Snapshot:
    return take_snapshot(PROJECT) if job.snapshot is None else Snapshot.from_json(job.snapshot)


def _finish(record: Record, outcome: Mapping[str, Any], snapshot: Snapshot, git: GitRecord) -> None:
    """How the run ended, in its record and on top of its commit."""
    record.finish(**outcome)
    problem = commit_outcome(snapshot, git, record.outcome())
    if problem is not None:
        record.update(outcome_not_recorded=problem)


def _first_facts(
    job: Job, config: Config, git: GitRecord, settings: Mapping[str, Any], tried: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "id": job.run_id,
        "status": "running",
        "command_line": job.command,
        "overrides": job.overrides,
        "sweep": None if job.sweep is None else asdict(job.sweep),
        "git": asdict(git),
        "determinism": {
            "level": config.determinism.level.name,
            "settings": dict(settings),
            "checks": dict(tried),
        },
        "environment": determinism.influences(os.environ),
        "versions": package_versions(),
        "machine": machine_facts(),
    }


def _make_logger(job: Job, config: Config, run_dir: Path, git: GitRecord) -> Logger:
    facts = RunFacts(
        run_id=job.run_id,
        run_dir=run_dir,
        title=f"{config.algo.name} on {config.env.id}, seed {config.seed}: {run_dir}",
        total_env_steps=config.total_env_steps,
        config=to_dict(config),
        git=asdict(git),
        group=job.sweep.id if job.sweep else None,
        tags=[config.algo.name, config.env.id, config.determinism.level.name],
        notify=lambda text: logger.message(text),
    )
    logger = Logger(make_sinks(config.logger, facts), JsonlWriter(run_dir / paths.METRICS))
    return logger


def main() -> int:
    """The process of a run, which finds its job in the environment; returns the exit status."""
    try:
        return run(Job.from_environment())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
