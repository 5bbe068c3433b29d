"""The process of a run: its level, the project's algorithm and loop, signals, and the end.

`python -P -m runlab.launch.worker` finds the job of the run in an environment variable.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from dataclasses import replace

from runlab import lossy
from runlab.config.command_args import exit_status
from runlab.config.project import project
from runlab.config.schema import TraceDetail
from runlab.determinism import switches
from runlab.determinism.programs import NoCompilerError
from runlab.envs.exits import exits_are_errors
from runlab.envs.global_rng import seed_global_rng
from runlab.errors import ConfigError
from runlab.interfaces import act_of
from runlab.launch.subprocesses import end_with_parent
from runlab.run.files import to_stderr
from runlab.run.job import Job
from runlab.run.trace import check_state
from runlab.run.training_run import TrainingRun, check_level, with_named_choices
from runlab.signals import Stop, stop_signals
from runlab.trial import try_programs


def run(job: Job) -> int:
    """Make the run of a job, without the compiler if `compile=auto` chose it and it does not work."""
    try:
        return _run(job)
    except NoCompilerError as error:  # before anything was begun
        if not job.auto_compile:
            instead = "" if job.resume else "; use compile=false"
            raise ConfigError(f"compile=true: {error}{instead}") from error
        to_stderr(f"compile=auto: this run is not compiled, since {error}")
        return _run(replace(job, config=replace(job.config, compile=False)))


def _run(job: Job) -> int:
    job = with_named_choices(job)
    config = job.config
    settings = switches.apply(config)
    training = TrainingRun(job)
    stop = Stop(training.message)
    with contextlib.ExitStack() as signals, training, exits_are_errors():
        # Build. What does not fit is refused here, before anything of the run is written.
        training.prepare()
        seed_global_rng(config.seed)
        algorithm, envs = project().build(config)
        training.algorithm = algorithm
        check_state(algorithm)
        act_of(algorithm, config.eval_policy)
        signals.enter_context(stop_signals(stop))
        if config.compile:
            settings |= try_programs(algorithm, config.trace is TraceDetail.step, to_stderr)
        facts = check_level(config, settings, algorithm)
        if stop.requested():  # nothing was begun
            return stop.exit_status()

        # Observe and train.
        training.begin(algorithm, facts)
        observers = training.observe(algorithm, envs, stop.requested)
        project().train(config, algorithm, observers)
        observers.finish()
        if not (observers.complete or stop.requested()):
            training.message(f"the project's loop has ended after {algorithm.env_steps:,} steps by itself")
    # Close: the order is in TrainingRun.__exit__.
    return stop.exit_status() if stop.requested() and not observers.complete else 0


def main() -> int:
    """Run the job of this process; the exit status."""
    end_with_parent()
    gc.freeze()  # garbage collections during training then leave out the imported modules
    return exit_status(lambda: run(Job.from_environment()))


if __name__ == "__main__":
    sys.stdout = lossy(sys.stdout)  # only environments print there, and a closed pipe must not end the run
    sys.exit(main())
