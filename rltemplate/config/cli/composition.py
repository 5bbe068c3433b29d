"""From overrides to a typed configuration, or a line about the mistake."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from hydra import compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rltemplate.config.cli.keys import chosen_algorithm, option_names, wrong_key, wrong_value
from rltemplate.config.loading import to_config, to_dict
from rltemplate.config.schema import Config
from rltemplate.config.secrets import refuse_secrets
from rltemplate.config.validation import choose
from rltemplate.types import ConfigError

# Groups of which the name that was applied is a value of the configuration.
_NAMED = ("recipe", "experiment")


class Composed(NamedTuple):
    """A job as Hydra composes it."""

    config: Config
    choices: dict[str, Any]  # by group
    overrides: list[str]  # without those of Hydra's own settings


def compose_job(words: Sequence[str], *, sweep: bool = False) -> Composed:
    """The job that Hydra would start with these overrides."""
    try:
        composed = compose_with_hydra(words)
        hydra = composed.hydra
        choices = dict(hydra.runtime.choices)
        # Hydra's own settings were needed for these only; the schema has no place for them.
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        OmegaConf.set_struct(composed, True)
        config = typed(composed, choices)  # says first what a ${...} does not stand for
        return Composed(config, choices, list(hydra.overrides.task))
    except ConfigError as error:
        told = " ".join(word for word in words if sweep or "${" in word)
        job = f" (in the job {told})" if told else ""
        raise ConfigError(f"{error}{job}") from error


def typed(composed: DictConfig, choices: Mapping[str, Any]) -> Config:
    """The typed configuration of one job; `choices` are Hydra's, by group."""
    for group in _NAMED:
        if composed[group] is not None:
            raise ConfigError(
                f"{group}={composed[group]} in a file has no effect; list it below 'defaults:' there"
            )
        composed[group] = choices.get(group) if choices.get(group) in option_names(group) else None
    config = to_config(composed)
    refuse_secrets(to_dict(config))
    return config


def compose_with_hydra(words: Sequence[str]) -> DictConfig:
    """Hydra's composition of these overrides, with its own settings under `hydra`."""
    try:
        return compose("config", overrides=list(words), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain(error, words)) from error


def _explain(error: Exception, words: Sequence[str]) -> str:
    """One or two lines about an error of composition."""
    text, algorithm = str(error), chosen_algorithm(words)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return (
            f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem or error.context}"
        )
    if unknown := re.match(r"Could not override '([^']+)'", text):
        key = unknown[1]
        word = next((word for word in words if word.lstrip("+").startswith(f"{key}=")), key)
        if not key.startswith("hydra."):
            return f"{word}: {wrong_key(key, algorithm)}"
        parent, _, last = key.rpartition(".")
        chosen = compose_with_hydra([word for word in words if word.startswith("hydra/")])
        return f"{word}: no such key; {choose(last, OmegaConf.select(chosen, parent))}"
    if wrong := re.match(r"Error merging override (.*)", text):
        key, _, value = wrong[1].lstrip("+").partition("=")
        return f"{key}={value}: {wrong_value(key, value, algorithm) or _first_line(error.__cause__ or error)}"
    if in_file := re.match(r"In '(.+)': \w+ raised while composing config:\n(.*)\n\s+full_key: (\S*)", text):
        file, problem, key = in_file.groups()
        if key in _NAMED and "Cannot convert" in problem:
            return f"conf/{file}.yaml: its first line has to be '# @package _global_'"
        return (
            f"conf/{file}.yaml: {key}: {wrong_key(key, algorithm) if problem.startswith('Key ') else problem}"
        )
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
