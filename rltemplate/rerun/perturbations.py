"""The plan of a proof: runs in which something is changed that must not matter. Nothing is started here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rltemplate.config.loading import from_dict, to_dict
from rltemplate.config.schema import Config, Level
from rltemplate.determinism.levels import ROW_GROUPS

# Levels whose bits depend neither on the number of threads nor on the rows beside a row.
INVARIANT = (Level.invariant, Level.profile)
# Of each the first value that is not there already; None removes the variable.
OTHER_VALUES: dict[str, tuple[str | None, ...]] = {
    "LANG": ("tr_TR.UTF-8", "C"),
    "LC_ALL": ("C", "C.UTF-8"),
    "TZ": ("Asia/Kathmandu", "Pacific/Chatham"),
    "COLUMNS": ("40", "200"),
    "PYTHONDONTWRITEBYTECODE": ("1", None),
}
# Only makes the environment larger, which moves the stack (Mytkowicz et al. 2009, "Producing wrong data
# without doing anything obviously wrong", ASPLOS).
PADDING = "RLTEMPLATE_PADDING"
_ROWS_IN_A_GROUP = 7
_NO_OBSERVERS = {
    "log_every": 0,
    "eval_every": 0,
    "checkpoint_every": 0,
    "logger.console": False,
    "logger.tensorboard": False,
    "logger.wandb.enabled": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run and its perturbations. `changes` are values by dotted key; None removes a variable.

    A perturbed run also has another working directory, empty caches, and a busy core beside it.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str | None] = field(default_factory=dict)
    perturbations: list[str] = field(default_factory=list)


def plan_runs(config: Config, times: int, inherited: Mapping[str, str]) -> list[PlannedRun]:
    """`times` runs, all but the first perturbed, with all observers and with none in turn."""
    steps, planned = config.total_env_steps, [PlannedRun(name="run_0")]
    every = {"eval_every": max(1, steps // 3), "checkpoint_every": max(1, steps // 2), "eval_episodes": 2}
    observed = _NO_OBSERVERS | every | {"log_every": 1, "logger.tensorboard": True}
    for number in range(1, times):
        name, observers = ("all observers", observed) if number % 2 else ("no observers", _NO_OBSERVERS)
        level = config.determinism.level
        planned.append(_perturbed(f"run_{number}", number, config, level, inherited, observers, name))
    return planned


def plan_inverse(bare: Config, level: Level, inherited: Mapping[str, str]) -> list[PlannedRun]:
    """Two runs without the additions of `level`, one of them perturbed."""
    logged = _NO_OBSERVERS | {"log_every": 1}
    alone = PlannedRun(name="inverse_0", changes=logged)
    return [alone, _perturbed("inverse_1", 1, bare, level, inherited, logged, "the same observers")]


def _perturbed(
    name: str,
    number: int,
    config: Config,
    level: Level,
    inherited: Mapping[str, str],
    observers: Mapping[str, Any],
    observed: str,
) -> PlannedRun:
    """A run with all perturbations; threads and groups of rows must not matter at `invariant` levels only."""
    named = ["another working directory", "other variables", "cold caches", "a busy core", observed]
    environment: dict[str, str | None] = {PADDING: "x" * (4096 + 1009 * number)}
    for variable, values in OTHER_VALUES.items():
        environment[variable] = next(value for value in values if value != inherited.get(variable))
    changes = dict(observers)
    if (seed := config.determinism.hash_seed) is not None:
        changes["determinism.hash_seed"] = other = (seed + 7 * number) % 2**32
        named.append(f"hash seed {other}")
    if level in INVARIANT:
        changes["num_threads"] = threads = 2 if config.num_threads == 1 else 1
        environment[ROW_GROUPS] = str(_ROWS_IN_A_GROUP)
        named += [f"num_threads={threads}", f"rows in groups of {_ROWS_IN_A_GROUP}"]
    return PlannedRun(name=name, changes=changes, environment=environment, perturbations=named)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with other values, by dotted key."""
    values = to_dict(config)
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return from_dict(values)
