"""Overrides compared with what exists: their groups and names, their keys, and the sign in front."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, OverrideType, QuotedString, ValueType
from omegaconf import OmegaConf

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.cli.command_line import parse_override
from rltemplate.config.cli.composition import compose_with_hydra
from rltemplate.config.cli.env_names import environment_option
from rltemplate.config.cli.groups import (
    HYDRA_GROUPS,
    NONE,
    OPTIONAL,
    default_option,
    group_names,
    option_names,
)
from rltemplate.config.cli.keys import IDENTITY, known_keys, unknown_key
from rltemplate.config.validation import choose
from rltemplate.types import ConfigError


def check_groups(overrides: Sequence[Override], loader: ConfigLoader) -> list[Override]:
    """Refuse what the groups do not have; bring names into the form in which Hydra finds them."""
    groups, seen, checked = group_names(), set[str](), []
    for override in overrides:
        key, line = override.key_or_group, str(override.input_line)
        if key in seen:
            raise ConfigError(f"{line}: {key} is given twice")
        seen.add(key)
        _check_sign(override, groups)
        if key in groups:
            names = [_option(key, value) for value in _values(override, loader)]
            line = f"{key}={','.join(names)}"
            checked.append(parse_override(line, loader))
        elif key in HYDRA_GROUPS:
            allowed = loader.get_group_options(key, results_filter=ObjectType.CONFIG)
            for value in _values(override, loader):
                if value not in allowed:
                    raise ConfigError(f"{line}: not installed; {choose(str(value), allowed)}")
                if value == "submitit_slurm" and shutil.which("srun") is None:
                    raise ConfigError(
                        f"{line}: there is no srun here, so this is no machine of a Slurm cluster; "
                        "use hydra/launcher=joblib"
                    )
            if override.is_sweep_override():
                raise ConfigError(f"{line}: a sweep has one {key.partition('/')[2]}")
            checked.append(override)
        else:
            checked.append(override)
    return checked


def _check_sign(override: Override, groups: Sequence[str]) -> None:
    """`+` and `~` only where they do what one would think: for the arguments of the environment."""
    if override.type == OverrideType.CHANGE or override.key_or_group.startswith("env.kwargs."):
        return
    key, line = override.key_or_group, str(override.input_line)
    if override.type == OverrideType.DEL:
        instead = f"write {key}=null" if key in OPTIONAL else "set another value instead"
        raise ConfigError(f"{line}: nothing can be removed; {instead}")
    if key in groups or key in known_keys(ALGORITHMS):
        raise ConfigError(f"{line}: exists already; write it without '+', as {line.lstrip('+')}")
    advice = unknown_key(key, known_keys(ALGORITHMS))
    raise ConfigError(f"{line}: keys can be added to env.kwargs only; {advice}")


def _values(override: Override, loader: ConfigLoader) -> list[Any]:
    """The values that the override stands for, one unless it is a sweep."""
    if not override.is_sweep_override():
        return [override.value()]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line}: a name is needed, or several separated by commas")
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        found = [str(name) for name in override.sweep_string_iterator() if not str(name).startswith("_")]
        if not found:
            group = override.key_or_group
            raise ConfigError(
                f"{override.input_line}: matches nothing; allowed: {', '.join(option_names(group))}"
            )
        return found
    return [value.text if isinstance(value, QuotedString) else value for value in override.sweep_iterator()]


def _option(group: str, value: Any) -> str:
    """The name under which Hydra finds what the user calls `value`."""
    if value is None and group in OPTIONAL:
        return NONE
    allowed = option_names(group)
    if isinstance(value, str) and (value in allowed or (value == NONE and group in OPTIONAL)):
        return value
    if group == "env" and isinstance(value, str) and value:
        return environment_option(value, allowed)
    shown = "null" if value is None else value
    more = [*allowed, NONE] if group in OPTIONAL else allowed
    if (group, shown) == ("logger", "tensorboard"):
        raise ConfigError("logger=tensorboard: files for TensorBoard are part of logger=local, the default")
    owner = next((each for each in group_names() if value in option_names(each)), None)
    if owner is not None:
        raise ConfigError(f"{group}={shown}: is no {group}; did you mean {owner}={shown}?")
    what = f"allowed: {', '.join(more)}" if value is None else choose(str(shown), more)
    raise ConfigError(f"{group}={shown}: conf/{group}/ has no such file; {what}")


def check_keys(overrides: Sequence[Override]) -> None:
    """Refuse keys that the chosen algorithms do not have, and those that are not set on their own."""
    groups = [*group_names(), *HYDRA_GROUPS]
    algorithms = _chosen_algorithms(overrides)
    for override in overrides:
        key, line = override.key_or_group, str(override.input_line)
        if f"{key}.".startswith("hydra.sweeper.params."):
            raise ConfigError(f"{line}: the values of a sweep are written as overrides, as in seed=1,2")
        if key in groups or key.startswith(("hydra.launcher.", "hydra.sweeper.")):
            continue
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            raise ConfigError(
                f"{line}: of Hydra's own settings only hydra/launcher, hydra/sweeper and the keys below "
                "hydra.launcher and hydra.sweeper can be set; folders are chosen with runs_dir and run_dir"
            )
        if key in IDENTITY:
            group = IDENTITY[key]
            raise ConfigError(
                f"{line}: goes with other values; choose it with {group}=, as in {_example(group)}"
            )
        if key.startswith("env.kwargs."):
            if override.type == OverrideType.CHANGE and not _has_kwarg(key, overrides):
                raise ConfigError(f"{line}: adds an argument; arguments are added with '+', as +{line}")
            continue
        value = None if override.is_sweep_override() else override.value()
        if key == "env.kwargs" and isinstance(value, dict):
            added = " ".join(f"+env.kwargs.{name}={each}" for name, each in value.items())
            raise ConfigError(
                f"{line}: arguments are added one by one, as {added or '+env.kwargs.name=value'}"
            )
        for algorithm in algorithms:
            if key not in known_keys([algorithm]):
                raise ConfigError(f"{line}: {unknown_key(key, known_keys([algorithm]), algorithm)}")
        if override.is_sweep_override() and key in ("runs_dir", "run_dir"):
            raise ConfigError(f"{line}: all jobs of a sweep have one {key}")


def _has_kwarg(key: str, overrides: Sequence[Override]) -> bool:
    """Whether every chosen environment passes this argument already, so that it can be changed."""
    chosen = [str(o.input_line) for o in overrides if o.key_or_group == "env"]
    names = chosen[0].partition("=")[2].split(",") if chosen else [default_option("env")]
    composed = [compose_with_hydra([f"env={name}"]) for name in names]
    return all(OmegaConf.select(each, key, default=None) is not None for each in composed)


def _example(group: str) -> str:
    return {"env": "env=Hopper-v5", "algo": "algo=sac", "determinism": "determinism=fast"}[group]


def _chosen_algorithms(overrides: Sequence[Override]) -> list[str]:
    for override in overrides:
        if override.key_or_group == "algo":
            line = str(override.input_line)
            return line.partition("=")[2].split(",")
    return [default_option("algo")]
