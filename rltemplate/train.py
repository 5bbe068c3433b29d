"""One run: built, observed, looped, closed, in this order.

This is the only module that knows both what learns and what observes, and it never asks which algorithm or
environment it has. The end of an iteration is the only place where anything is logged, evaluated, filmed or
saved.
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
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rltemplate.algos.build import build_algorithm
from rltemplate.analysis import targets
from rltemplate.analysis.journal import write_run
from rltemplate.config.algorithms import check_buffer
from rltemplate.config.loading import about_added, from_dict, load_recorded, to_dict
from rltemplate.config.schema import Config, Device
from rltemplate.determinism import denormals, switches
from rltemplate.determinism.machine import usable_memory
from rltemplate.envs.envs import Envs
from rltemplate.envs.global_rng import seed_global_rng
from rltemplate.envs.make import exits_are_errors
from rltemplate.run import paths
from rltemplate.run.checkpoint import newest_checkpoint
from rltemplate.run.continuation import check_same_run
from rltemplate.run.job import PROJECT, Job
from rltemplate.run.level import check_level, settled
from rltemplate.run.lines import to_stderr
from rltemplate.run.signals import Stop
from rltemplate.run.training_run import TrainingRun
from rltemplate.types import OBSERVER_KEYS, Algorithm, ConfigError, RunError

FINISHED, FAILED, REFUSED = 0, 1, 2


def run(job: Job) -> int:
    """Make the run of a job, and return its exit status."""
    job = settled(job)
    config = from_dict(job.config)
    settings = switches.apply(config.determinism, config.num_threads, config.compile, config.device.name)
    training, stop = TrainingRun(job, partial(_write_journal, config)), Stop()
    with contextlib.ExitStack() as signals:
        try:
            with exits_are_errors():
                # Build. What does not fit is refused here, before anything of the run is written.
                training.find_checkpoint()
                seed_global_rng(config.seed)
                algorithm, envs = build_algorithm(config)
                training.own(algorithm)
                if config.device is Device.cpu:
                    check_buffer(config.algo, envs.codec, usable_memory())
                facts = check_level(config, settings, algorithm)

                # Observe.
                signals.enter_context(stop.listening())
                training.begin(algorithm, facts)
                observers = training.observe(algorithm, envs, stop, partial(_standing, config))

                # Loop.
                while stop.signal is None and algorithm.env_steps < config.total_env_steps:
                    denormals.keep()  # observers load libraries, which may switch them off
                    before, started = algorithm.env_steps, time.perf_counter()
                    result = algorithm.train_iteration()
                    observers.observe(result, before, time.perf_counter() - started)
                training.finish()
        except BaseException as error:
            training.fail(error)
            raise
        finally:
            training.close()
    return FINISHED if observers.complete or stop.signal is None else stop.exit_status


def _write_journal(config: Config, run_dir: Path) -> None:
    write_run(run_dir, Path(config.runs_dir).expanduser(), PROJECT)


def _standing(config: Config, env_steps: int, value: float) -> str | None:
    """A line that places a mean return of evaluations among published ones, if there is anything to say."""
    found = targets.standing_of(to_dict(config), env_steps, value)
    return None if found is None else found.text


def main() -> int:
    """The process of a run, which finds its job in the environment; returns the exit status."""
    try:
        return run(Job.from_environment())
    except (ConfigError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, ConfigError) else FAILED


def load_policy(run_dir: Path, note: Callable[[str], None] = to_stderr) -> tuple[Config, Algorithm, Envs]:
    """The configuration of a run and its newest policy, ready to act in a process of its own."""
    config, added = load_recorded(run_dir / paths.CONFIG)
    if added:
        note(about_added(run_dir.name, added))
    checkpoint = newest_checkpoint(run_dir, note, experience=False)
    if checkpoint is None:
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    check_same_run(checkpoint.config, config, checkpoint.path.name, (*OBSERVER_KEYS, "total_env_steps"))
    env = dataclasses.replace(config.env, num_envs=1, num_workers=0)
    algorithm, envs = build_algorithm(dataclasses.replace(config, env=env, compile=False, device=Device.cpu))
    # Streams belong to the device that trained, and a policy that is only looked at needs none of them.
    state = {name: value for name, value in checkpoint.state.items() if name not in ("streams", "envs")}
    algorithm.load_state_dict(state)
    return config, algorithm, envs


if __name__ == "__main__":
    gc.freeze()  # a full collection in mid-training need not look at what was imported
    gc.enable()
    sys.exit(main())
