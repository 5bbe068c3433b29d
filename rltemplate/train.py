"""One run: built, observed, looped, closed, in this order.

This is the only module that knows both algorithms and observers, and it never asks which algorithm or
environment it has. The end of an iteration is the only place where anything is logged, evaluated, filmed or
saved.
"""

from __future__ import annotations

import contextlib
import gc
import pkgutil
import sys
from dataclasses import replace
from pathlib import Path

from rltemplate import lossy
from rltemplate.analysis.journal import write_run
from rltemplate.config.algorithms import ALGORITHMS, check_actions, check_memory
from rltemplate.config.command_args import exit_status
from rltemplate.config.schema import Config, Device, TraceDetail
from rltemplate.determinism import switches
from rltemplate.determinism.machine import usable_memory
from rltemplate.determinism.programs import NoCompilerError
from rltemplate.envs.envs import Envs
from rltemplate.envs.exits import exits_are_errors
from rltemplate.envs.global_rng import seed_global_rng
from rltemplate.interfaces import Algorithm, ConfigError, RunError
from rltemplate.learning.engine import Engine
from rltemplate.learning.trial import try_programs
from rltemplate.rng import Streams, env_seeds
from rltemplate.run.job import Job
from rltemplate.run.lines import to_stderr
from rltemplate.run.paths import PROJECT
from rltemplate.run.training_run import TrainingRun, check_level, settled
from rltemplate.signals import Stop, stop_signals


def run(job: Job) -> int:
    """Make the run of a job, without the compiler if it was chosen by `auto` and cannot be had."""
    try:
        return _run(job)
    except NoCompilerError as error:  # before anything was begun
        if not job.auto_compile:
            instead = "" if job.resume else "; use compile=false"
            raise ConfigError(f"compile=true: {error}{instead}") from error
        to_stderr(f"compile=auto: this run is not compiled, since {error}")
        return _run(replace(job, config=replace(job.config, compile=False)))


def _run(job: Job) -> int:
    job = settled(job)
    config, runs_dir = job.config, Path(job.config.runs_dir).expanduser()
    settings = switches.apply(config.determinism, config.num_threads, config.compile, config.device.name)
    training = TrainingRun(job, lambda run_dir: write_run(run_dir, runs_dir, PROJECT))
    stop = Stop(training.message)
    with contextlib.ExitStack() as signals, training, exits_are_errors():
        # Build. What does not fit is refused here, before anything of the run is written.
        training.find_checkpoint()
        seed_global_rng(config.seed)
        algorithm, envs = build_algorithm(config)
        training.algorithm = algorithm
        signals.enter_context(stop_signals(stop))
        if config.compile:
            settings |= try_programs(algorithm, config.trace is TraceDetail.step, to_stderr)
        facts = check_level(config, settings, algorithm)
        if stop.requested():  # nothing was begun
            return stop.exit_status()

        # Observe.
        training.begin(algorithm, facts)
        observers = training.observe(algorithm, envs, stop.requested)

        # Loop.
        while not stop.requested() and algorithm.env_steps < config.total_env_steps:
            with observers.iteration():
                result = algorithm.train_iteration()
            observers.observe(result)
        observers.finish()
    # Close: the order is in TrainingRun.__exit__.
    return 0 if observers.complete else stop.exit_status()


def build_algorithm(config: Config) -> tuple[Algorithm, Envs]:
    """The algorithm of a configuration and its environments; `ConfigError` if they do not fit each other."""
    streams = Streams(config.seed, switches.resolve_device(config.device.name))
    envs = Envs(config.env, env_seeds(config.seed, "env", config.env.num_envs))
    implementation = pkgutil.resolve_name(ALGORITHMS[config.algo.name].implementation)
    engine = Engine(config.compile, streams.device)
    try:
        check_actions(config.algo.name, envs.codec)
        if config.device is Device.cpu:
            check_memory(config.algo, config.env.num_envs, envs.codec, usable_memory())
        algorithm = implementation(config.algo, envs, streams, config.total_env_steps, engine)
        algorithm.state_dict()  # refuses a state that no checkpoint can hold
    except (ConfigError, RunError) as error:
        envs.close()
        raise ConfigError(f"{error}") from error
    return algorithm, envs


def main() -> int:
    """The process of a run, which finds its job in the environment; returns the exit status."""
    gc.freeze()  # garbage collections during training then leave out the imported modules
    return exit_status(lambda: run(Job.from_environment()))


if __name__ == "__main__":
    sys.stdout = lossy(sys.stdout)  # a run has no result there; what it has are words of environments
    sys.exit(main())
