"""Configurations that Hydra composes from overrides; each error of Hydra in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from rltemplate.config.cli.files import chosen_algorithm, option_names
from rltemplate.config.cli.overrides import MAPPINGS, wrong_key, wrong_value
from rltemplate.config.command_args import choose, first_line
from rltemplate.config.loading import CONF, auto_keys, in_one_line, to_config, to_dict
from rltemplate.config.project import ALGORITHMS, project
from rltemplate.config.schema import Config, key_types
from rltemplate.config.secrets import refuse_secrets
from rltemplate.interfaces import ConfigError

_EMPTIED = re.compile(rf"\+\+({MAPPINGS})=\{{\s*\}}")
# Groups whose chosen name is recorded as a value of the configuration.
_NAMED = ("recipe", "experiment")


class Composed(NamedTuple):
    """A configuration, and the keys whose value was `auto`."""

    config: Config
    auto: set[str]


def compose_job(words: Sequence[str], jobs: int = 1) -> Composed:
    """The configuration that Hydra composes from these overrides, where `jobs` runs share this machine."""
    composed = compose_with_hydra(words)
    choices = composed.hydra.runtime.choices
    more = [Path(path.removeprefix("file://")) for path in composed.hydra.searchpath]
    with open_dict(composed):  # the schema has no place for Hydra's own settings
        del composed["hydra"]
    for group in _NAMED:
        if (value := OmegaConf.select(composed, group)) is not None:
            raise ConfigError(f"{group}={value} in a file has no effect; list it below 'defaults:' there")
        chosen = choices.get(group)  # perhaps an optional file that is not there
        composed[group] = chosen if chosen in option_names(group, more) else None
    for key in (match[1] for each in words if (match := _EMPTIED.fullmatch(each))):
        if more_of_it := [each for each in words if each.startswith(f"++{key}.")]:
            raise ConfigError(f"{more_of_it[0].lstrip('+')}: {key}={{}} leaves out all; give one of the two")
        OmegaConf.update(composed, key, {}, merge=False)  # Hydra joins {} with the values of files
    with in_one_line():
        algo, chosen = OmegaConf.select(composed, "algo"), choices.get("algo")
        name = None if algo is None else OmegaConf.select(algo, "name")
    if name not in (None, chosen) and chosen in ALGORITHMS:
        raise ConfigError(f"algo={chosen}: its file says name: {name}, must be {chosen}")
    if name is None or (name in ALGORITHMS and OmegaConf.get_type(algo) is not ALGORITHMS[name].config):
        raise ConfigError(
            f"algo={chosen}: its file needs 'defaults: [_NAME@algo]' and, below algo, 'name: NAME', as "
            "conf/algo/ppo.yaml has"
        )
    config = to_config(composed, jobs)
    refuse_secrets(to_dict(config))
    return Composed(config, auto_keys(composed))


def config_of(words: Sequence[str]) -> Config:
    """The configuration of overrides, such as those of a `Plan`, without the checks of `preflight`."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose_job(words).config


def compose_with_hydra(words: Sequence[str]) -> DictConfig:
    """Hydra's composition of these overrides, with its own settings under `hydra`."""
    try:
        return compose("config", overrides=list(words), return_hydra_config=True)
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(
            "a file of conf/ is listed below its own 'defaults:', perhaps by way of others"
        ) from error
    except Exception as error:  # of Hydra and OmegaConf, which alone run here
        raise ConfigError(_explain(error, words)) from error


def _explain(error: Exception, words: Sequence[str]) -> str:
    """One or two lines about an error of composition."""
    algorithm, cause = chosen_algorithm(words), error.__context__
    missing = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
    if missing and missing.startswith("algo/_"):
        name = missing.removeprefix("algo/_")
        return (
            f"algo={name}: has no entry in ALGORITHMS of {project().__name__}, beside conf/algo/{name}.yaml"
        )
    if isinstance(error, MissingConfigException) and missing and error.options:
        group, _, name = missing.rpartition("/")
        names = [each for each in error.options if not each.startswith("_")]
        return f"'defaults:' of a file: {group}/{name}: no such file; {choose(name, names, f'conf/{group}/')}"
    if not isinstance(cause, OmegaConfBaseException):
        return first_line(error)
    key, unknown = cause.full_key or "", isinstance(cause, ConfigAttributeError | ConfigKeyError)
    if in_file := re.match(r"In '(.+)': ", str(error)):
        file = in_file[1].replace("/_", "/")  # the schema of an algorithm is merged with its file
        file = f"conf/{file}.yaml" if (CONF / f"{file}.yaml").exists() else f"{file}.yaml"
        problem = wrong_key(key, algorithm) if unknown else first_line(cause)
        if unknown and file.startswith("conf/algo/"):
            problem += "; a new key needs a field in rltemplate/config/algorithms.py"
        if (key in _NAMED and isinstance(cause, ValidationError)) or key == "algo.algo":
            return f"{file}: its first line has to be '# @package _global_'"
        return f"{file}: {f'{key}: ' * bool(key)}{problem}"
    typed = {word.lstrip("+").partition("=")[0]: word for word in words}
    around = [each for each in typed if re.match(rf"{re.escape(each)}(?![\w-])", key)]
    if not around:
        return first_line(error)
    chosen = max(around, key=len)
    if unknown and chosen in key_types(algorithm):
        return "conf/config.yaml: its defaults have to begin with '- _config', the types of all keys"
    if unknown and chosen.startswith("hydra."):
        return f"{typed[chosen]}: no such key of the chosen launcher"
    if unknown:
        return f"{typed[chosen]}: {wrong_key(key, algorithm)}"
    value = typed[chosen].partition("=")[2]
    return f"{chosen}={value}: {wrong_value(chosen, value, algorithm) or first_line(cause)}"
