"""Configurations as dicts, as YAML and as recorded files; `CONF` is the folder of the values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.recorded_keys import (
    ADDED,
    name_in_added,
    removed_keys,
    with_present_keys,
)
from rltemplate.config.schema import Config, Level
from rltemplate.config.validation import check, choose
from rltemplate.types import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"


# Without these a recorded configuration is damaged, and not merely old.
_NEVER_ADDED = ("env.id", "determinism.level", "seed", "total_env_steps")


def to_config(composed: DictConfig) -> Config:
    """Composed values, now resolved, as typed dataclasses, or `ConfigError` naming the first wrong one."""
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"no value for {missing[0]}: set it on the command line or in a file of conf/")
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    if not isinstance(config, Config):
        raise TypeError(f"composed a {type(config).__name__} instead of a Config")
    check(config)
    return config


def _one_line(error: OmegaConfBaseException) -> str:
    """OmegaConf's message with the key in front: `seed=1.5: ... could not be converted to Integer`."""
    first = str(error.msg if error.msg is not None else error).splitlines()[0]
    return f"{error.full_key}: {first}" if error.full_key else first


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain dicts, lists and scalars, enums by name."""
    return {spec.name: _plain(getattr(config, spec.name)) for spec in fields(config)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`; wrong keys, types and ranges raise `ConfigError`.

    Values are data: a `${...}` in them stands for itself.
    """
    return to_config(_typed(values))


def _typed(values: Mapping[str, Any]) -> DictConfig:
    """The values with their types; a key that they lack is a missing value."""
    values = with_present_keys(values)
    for key, value in removed_keys(values).items():
        raise ConfigError(
            f"{key}={value}: this version no longer has it; `make reproduce run=RUN` runs the recorded code"
        )
    name = values.get("algo", {}).get("name")
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(f"algo.name={name}: {choose(str(name), ALGORITHMS)}")
    try:
        schema = OmegaConf.structured(Config)
        OmegaConf.update(schema, "algo", OmegaConf.structured(ALGORITHMS[name].config), merge=False)
        merged = OmegaConf.merge(schema, _literal(values))
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    assert isinstance(merged, DictConfig)
    return merged


def _literal(value: Any) -> Any:
    """`value` as OmegaConf has to be given it, so that it resolves no `${...}`: with backslashes in front."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: _literal(item) for key, item in value.items()}
    return [_literal(item) for item in value] if isinstance(value, list) else value


def to_yaml(config: Config) -> str:
    """The text of `config.yaml`: the resolved configuration and nothing else."""
    return str(yaml.safe_dump(to_dict(config), allow_unicode=True, sort_keys=False))


def complete(values: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """A recorded configuration, and the keys that it lacks, with the values that they take.

    Raises `ConfigError` like `from_dict`.
    """
    typed = _typed(values)
    try:
        lacking = sorted(OmegaConf.missing_keys(typed))
    except OmegaConfBaseException as error:  # a number that is written as a ${...}
        raise ConfigError(_one_line(error)) from error
    added: dict[str, Any] = {}
    if lacking and not {*lacking}.intersection(_NEVER_ADDED):
        try:
            shipped = _shipped(typed.algo.name, typed.determinism.level)
            for key in lacking:
                name = name_in_added(key, typed.algo.name)
                # A ${...} of conf/ stands for a value of the run, and is resolved with the others.
                value = _literal(ADDED[name]) if name in ADDED else _entry(shipped, key)
                OmegaConf.update(typed, key, value)
            for key in lacking:
                value = OmegaConf.select(typed, key)
                added[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            raise ConfigError(_one_line(error)) from error
    return to_config(typed), added


def _entry(values: Any, key: str) -> Any:
    """The value under a dotted key, None if there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _shipped(algorithm: str, level: Level) -> Any:
    """The values that conf/ has for an algorithm and a level, as they are written there.

    Each level builds on the one before it.
    """
    levels = [each.name for each in Level][: list(Level).index(level) + 1]
    files = ["config", f"algo/{algorithm}", "env/_gymnasium", *(f"determinism/{name}" for name in levels)]
    shipped = DictConfig({})
    for file in [*files, "logger/local"]:
        path, group = CONF / f"{file}.yaml", file.partition("/")[0]
        try:
            content = yaml.safe_load(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"conf/{file}.yaml cannot be read, {error.strerror}") from None
        content.pop("defaults", None)
        shipped.merge_with({group: content} if file not in ("config", f"algo/{algorithm}") else content)
    return OmegaConf.to_container(shipped, resolve=False)


def about_added(name: str, config: Config, added: Mapping[str, Any]) -> str:
    """A line that says which values a run takes for keys that were added after it was recorded."""
    told = []
    for key, value in added.items():
        declared = name_in_added(key, config.algo.name) in ADDED
        told.append(
            f"{key}={value} ({'ADDED in rltemplate/config/recorded_keys.py' if declared else 'conf/'})"
        )
    return f"{name} was recorded without keys that exist now; it takes {', '.join(told)}"


def load_config(path: Path) -> Config:
    """The configuration of a recorded run, from its `config.yaml`; see `load_recorded`."""
    return load_recorded(path)[0]


def load_recorded(path: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration of a recorded run, and the keys that its `config.yaml` lacks with their values."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read, {error.strerror}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: it is no YAML") from error
    if not isinstance(values, dict) or not isinstance(values.get("algo"), dict):
        raise ConfigError(f"{path} is damaged: it holds no configuration")
    return complete({str(key): value for key, value in values.items()})
