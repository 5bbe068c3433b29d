"""Every run in a fresh process: one, or the jobs of a sweep.

A single run replaces the process that checked the command line, so that its exit status, signals and
console are the run's own. In a sweep Hydra's launcher decides where and when a job starts, and what it
starts is again such a process, with the same environment: a job leaves nothing behind for the next one, and
its result is the result of the single run with its configuration, bit for bit. Sweeps themselves are in
sweep.py.

With `seeds` one process makes several runs, which differ in their seed alone: a group. Each of them has its
own folder, record, commit and id, as if it had been started alone.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from rltemplate.config import Config, from_dict, to_dict
from rltemplate.run import paths
from rltemplate.run.determinism import prepared
from rltemplate.types import ConfigError

PROJECT = Path(__file__).resolve().parents[1]
WORKER = "rltemplate"
JOB_VARIABLE = "RLTEMPLATE_JOB"
SWEEP_VARIABLE = "RLTEMPLATE_SWEEP"
SESSION_VARIABLE = "RLTEMPLATE_SESSION"
INHERITED_VARIABLE = "RLTEMPLATE_INHERITED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The sweep that a run belongs to: its id, its folder and the number of the job."""

    id: str
    dir: str
    job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that differ in their seed alone and are trained together in one process: three lists by place."""

    id: str
    seeds: list[int]
    run_ids: list[str]
    run_dirs: list[str]

    def facts(self, place: int) -> dict[str, Any]:
        """What the record of the run at `place` says of the group.

        `alone_since` is the number of environment steps after which the run went on without the others.
        """
        return {
            "id": self.id,
            "seeds": self.seeds,
            "run_ids": self.run_ids,
            "place": place,
            "alone_since": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that the process of a run is told.

    `snapshot` is the text of `Snapshot.to_json`. In a sweep it stays behind in the index until the run's
    process reads it there: it may name hundreds of files, and Linux allows 128 KiB for one variable.

    With `resume` the run of the folder goes on; `accept` says that it may with changed code and libraries.
    With `journal` the run has an entry of its own there: one that somebody asked for, and not a part of a
    sweep, a proof or a measurement.

    With `group` the process makes all runs of it: `config` then has `seeds`, `run_id` is the id of the group,
    and `run_dir` the folder in which those of its runs lie.
    """

    config: dict[str, Any]
    run_id: str
    run_dir: str
    command: list[str]
    overrides: list[str]
    sweep: Membership | None = None
    snapshot: str | None = None
    resume: bool = False
    accept: bool = False
    journal: bool = False
    group: Group | None = None

    def members(self) -> list[Job]:
        """The job of each run by itself, by place in the group; of a single run this one."""
        if self.group is None:
            return [self]
        configs = from_dict(self.config).members()
        parts = zip(configs, self.group.run_ids, self.group.run_dirs, strict=True)
        return [
            replace(self, config=to_dict(config), run_id=run_id, run_dir=run_dir, group=None)
            for config, run_id, run_dir in parts
        ]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that `to_json` wrote."""
        values = json.loads(text)
        if values["sweep"] is not None:
            values["sweep"] = Membership(**values["sweep"])
        if values.get("group") is not None:
            values["group"] = Group(**values["group"])
        return cls(**values)

    @classmethod
    def from_environment(cls) -> Job:
        """The job of this process, taken out of the environment so that its children do not see it."""
        text = os.environ.pop(JOB_VARIABLE, None)
        if text is None:
            raise ConfigError("no job given: start runs with scripts/train.py, which prepares their process")
        job = cls.from_json(text)
        if job.sweep is None or job.snapshot is not None:
            return job
        index = json.loads((Path(job.sweep.dir) / paths.SWEEP_INDEX).read_text(encoding="utf-8"))
        return replace(job, snapshot=json.dumps(index["snapshot"]))


def run_folder(config: Config, run_id: str, env_name: str) -> Path:
    """Where the run goes, absolute: `run_dir` as it is, else `<runs_dir>/<algo>-<env>/<run_id>`."""
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser().absolute()
    group = paths.safe_name(f"{config.algo.name}-{env_name}")
    return Path(config.runs_dir).expanduser().absolute() / group / run_id


def new_job(
    config: Config, command: Sequence[str], *, env_name: str, overrides: Sequence[str], **further: Any
) -> Job:
    """The job of a new run, or of a new group of them; `further` are other fields of `Job`."""
    told = {"command": list(command), "overrides": list(overrides), **further}
    if config.seeds is None or len(config.seeds) == 1:
        (config,) = config.members()
        run_id = paths.new_id(f"seed{config.seed}")
        folder = run_folder(config, run_id, env_name)
        return Job(config=to_dict(config), run_id=run_id, run_dir=str(folder), **told)
    group_id = paths.new_id(f"{len(config.seeds)}-seeds")
    folder = run_folder(config, group_id, env_name).parent
    run_ids = [paths.new_id(f"seed{seed}") for seed in config.seeds]
    return group_job(config, group_id, {run_id: folder / run_id for run_id in run_ids}, **told)


def group_job(config: Config, group_id: str, runs: Mapping[str, Path], **told: Any) -> Job:
    """The job of a group; `runs` are the folders of its runs by their ids, all of them side by side."""
    assert config.seeds is not None
    run_dirs = [str(run_dir) for run_dir in runs.values()]
    group = Group(id=group_id, seeds=list(config.seeds), run_ids=list(runs), run_dirs=run_dirs)
    folder = str(Path(run_dirs[0]).parent)
    return Job(config=to_dict(config), run_id=group_id, run_dir=folder, group=group, **told)


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
