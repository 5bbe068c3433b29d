"""Command and environment of a run's process (worker.py), equal for a single run and a job of a sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from runlab import INSTALLED
from runlab.determinism.levels import prepared
from runlab.run.job import JOB_VARIABLE, Job
from runlab.run.paths import PROJECT

# Variables of a sweep's launcher, which its runs do not get: the file for signals, the variables of the
# command, and the folder in which Hydra keeps its own files (conf/config.yaml).
LAUNCHER_VARIABLES = ("RUNLAB_STOP", "RUNLAB_COMMAND", "RUNLAB_SWEEP")
STOP_VARIABLE, COMMAND_VARIABLE, _ = LAUNCHER_VARIABLES


def worker_command() -> list[str]:
    """The command of a run's process.

    `-P` keeps the current folder out of the import path. In the folder of another checkout, a run would
    otherwise import the code of that checkout.
    """
    return [sys.executable, "-P", "-m", "runlab.launch.worker"]


def worker_environment(job: Job, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run's process: equal for equal jobs, whatever process starts it."""
    environment = prepared(base, job.config.determinism, job.config.num_threads)
    for name in LAUNCHER_VARIABLES:
        environment.pop(name, None)
    return environment | {"PYTHONPATH": import_path(environment), JOB_VARIABLE: job.to_json()}


def import_path(environment: Mapping[str, str]) -> str:
    """PYTHONPATH with the folder of this package in front; an installed one is found without it."""
    own = [] if INSTALLED else [str(PROJECT)]
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *own)]
    return os.pathsep.join([*own, *others])
