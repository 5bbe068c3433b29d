"""Every run in a fresh process: one, or the jobs of a sweep.

A single run replaces the process that checked the command line, so that its exit status, signals and
console are the run's own. In a sweep Hydra's launcher decides where and when a job starts, and what it
starts is again such a process, with the same environment: a job leaves nothing behind for the next one, and
its result is the result of the single run with its configuration, bit for bit. Sweeps themselves are in
sweep.py.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rltemplate.config.loading import from_dict
from rltemplate.config.schema import Config, Device
from rltemplate.determinism.machine import usable_memory
from rltemplate.determinism.switches import prepared
from rltemplate.run.job import JOB_VARIABLE, PROJECT, Job, new_job
from rltemplate.types import ConfigError

WORKER = "rltemplate.train"


SWEEP_VARIABLE = "RLTEMPLATE_SWEEP"


SESSION_VARIABLE = "RLTEMPLATE_SESSION"


INHERITED_VARIABLE = "RLTEMPLATE_INHERITED"


_MOST_GPU_BYTES = 2**39  # no GPU has more, and only torch knows how much this one has


def check_folder(config: Config) -> None:
    """Raise `ConfigError` unless the run's folder can be made, or is there and empty."""
    key = "runs_dir" if config.run_dir is None else "run_dir"
    text = config.runs_dir if config.run_dir is None else config.run_dir
    if not text.strip():
        raise ConfigError(f"{key}: expected the name of a folder")
    try:
        folder = Path(text).expanduser().absolute()
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{key}={text}: is a file; expected a folder")
        if key == "run_dir" and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{key}={text}: is not empty; a run needs a folder of its own")
        # A link that leads nowhere does not exist, and nothing can be made in its place.
        there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    except RuntimeError:  # ~somebody
        raise ConfigError(f"{key}={text}: this machine does not know whose home that is") from None
    except OSError as error:  # a name that is too long
        raise ConfigError(f"{key}={text}: cannot be made, {error.strerror}") from None
    if not there.is_dir():
        raise ConfigError(f"{key}={text}: cannot be made, {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={text}: cannot be written, {there} does not allow it")


def check_memory(config: Config, obs_size: int = 1, action_size: int = 1) -> None:
    """Raise `ConfigError` if the memory of this machine cannot hold what the algorithm needs at the least.

    The sizes are those of the environment, and small ones where nobody has made it yet.
    """
    memory, owner = usable_memory(), "this machine has"
    if memory is None:
        return
    if config.device is not Device.cpu:
        memory, owner = max(memory, _MOST_GPU_BYTES), "no GPU has more than"
    needs = config.algo.memory(config.env.num_envs, obs_size, action_size)
    total = sum(needs.values())
    if total > memory:
        key = max(needs, key=lambda key: needs[key])
        value = getattr(config.algo, key.removeprefix("algo."))
        left = memory - (total - needs[key])
        enough = f", enough for {value * left // needs[key]}" if isinstance(value, int) and left > 0 else ""
        raise ConfigError(
            f"{key}={value}: needs at least {_gib(needs[key])} of memory ({_gib(total)} with all else), and "
            f"{owner} {_gib(memory)}{enough}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def worker_command() -> list[str]:
    """The command of a run's process.

    `-P` keeps the current folder out of the import path: started from inside another checkout, a run would
    otherwise import that one's code.
    """
    return [sys.executable, "-P", "-m", WORKER]


def worker_environment(job: Job, config: Config, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run's process, the same for equal jobs whoever starts them."""
    environment = prepared(base, config.determinism, config.num_threads)
    for name in (SWEEP_VARIABLE, SESSION_VARIABLE, INHERITED_VARIABLE):
        environment.pop(name, None)
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = str(PROJECT)
    environment["PYTHONPATH"] = os.pathsep.join([own, *(path for path in others if path != own)])
    environment[JOB_VARIABLE] = job.to_json()
    return environment


def run_single(
    config: Config, command: Sequence[str], *, env_name: str | None = None, overrides: Sequence[str] = ()
) -> NoReturn:
    """Become the process of this run. `env_name` names the folder; without it the environment's id does."""
    check_folder(config)
    name = env_name or config.env.id
    become(new_job(config, command, env_name=name, overrides=overrides, journal=True))


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
