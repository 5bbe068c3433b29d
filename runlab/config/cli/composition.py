"""Configurations composed from overrides: the files by Hydra, the values here. Each error is one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from runlab.config.cli.files import chosen_algorithm, group_names, option_names
from runlab.config.cli.overrides import LAUNCHER, SEARCHPATH, wrong_key, wrong_value
from runlab.config.loading import CONF, CONF_NAME, auto_keys, in_one_line, to_config, to_dict
from runlab.config.project import ALGORITHMS, project
from runlab.config.schema import ComposedConfig, Config, key_types
from runlab.config.secrets import refuse_secrets
from runlab.config.texts import choose, first_line
from runlab.errors import ConfigError


class Composed(NamedTuple):
    """A configuration, and the keys whose value was `auto`."""

    config: Config
    auto: set[str]


def compose_job(words: Sequence[str], jobs: int = 1) -> Composed:
    """The configuration of these overrides, where `jobs` runs share this machine."""
    composed = compose_values(words)
    choices = composed.hydra.runtime.choices
    more = [Path(path.removeprefix("file://")) for path in composed.hydra.searchpath]
    with open_dict(composed):  # the schema has no place for Hydra's own settings
        del composed["hydra"]
    for group in ("recipe", "experiment"):  # whose chosen name is recorded as a value
        if (value := OmegaConf.select(composed, group)) is not None:
            raise ConfigError(f"{group}={value} in a file has no effect; list it below 'defaults:' there")
        name = choices.get(group)  # perhaps an optional file that does not exist
        composed[group] = name if name in option_names(group, more) else None
    config = to_config(composed, jobs)
    refuse_secrets(to_dict(config))
    return Composed(config, auto_keys(composed))


def config_of(words: Sequence[str]) -> Config:
    """The configuration of overrides, such as those of a `Plan`, without the checks of `preflight`."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose_job(words).config


def compose_values(words: Sequence[str]) -> DictConfig:
    """The composed values, not yet resolved, with Hydra's own settings under `hydra`.

    Hydra reads the files of conf/ that the words choose. The other words are applied here, in the same way
    and the same order as Hydra would, so that each error belongs either to a file or to a word.
    """
    overrides = OverridesParser.create().parse_overrides([*words])
    files = [each for each in overrides if each.key_or_group in (*group_names(), LAUNCHER, SEARCHPATH)]
    try:
        composed = compose("config", [f"{each.input_line}" for each in files], return_hydra_config=True)
    except Exception as error:  # of Hydra and OmegaConf, which alone run here
        raise ConfigError(_explain(error, words)) from error
    _check_algorithm(composed)
    for override in overrides:
        if override not in files:
            _apply(override, composed, overrides)
    return composed


def _check_algorithm(composed: DictConfig) -> None:
    """Raise `ConfigError` unless the values have the types of the configuration and of its algorithm."""
    if OmegaConf.get_type(composed) is not ComposedConfig:
        raise ConfigError("conf/config.yaml: its defaults must begin with '- _config', the types of all keys")
    chosen = composed.hydra.runtime.choices.get("algo")
    with in_one_line():
        algo = OmegaConf.select(composed, "algo")
        name = None if algo is None else OmegaConf.select(algo, "name")
    if name not in (None, chosen) and chosen in ALGORITHMS:
        raise ConfigError(f"algo={chosen}: its file says name: {name}, must be {chosen}")
    if name not in ALGORITHMS or OmegaConf.get_type(algo) is not ALGORITHMS[name].config:
        raise ConfigError(
            f"algo={chosen}: its file needs 'defaults: [_NAME@algo]' and, below algo, 'name: NAME', as "
            f"conf/algo/{next(iter(ALGORITHMS))}.yaml has; NAME is one of {', '.join(ALGORITHMS)}"
        )


def _apply(override: Override, composed: DictConfig, overrides: Sequence[Override]) -> None:
    """Set the value of an override. A mapping that is given as {} loses the names that files gave it."""
    key, word, value = override.key_or_group, f"{override.input_line}".lstrip("+"), override.value()
    added, algorithm = override.is_add() or override.is_force_add(), composed.algo.name
    below = [f"{each.input_line}" for each in overrides if each.key_or_group.startswith(f"{key}.")]
    if value == {} and below:
        raise ConfigError(f"{below[0].lstrip('+')}: {key}={{}} leaves out all; give one of the two")
    try:
        OmegaConf.update(composed, key, value, merge=not (added and value == {}), force_add=added)
    except OmegaConfBaseException as error:
        if not isinstance(error, ConfigAttributeError | ConfigKeyError):
            problem = wrong_value(key, word.partition("=")[2], algorithm) or first_line(error)
        elif key.startswith("hydra"):
            problem = "no such key of the chosen launcher"
        else:
            problem = wrong_key(f"{error.full_key}", algorithm)
        raise ConfigError(f"{word}: {problem}") from error


def _explain(error: Exception, words: Sequence[str]) -> str:
    """One or two lines about an error in a file."""
    if isinstance(error, RecursionError):
        return "a file of conf/ is listed below its own 'defaults:', perhaps by way of others"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if group == "algo" and name.startswith("_"):
            where = f"in ALGORITHMS of {project().__name__}, as by ENTRY in {name[1:]}_config.py"
            return f"'defaults:' of a file: {name}@algo: no algorithm {name[1:]} {where}"
        names = [each for each in error.options or () if not each.startswith("_")]
        answer = choose(name, names, f"{CONF_NAME}/{group}/")
        return f"'defaults:' of a file: {group}/{name}: no such file; {answer}"
    in_file, cause = re.match(r"In '(.+)': ", str(error)), error.__context__
    if in_file is None or not isinstance(cause, OmegaConfBaseException):
        return first_line(error)
    key, unknown = cause.full_key or "", isinstance(cause, ConfigAttributeError | ConfigKeyError)
    file = f"{in_file[1].replace('/_', '/')}.yaml"  # the schema of an algorithm is merged with its file
    file = f"conf/{file}" if (CONF / file).exists() else file
    algorithm = chosen_algorithm(words)
    if unknown and key in key_types(algorithm):
        return f"{file}: {key}: 'defaults:' there has the keys of another algorithm; use _{algorithm}@algo"
    problem = wrong_key(key, algorithm) if unknown else first_line(cause)
    if unknown and file.startswith("conf/algo/"):
        problem += f"; a new key needs a field in {ALGORITHMS[algorithm].config.__module__}"
    return f"{file}: {f'{key}: ' * bool(key)}{problem}"
