"""From overrides to a typed configuration, or a line about the mistake."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from hydra import compose
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from rltemplate.config.cli.keys import (
    NAMED,
    chosen_algorithm,
    expected_value,
    known_keys,
    option_names,
    unknown_key,
)
from rltemplate.config.cli.secret_values import check_values
from rltemplate.config.loading import to_config
from rltemplate.config.schema import Config
from rltemplate.config.validation import choose
from rltemplate.types import ConfigError


class Composed(NamedTuple):
    """A job as Hydra would start it.

    `plain`: Hydra would only call it, without files, variables, callbacks or a folder of its own.
    """

    config: Config
    choices: dict[str, Any]  # by group
    overrides: list[str]  # without those of Hydra's own settings
    plain: bool


def compose_config(words: Sequence[str], *, sweep: bool = False) -> Config:
    """The configuration that Hydra would hand to the job with these overrides."""
    return compose_job(words, sweep=sweep).config


def compose_job(words: Sequence[str], *, sweep: bool = False) -> Composed:
    """The job that Hydra would start with these overrides."""
    try:
        composed = compose_with_hydra(words)
        hydra = composed.hydra
        choices = dict(hydra.runtime.choices)
        # What a fork adds to conf/config.yaml, or a machine in conf/local/, is Hydra's to do.
        job, log = hydra.job, hydra.job_logging
        asked = (hydra.output_subdir, hydra.callbacks, job.env_set, job.chdir, log.root)
        plain = not any(asked) and hydra.run.dir == "."
        # Hydra's own settings were needed for these only; the schema has no place for them.
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        OmegaConf.set_struct(composed, True)
        config = typed(composed, choices)  # says first what a ${...} does not stand for
        return Composed(config, choices, list(hydra.overrides.task), plain)
    except ConfigError as error:
        where = ""
        if isinstance(error.__cause__, InterpolationResolutionError):
            where = "".join(f"{word}: " for word in words if "${" in word)
        job = f" (in the job {' '.join(words)})" if sweep else ""
        raise ConfigError(f"{where}{error}{job}") from error


def typed(composed: DictConfig, choices: Mapping[str, Any]) -> Config:
    """The typed configuration of one job; `choices` are Hydra's, by group."""
    try:
        for group in NAMED:
            written = composed[group]
            if written not in (None, choices.get(group)):
                raise ConfigError(
                    f"{group}={written} in a file has no effect as a value; write it below 'defaults:' as\n"
                    f"  - override /{group}: {written}"
                )
            composed[group] = choices.get(group) if choices.get(group) in option_names(group) else None
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error)) from error
    config = to_config(composed)
    check_values(config)
    return config


def compose_with_hydra(words: Sequence[str]) -> DictConfig:
    """Hydra's composition of these overrides, with its own settings under `hydra`."""
    try:
        return compose("config", overrides=list(words), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain(error, words)) from error


def _explain(error: Exception, words: Sequence[str]) -> str:
    """One or two lines about an error of composition."""
    cause = error.__cause__
    merging = re.match(r"Error merging override (.*)$", str(error).splitlines()[0])
    if merging and isinstance(error, ConfigCompositionException):
        line = merging.group(1)
        key, _, value = line.lstrip("+").partition("=")
        expected = expected_value(key, value, words)
        if expected:
            return f"{line}: {expected}"
        return f"{line}: {first_line(cause)}" if cause else line
    in_file = re.match(r"In '(.+)': \w+ raised while composing config:\n(.*)\n\s+full_key: (\S*)", str(error))
    if in_file:
        file, problem, key = in_file.groups()
        if key in NAMED and "Cannot convert" in problem:
            return f"conf/{file}.yaml: its first line has to be '# @package _global_'"
        return f"conf/{file}.yaml: {_explain_value(key, problem, words)}"
    hydra_key = re.match(r"Could not override '(hydra\.\w+)\.([\w.]+)'", str(error))
    if hydra_key:
        parent, leaf = hydra_key.groups()
        chosen = compose_with_hydra([word for word in words if word.startswith("hydra/")])
        node = OmegaConf.select(chosen, parent)
        allowed = [str(name) for name in node if not str(name).startswith("_")]
        if not allowed:
            group = parent.replace(".", "/")
            return f"{parent}.{leaf}: no such key; choose {group}= first, as in hydra/launcher=joblib"
        return f"{parent}.{leaf}: no such key; {choose(leaf, allowed)}"
    return f"{first_line(error)}{f' ({first_line(cause)})' if cause else ''}"


def _explain_value(key: str, problem: str, words: Sequence[str]) -> str:
    """The mistake in a key or a value of a file, in the words for the command line."""
    if problem.startswith("Key "):
        algorithm = chosen_algorithm(words)
        return f"{key}: {unknown_key(key, known_keys([algorithm]), algorithm)}"
    value = re.search(r"(?:Value|value):? '?(.*?)'?(?: of type.*|, expected.*)?$", problem)
    expected = expected_value(key, value.group(1), words) if key and value else ""
    if value and expected:
        return f"{key}={value.group(1)}: {expected}"
    return f"{key}: {problem}" if key else problem


def first_line(error: BaseException) -> str:
    """The first line of a message, with the key in front that OmegaConf puts behind."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem or error.context}"
    lines = str(error).splitlines()
    located = re.search(r"full_key: (\S+)", str(error))
    key = getattr(error, "full_key", None) or (located.group(1) if located else None)
    return f"{key}: {lines[0]}" if key and lines else reason(error)


def reason(error: BaseException) -> str:
    """The first line of an exception's message, or its type where there is none."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
