"""Recorded runs as values that can be asked for by name, without torch and without reading what nobody asks.

A value is found under the first of these names that it has:

* a column of the table: `id`, `algo`, `env`, `seed`, `level`, `status`, `steps`, `return`, `started`,
  `duration`, `commit`, `dirty`, `sweep`;
* a dotted key of the configuration: `algo.gamma`, `total_env_steps`;
* a dotted key of the record: `machine.cpu`, `git.branch`, `versions.torch`;
* a metric: `policy/entropy`, the last value that the run logged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rltemplate.run import paths
from rltemplate.run.read import leaves, read_config, read_metrics
from rltemplate.run.record import read_record
from rltemplate.types import BOOKKEEPING_KEYS, EXECUTION_KEYS, OBSERVER_KEYS, ConfigError

MISSING = object()  # no such value; None is a value
# The last row of a run is no longer than this, in bytes.
_TAIL = 16_384
_LISTS = ("overrides", "resumed")
# Of a record: each has facts by name, or nothing.
_SECTIONS = (
    *("sweep", "git", "determinism", "environment", "versions", "machine", "final_metrics", "trace"),
)


@dataclass(frozen=True)
class Run:
    """One run folder. Files are read when they are first needed."""

    dir: Path
    record: Mapping[str, Any]

    @classmethod
    def planned(cls, record: Mapping[str, Any], config: Mapping[str, Any]) -> Run:
        """A run that has not begun, to be compared with others. It has no folder, and nothing is read."""
        run = cls(Path(), record)
        run.__dict__.update(config=dict(config), rows=[], last_row={})
        return run

    @property
    def id(self) -> str:
        """Its name, also where the folder has been given another one."""
        return str(self.record.get("id", self.dir.name))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration, nested. Raises ConfigError if it cannot be read."""
        return read_config(self.dir)[1]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """All rows of `metrics.jsonl`; none if there is no such file. Raises ConfigError if it is damaged."""
        return list(read_metrics(self.dir)) if (self.dir / paths.METRICS).exists() else []

    @cached_property
    def last_row(self) -> dict[str, Any]:
        """The last whole row of `metrics.jsonl`, read from its end; empty if there is none."""
        try:
            with (self.dir / paths.METRICS).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _TAIL))
                lines = file.read().split(b"\n")[:-1]
        except OSError:
            return {}
        for line in reversed(lines):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                return row
        return {}

    @property
    def env(self) -> str:
        """The environment as it is called in `env=`: its recipe's name without the algorithm, else the id."""
        recipe, algo = self.config.get("recipe"), self.config["algo"]["name"]
        foreign = any(str(word).startswith("recipe=") for word in self.record.get("overrides") or [])
        if isinstance(recipe, str) and recipe.startswith(f"{algo}-") and not foreign:
            return recipe.removeprefix(f"{algo}-")
        return str(self.config["env"]["id"])

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Environment steps and mean return of every evaluation."""
        return [
            (int(row["env_steps"]), float(row["eval/return"]))
            for row in self.rows
            if row.get("eval/return") is not None and row.get("env_steps") is not None
        ]

    def value(self, key: str) -> Any:
        """What the run has under a name, MISSING if nothing."""
        if key in COLUMNS:
            return COLUMNS[key](self)
        for values in (self.config, self.record):
            found = _at(values, key)
            if found is not MISSING:
                return found
        metrics = self.record.get("final_metrics") or {}
        return metrics.get(key, self.last_row.get(key, MISSING))

    def keys(self) -> Iterator[str]:
        """All names that `value` knows, of single values; some of them twice."""
        yield from COLUMNS
        yield from (key for key, _ in leaves(self.config))
        yield from (key for key, _ in leaves({k: v for k, v in self.record.items() if k != "final_metrics"}))
        yield from self.record.get("final_metrics") or {}
        yield from self.last_row


def _return(run: Run) -> Any:
    metrics = run.record.get("final_metrics") or {}
    return metrics.get("eval/return", metrics.get("episode/return"))


def _of_git(run: Run, key: str) -> Any:
    return (run.record.get("git") or {}).get(key)


COLUMNS: dict[str, Any] = {
    "id": lambda run: run.id,
    "algo": lambda run: run.config["algo"]["name"],
    "env": lambda run: run.env,
    "seed": lambda run: run.config["seed"],
    "level": lambda run: run.config["determinism"]["level"],
    "status": lambda run: run.record.get("status"),
    "steps": lambda run: run.last_row.get("env_steps"),
    "return": _return,
    "started": lambda run: run.record.get("started_at"),
    "duration": lambda run: run.record.get("duration_s"),
    "commit": lambda run: str(_of_git(run, "base_commit") or "")[:10] or None,
    "dirty": lambda run: _of_git(run, "dirty"),
    "sweep": lambda run: (run.record.get("sweep") or {}).get("id"),
}


def _at(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return MISSING
        found = found[part]
    return found


# What may differ between runs of one experiment: the seed, and what neither computes nor decides at which
# steps and how well a run is evaluated.
_NO_EXPERIMENT = ("seed", *BOOKKEEPING_KEYS, *(key for key in OBSERVER_KEYS if not key.startswith("eval_")))


def experiment_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run as far as all runs of one experiment share it."""
    shared = {key: value for key, value in config.items() if key not in _NO_EXPERIMENT}
    for group, _, name in (key.partition(".") for key in EXECUTION_KEYS):
        if isinstance(shared.get(group), Mapping):
            shared[group] = {key: value for key, value in shared[group].items() if key != name}
    return shared


def text_of(value: Any) -> str:
    """A value of a configuration or a record as YAML would have it on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {text_of(each)}' for name, each in value.items())}}}"
    return f"[{', '.join(map(text_of, value))}]" if isinstance(value, list) else str(value)


def load_run(run_dir: Path) -> Run:
    """The run in a folder. Raises ConfigError if it is none, or if record or configuration is damaged."""
    run = Run(run_dir, read_record(run_dir))
    for name in _SECTIONS:
        if not isinstance(run.record.get(name) or {}, Mapping):
            raise ConfigError(f"{run.id}: {name} in {paths.RECORD} is damaged: it has no facts")
    for name in _LISTS:
        if not isinstance(run.record.get(name) or [], list):
            raise ConfigError(f"{run.id}: {name} in {paths.RECORD} is damaged: it is no list")
    config = run.config
    for key in ("algo.name", "env.id", "determinism.level", "seed"):
        if _at(config, key) is MISSING:
            raise ConfigError(f"{run.id}: {paths.CONFIG} has no {key}")
    return run


def load_runs(run_dirs: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The runs in these folders, and one line for each that cannot be read."""
    runs: list[Run] = []
    problems: list[str] = []
    for run_dir in run_dirs:
        try:
            runs.append(load_run(run_dir))
        except ConfigError as error:
            problems.append(str(error))
    return runs, problems
