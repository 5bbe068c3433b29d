"""The plan of a proof: the configuration, and runs with perturbations that must not change anything.

Nothing is started here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from runlab.config.cli.composition import config_of
from runlab.config.cli.files import option_names
from runlab.config.cli.preflight import preflight
from runlab.config.loading import from_dict, to_dict
from runlab.config.schema import Config, Level, TraceDetail
from runlab.determinism.levels import PROMISES, ROW_GROUPS
from runlab.errors import ConfigError
from runlab.launch.checks import check_configs

SHORT = 10_000  # environment steps of each run, unless the user gives total_env_steps
# In the inverse of a proof these overrides replace the ones about the level and its threads.
WITHOUT = {
    Level.repeat: ("determinism=fast", "num_threads=2"),
    Level.invariant: ("determinism=repeat",),
    Level.profile: (
        "determinism=profile",
        "determinism.products=plain",
        "determinism.cpu_capability=null",
        "determinism.blas_kernels=null",
        "determinism.numpy_without=null",
    ),
}
# Levels at which neither the number of threads nor the other rows of a batch change a row's bits.
INVARIANT = (Level.invariant, Level.profile)
# The first value that differs from the present one is set; None removes the variable.
OTHER_VALUES: dict[str, tuple[str | None, ...]] = {
    "LANG": ("tr_TR.UTF-8", "C"),
    "LC_ALL": ("C", "C.UTF-8"),
    "TZ": ("Asia/Kathmandu", "Pacific/Chatham"),
    "COLUMNS": ("40", "200"),
    "PYTHONDONTWRITEBYTECODE": ("1", None),
}
# Makes the environment larger, which moves the stack (Mytkowicz et al. 2009, "Producing wrong data
# without doing anything obviously wrong", ASPLOS).
PADDING = "RUNLAB_PADDING"
_ROWS_IN_A_GROUP = 7
_NO_OBSERVERS: dict[str, Any] = {
    "log_every": 0,
    "eval_every": 0,
    "checkpoint_every": 0,
    "keep_best": False,
    "logger.console": False,
    "logger.tensorboard": False,
    "logger.sinks": {},
    "logger.wandb.enabled": False,
}


def config_to_prove(words: Sequence[str]) -> tuple[Config, list[str]]:
    """The configuration to prove, from overrides as for training, and its words. Raises ConfigError."""
    config, overrides = _composed(words)
    level = config.determinism.level
    if not PROMISES[level.name]:
        allowed = ", ".join(name for name in option_names("determinism") if name != level.name)
        raise ConfigError(f"determinism={level.name}: promises nothing that could be proved; use {allowed}")
    if config.run_dir is not None:
        raise ConfigError(f"run_dir={config.run_dir}: each run of a proof has its own folder; use runs_dir")
    if config.trace is TraceDetail.off:
        raise ConfigError("trace=off: a proof compares traces; use trace=iteration or trace=step")
    if not any(word.startswith("total_env_steps=") for word in words):
        steps = SHORT
        # A shorter run would learn nothing.
        while steps < config.total_env_steps and any(config.algo.notes(config.env.num_envs, steps)):
            steps *= 2
        # `auto` is resolved for the run of full length, since that run is to be proved.
        keys = {word.partition("=")[0] for word in words}
        resolved = {"compile": str(config.compile).lower(), "num_threads": config.num_threads}
        words = [*words, *(f"{key}={value}" for key, value in resolved.items() if key not in keys)]
        config, overrides = _composed([*words, f"total_env_steps={min(steps, config.total_env_steps)}"])
    check_configs([config])
    return config, overrides


def inverse_config(level: Level, overrides: Sequence[str]) -> Config:
    """The configuration of a command without the additions of its level, for the inverse."""
    others = [word for word in overrides if not word.startswith(("determinism", "num_threads="))]
    return _changed(config_of([*others, *WITHOUT[level]]), {"video_every": 0})


def _composed(words: Sequence[str]) -> tuple[Config, list[str]]:
    """One configuration, without videos, and its words."""
    plan = preflight(words)
    if plan.sweep or plan.shown:
        raise ConfigError("a proof is about one configuration; give one value of each key, and no options")
    return _changed(plan.configs[0], {"video_every": 0}), plan.argv


def perturbed(number: int, config: Config) -> tuple[Config, dict[str, str | None], list[str]]:
    """The configuration and environment variables of run `number`, and its perturbations in words.

    None removes a variable. Threads and groups of rows are changed only at levels that promise that these do
    not matter. The caller adds another working directory, empty caches, and a busy core.
    """
    steps, all_observers = config.total_env_steps, number % 2 == 1
    changes, environment = dict(_NO_OBSERVERS), dict[str, str | None]({PADDING: "x" * (4096 + 1009 * number)})
    if all_observers:
        changes |= {"eval_every": max(1, steps // 3), "checkpoint_every": max(1, steps // 2)}
        changes |= {"eval_episodes": 2, "log_every": 1, "logger.tensorboard": True}
    named = ["another working directory", "other variables", "cold caches", "a busy core"]
    named.append("all observers" if all_observers else "no observers")
    for variable, values in OTHER_VALUES.items():
        environment[variable] = next(value for value in values if value != os.environ.get(variable))
    if (seed := config.determinism.hash_seed) is not None:
        changes["determinism.hash_seed"] = other = (seed + 7 * number) % 2**32
        named.append(f"hash seed {other}")
    if config.determinism.level in INVARIANT:
        changes["num_threads"] = threads = 2 if config.num_threads == 1 else 1
        environment[ROW_GROUPS] = str(_ROWS_IN_A_GROUP)
        named += [f"num_threads={threads}", f"rows in groups of {_ROWS_IN_A_GROUP}"]
    return _changed(config, changes), environment, named


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with other values, by dotted key."""
    values = to_dict(config)
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        reduce(getitem, parents, values)[leaf] = value
    return from_dict(values)
