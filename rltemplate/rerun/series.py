"""Runs that answer one question together, each in a process of its own, side by side in one folder.

How the words of a proof are taken apart, one snapshot of the code for all runs, and how each is started.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltemplate.config.loading import to_dict
from rltemplate.config.schema import Config
from rltemplate.launch.command import check_environments
from rltemplate.launch.process import worker_command, worker_environment
from rltemplate.launch.subprocesses import Children
from rltemplate.run import paths
from rltemplate.run.git.snapshot import Snapshot, take_snapshot
from rltemplate.run.job import PROJECT, Job
from rltemplate.run.record import read_record
from rltemplate.types import ConfigError

_LARGEST_SNAPSHOT = 64_000  # characters; Linux allows 128 KiB for a variable, and the job is in it as well


class Series:
    """A folder `<runs_dir>/<kind>/<id>` of runs, and the processes in which they are made."""

    def __init__(self, kind: str, config: Config, command: Sequence[str]) -> None:
        """`kind` is what the runs are for, `command` how the user asked for it. Creates nothing."""
        self.id = paths.new_id(kind)
        self.folder = Path(config.runs_dir).expanduser().absolute() / kind / self.id
        self.command = list(command)
        self.children = Children()
        self.snapshot: Snapshot | None = None
        self._runs_dir = config.runs_dir

    def begin(self) -> None:
        """Make the folder and take the code as it is now. Raises ConfigError if that folder cannot be."""
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"runs_dir={self._runs_dir}: cannot be made, {error.strerror}") from error
        self.snapshot = take_snapshot(PROJECT, keep_ref=self.id)

    def run_dir(self, name: str) -> Path:
        """The folder of the run called `name`."""
        return self.folder / name

    def log(self, name: str) -> Path:
        """What the process of the run called `name` said."""
        return self.folder / f"{name}.log"

    def job(self, name: str, config: Config, overrides: Sequence[str]) -> Job:
        """The job for the process of a run."""
        return Job(
            config=to_dict(config),
            run_id=f"{self.id}-{name.replace('_', '')}",
            run_dir=str(self.run_dir(name)),
            command=self.command,
            overrides=list(overrides),
            snapshot=None if self.snapshot is None else snapshot_text(self.snapshot),
        )

    def run(
        self,
        name: str,
        config: Config,
        overrides: Sequence[str],
        *,
        variables: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> int:
        """Make a run, and return its exit status; of `variables`, None takes one out of the environment."""
        environment = worker_environment(self.job(name, config, overrides), config, os.environ)
        for variable, value in (variables or {}).items():
            environment.pop(variable, None)
            if value is not None:
                environment[variable] = value
        return self.children.run(worker_command(), environment, self.log(name), cwd=cwd)


def record_of(run_dir: Path) -> dict[str, Any]:
    """What the record of a run says; nothing if the run never came to one."""
    try:
        return read_record(run_dir)
    except ConfigError:
        return {}


def snapshot_text(snapshot: Snapshot) -> str:
    """The snapshot as text that fits into a variable: of too many files some are counted and not named."""
    values = json.loads(snapshot.to_json())
    while len(text := json.dumps(values)) > _LARGEST_SNAPSHOT and (values["changed"] or values["skipped"]):
        for key in ("changed", "skipped"):
            values[key] = values[key][: len(values[key]) // 2]
    return text


# --- The question ----------------------------------------------------------------------------------------


def take_out(key: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The word `key=...` if there is one, and the other words, which compose a configuration.

    Raises ConfigError for words that are neither.
    """
    own, overrides = [], []
    for word in words:
        name, _, text = word.partition("=")
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such option; allowed: overrides, {key}=N and --json")
        if name.startswith("hydra"):
            raise ConfigError(f"{word}: the runs are started one after the other; leave it out")
        if name == key:
            own.append(word)
        elif difflib.get_close_matches(name[: 2 * len(key)], [key], cutoff=0.8):
            raise ConfigError(f"{word}: no such key; did you mean {key}={text}?")
        else:
            overrides.append(word)
    if len(own) > 1:
        raise ConfigError(f"{own[1]}: {key} is given twice")
    return (own[0] if own else None), overrides


def check_environment(config: Config) -> None:
    """Raise ConfigError if there is no such environment here or the algorithm cannot act in it."""
    check_environments([config])
