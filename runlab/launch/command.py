"""`make train`: check the arguments of the command, then become the process of a run.

Next: `main` of worker.py, in that process. A list of values is a sweep (launch/sweep.py), of which
each job starts such a process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NoReturn

from runlab.config.command_args import program, rest
from runlab.errors import in_a_line
from runlab.launch.process import worker_command, worker_environment
from runlab.run.job import Job, new_job


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train: algo=sac env=Hopper seed=3; lists of values make a sweep.

    Any key of conf/ can be set. `debug=fast` makes a short run, and `debug=here` one in this process, for a
    debugger. The command of a sweep with `sweep=resume` added to it goes on with that sweep. `--cfg job`
    prints the configuration.
    Exit status: 0 finished, 2 refused, 130 or 143 interrupted, 1 any other failure.
    """

    overrides: list[str] = rest(options=True)


def main(args: Args) -> int:
    """Parse, check, and become the process of the run; returns for a sweep, `--cfg` and `debug=here` only."""
    # Imported here: `make resume` imports this module, and Hydra takes a quarter of a second.
    from runlab.config.loading import to_yaml
    from runlab.launch.checks import HERE, check_configs, check_plan, planned

    command = program("train", *args.overrides)
    plan = planned(args.overrides)
    if plan.shown:
        print(to_yaml(plan.configs[0]), end="")
        return 0
    check_plan(plan)
    if plan.sweep:
        from runlab.launch.sweep import run_sweep

        return run_sweep(plan, command)
    chosen = "compile" in plan.auto_keys
    job = new_job(plan.configs[0], command, plan.overrides[0], auto_compile=chosen)
    if HERE in plan.overrides[0]:
        environment = worker_environment(job, os.environ)
        os.environ.clear()
        os.environ.update(environment)
        check_configs(plan.configs)
        from runlab.launch.worker import main as work

        return work()
    return become(job)


def become(job: Job) -> NoReturn:
    """Replace this process by that of the run (worker.py), which finds the job in its environment.

    A fresh interpreter, since libraries read environment variables when they are loaded. The run gets the
    console and all signals, and its exit status is the one of the command.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    words, environment = worker_command(), worker_environment(job, os.environ)
    with in_a_line("the process of the run could not be started"):
        os.execve(words[0], words, environment)  # fails for an override that is longer than Linux's 128 KiB
