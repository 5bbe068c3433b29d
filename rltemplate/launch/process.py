"""The fresh process of a run, with a prepared environment.

A single run replaces the process that checked the command line, so that its exit status, signals and
console are the run's own. A job of a sweep starts such a process with the same environment: its result is
that of the single run with its configuration, bit for bit.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from rltemplate.config.loading import from_dict
from rltemplate.config.schema import Config
from rltemplate.config.validation import check_folder
from rltemplate.determinism.switches import prepared
from rltemplate.run.job import JOB_VARIABLE, PROJECT, Job, new_job
from rltemplate.types import ConfigError

WORKER = "rltemplate.train"
SWEEP_VARIABLE = "RLTEMPLATE_SWEEP"
SESSION_VARIABLE = "RLTEMPLATE_SESSION"
INHERITED_VARIABLE = "RLTEMPLATE_INHERITED"


def worker_command() -> list[str]:
    """The command of a run's process.

    `-P` keeps the current folder out of the import path: started from inside another checkout, a run would
    otherwise import that one's code.
    """
    return [sys.executable, "-P", "-m", WORKER]


def worker_environment(job: Job, config: Config, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run's process, the same for equal jobs of any parent."""
    environment = prepared(base, config.determinism, config.num_threads)
    for name in (SWEEP_VARIABLE, SESSION_VARIABLE, INHERITED_VARIABLE):
        environment.pop(name, None)
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = str(PROJECT)
    environment["PYTHONPATH"] = os.pathsep.join([own, *(path for path in others if path != own)])
    environment[JOB_VARIABLE] = job.to_json()
    return environment


def run_single(
    config: Config,
    command: Sequence[str],
    *,
    env_name: str | None = None,
    overrides: Sequence[str] = (),
    run_here: Callable[[], int] | None = None,
) -> NoReturn:
    """Become the process of this run, or train in this one with `run_here`.

    `env_name` names the folder; without it the id of the environment does.
    """
    check_folder(config)
    job = new_job(config, command, env_name=env_name or config.env.id, overrides=overrides, journal=True)
    if run_here is None:
        become(job)
    environment = worker_environment(job, config, os.environ)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(run_here())


def become(job: Job) -> NoReturn:
    """Become the process of a run."""
    sys.stdout.flush()
    sys.stderr.flush()
    words = worker_command()
    try:
        os.execve(words[0], words, worker_environment(job, from_dict(job.config), os.environ))
    except OSError as error:
        if error.errno == errno.E2BIG:  # an override of a hundred kilobytes, for instance
            raise ConfigError(
                "the configuration is too long to be handed to the process of the run; Linux allows 128 KiB, "
                "so shorten its longest value"
            ) from error
        raise ConfigError(f"the process of the run could not be started: {error.strerror}") from error
