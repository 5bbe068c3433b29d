"""One run: built, observed, looped, closed, in this order.

This is the only module that knows both algorithms and observers, and it never asks which algorithm or
environment it has. The end of an iteration is the only place where anything is logged, evaluated, filmed or
saved.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from rltemplate import lossy
from rltemplate.analysis.journal import write_run
from rltemplate.config.algorithms import ALGORITHMS, OffPolicyConfig, check_actions, check_memory
from rltemplate.config.command_args import exit_status
from rltemplate.config.loading import about_added, complete, to_dict
from rltemplate.config.schema import Config, Device, TraceDetail
from rltemplate.determinism import denormals, programs, switches
from rltemplate.determinism.machine import cpp_compiler, usable_memory
from rltemplate.determinism.programs import NoCompilerError
from rltemplate.envs.envs import Envs
from rltemplate.envs.exits import exits_are_errors
from rltemplate.envs.global_rng import seed_global_rng
from rltemplate.envs.make import check_env
from rltemplate.interfaces import Algorithm, ConfigError, RunError, SignalHandler, stop_signals
from rltemplate.learning.engine import CompilerError, Engine
from rltemplate.rng import Streams, env_seeds
from rltemplate.run.checkpoint import load_checkpoint, newest_checkpoint
from rltemplate.run.job import Job
from rltemplate.run.limits import check_networks, load_to_act
from rltemplate.run.lines import to_stderr
from rltemplate.run.paths import PROJECT
from rltemplate.run.training_run import TrainingRun, check_level, settled
from rltemplate.run.trust import check_config

# A scheduler signals all processes of a job, and one of them may pass the signal on to another: a repetition
# within this time is the same request, unless Ctrl-C was pressed twice.
_SAME_REQUEST_S = 2.0


class Stop:
    """A request to end after the present iteration; a later one ends the process at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` gets a line at the first request: an iteration may take a while."""
        self.signal: int | None = None
        self._say, self._since, self._answered = say, 0.0, False

    def requested(self) -> bool:
        """True once the run has been asked to end."""
        return self.signal is not None

    def exit_status(self) -> int:
        """The exit status of a run that was asked to end."""
        return 128 + (signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM)

    def answer(self, number: int, when: str = "once it is compiled") -> None:
        """Tell the user once that a signal was heard, which may wait for the compiler."""
        if not self._answered:
            self._answered = True
            self._say(f"{signal.Signals(number).name}: the run ends {when}")

    def request(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
            # A second Ctrl-C ends even a process that is busy outside of Python.
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            self.answer(number, "after this iteration; another Ctrl-C ends it at once")
        elif now - self._since > _SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


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
    config = job.config
    settings = switches.apply(config.determinism, config.num_threads, config.compile, config.device.name)
    runs_dir = Path(config.runs_dir).expanduser()
    training = TrainingRun(job, lambda run_dir: write_run(run_dir, runs_dir, PROJECT))
    stop = Stop(training.message)
    with contextlib.ExitStack() as signals, training, exits_are_errors():
        # Build. What does not fit is refused here, before anything of the run is written.
        training.find_checkpoint()
        seed_global_rng(config.seed)
        algorithm, envs = build_algorithm(config)
        training.algorithm = algorithm
        signals.enter_context(stop_signals(SignalHandler(stop.request, stop.answer)))
        if config.compile:
            settings |= try_programs(config, algorithm)
        facts = check_level(config, settings, algorithm)
        if stop.requested():  # nothing was begun
            return stop.exit_status()

        # Observe.
        training.begin(algorithm, facts)
        observers = training.observe(algorithm, envs, stop.requested)

        # Loop.
        while not stop.requested() and algorithm.env_steps < config.total_env_steps:
            denormals.keep_in_threads()  # observers load libraries, which may flush denormal numbers to zero
            observers.begin()
            before, started = algorithm.env_steps, time.perf_counter()
            try:
                result = algorithm.train_iteration()
            finally:  # also where such a change is the reason of an error
                observers.check_settings()
            observers.observe(result, before, time.perf_counter() - started)
        observers.finish()
    # Close: the order is in TrainingRun.__exit__.
    return 0 if observers.complete else stop.exit_status()


def build_algorithm(config: Config) -> tuple[Algorithm, Envs]:
    """The algorithm of a configuration and its environments; `ConfigError` if they do not fit each other."""
    if config.compile and cpp_compiler() is None:
        raise ConfigError(
            "compile=true needs a C++ compiler and Python's headers (apt install g++ python3-dev); "
            "use compile=false without them"
        )
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


def try_programs(config: Config, algorithm: Algorithm) -> dict[str, Any]:
    """Compile the functions of an algorithm, and compare them with what they are made of; facts about that.

    Changes nothing of the run. Raises NoCompilerError if they cannot be compiled, even after the cache was
    emptied, and ConfigError if they compute something else.
    """
    attempt = getattr(algorithm, "try_programs", None)
    if attempt is None:  # an algorithm of its own kind
        return {}
    to_stderr("compiling: this may take a minute")
    stepwise, folder = config.trace is TraceDetail.step, programs.cache_folder(os.environ)
    try:
        attempt(stepwise)
    except CompilerError as error:
        if not programs.remove_all(folder):
            raise NoCompilerError(f"{error}") from error
        try:
            attempt(stepwise)
        except CompilerError as again:
            raise NoCompilerError(f"{again}") from again
        to_stderr(f"damaged programs in {folder} were removed and made again ({error})")
    on_cpu = switches.resolve_device(config.device.name).type == "cpu"
    return {"vector_instructions": programs.vector_instructions()} if on_cpu else {}


def main() -> int:
    """The process of a run, which finds its job in the environment; returns the exit status."""
    gc.freeze()  # garbage collections during training then leave out the imported modules
    return exit_status(lambda: run(Job.from_environment()))


def load_policy(
    run_dir: Path, path: Path | None = None, trust: bool = False
) -> tuple[Config, Algorithm, Envs]:
    """The configuration of a run and its newest policy, ready to act in a process of its own.

    `path` names one of its checkpoints instead of the newest. `ConfigError` for a policy that cannot act, and
    without `trust` for one that names code from elsewhere (run/trust.py).
    """
    if path is not None:
        checkpoint = load_checkpoint(path, experience=False)
    elif (newest := newest_checkpoint(run_dir, to_stderr, experience=False)) is not None:
        checkpoint = newest
    else:
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    config, added = complete(checkpoint.config)
    if added:
        to_stderr(about_added(run_dir.name, added))
    if not trust:
        check_config(to_dict(config), run_dir)
    check_networks(config.algo, checkpoint.state, f"{checkpoint.path}")
    env = replace(config.env, num_envs=1, num_workers=0)
    plain = replace(config, env=env, compile=False, device=Device.cpu)
    if isinstance(config.algo, OffPolicyConfig):  # acting stores no transitions
        plain = replace(plain, algo=replace(config.algo, buffer_size=1))
    check_env(plain.env, note=lambda _: None)  # whatever it raises is said in a line
    algorithm, envs = build_algorithm(plain)
    # Random streams belong to the device of the training, and deterministic actions need none.
    state = {name: value for name, value in checkpoint.state.items() if name not in ("streams", "envs")}
    load_to_act(algorithm, state, envs.codec.obs_size, config.env.num_envs, f"{checkpoint.path}")
    return config, algorithm, envs


if __name__ == "__main__":
    sys.stdout = lossy(sys.stdout)  # a run has no result there; what it has are words of environments
    sys.exit(main())
