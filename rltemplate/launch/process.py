"""The fresh process of a run, with a prepared environment.

A single run replaces the process that checked the command line, so that its exit status, signals and
console are the run's own. A job of a sweep starts such a process with the same environment: its result is
that of the single run with its configuration, bit for bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from rltemplate.config.loading import from_dict
from rltemplate.config.schema import Config
from rltemplate.determinism.levels import prepared
from rltemplate.run.job import JOB_VARIABLE, PROJECT, Job
from rltemplate.types import ConfigError

WORKER = "rltemplate.train"
# For the processes of a sweep's launcher: the file for signals, the command's environment, and the folder in
# which Hydra keeps its own files (conf/config.yaml).
LAUNCHER_VARIABLES = ("RLTEMPLATE_STOP", "RLTEMPLATE_COMMAND", "RLTEMPLATE_SWEEP")
STOP_VARIABLE, COMMAND_VARIABLE, _ = LAUNCHER_VARIABLES


def worker_command() -> list[str]:
    """The command of a run's process.

    `-P` keeps the current folder out of the import path: started from inside another checkout, a run would
    otherwise import that one's code.
    """
    return [sys.executable, "-P", "-m", WORKER]


def worker_environment(job: Job, config: Config, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run's process, the same for equal jobs of any parent."""
    environment = prepared(base, config.determinism, config.num_threads)
    for name in LAUNCHER_VARIABLES:
        environment.pop(name, None)
    own = str(PROJECT)
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", own)]
    return environment | {"PYTHONPATH": os.pathsep.join([own, *others]), JOB_VARIABLE: job.to_json()}


def become(job: Job) -> NoReturn:
    """Become the process of a run."""
    sys.stdout.flush()
    sys.stderr.flush()
    words = worker_command()
    try:
        os.execve(words[0], words, worker_environment(job, from_dict(job.config), os.environ))
    except OSError as error:  # such as an override that is longer than the 128 KiB of Linux
        raise ConfigError(f"the process of the run could not be started: {error.strerror}") from error
