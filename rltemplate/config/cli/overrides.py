"""Words of the command as overrides: their form, the groups and keys that they name, and their sign."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.cli.composition import compose_with_hydra
from rltemplate.config.cli.env_names import environment_option
from rltemplate.config.cli.keys import (
    HYDRA_GROUPS,
    IDENTITY,
    NONE,
    OPTIONAL,
    default_option,
    expected_value,
    group_names,
    known_keys,
    nearest_key,
    option_names,
    unknown_key,
)
from rltemplate.config.command_args import shown
from rltemplate.config.validation import choose
from rltemplate.types import ConfigError

_EXAMPLES = {"env": "env=Hopper-v5", "algo": "algo=sac", "determinism": "determinism=fast"}
_BRACKETS = (("[", "]", "[64,64]"), ("{", "}", "{a:1}"), ("(", ")", "range(1,3)"))


def parse_override(word: str, loader: ConfigLoader) -> Override:
    """The word as Hydra reads it. Raises `ConfigError` for words that it cannot read or would misread."""
    key, equals, value = word.partition("=")
    if not equals and not word.startswith("~"):
        raise ConfigError(_leftover(word))
    if not key.strip("+~ "):
        raise ConfigError(f"{word}: a key is missing before '='")
    if key != key.strip() or value != value.strip():
        raise ConfigError(f"{word!r}: leave no spaces around '=', write {key.strip()}={value.strip()}")
    try:
        override: Override = OverridesParser.create(config_loader=loader).parse_overrides([word])[0]
    except HydraException as error:
        raise ConfigError(f"{word}: {_unreadable(key, value)}") from error
    except ValueError as error:  # Python reads no numbers of thousands of digits
        raise ConfigError(f"{word}: has more digits than a number can have here") from error
    if override.package is not None:
        raise ConfigError(f"{word}: '@' in a key is not supported; write {override.key_or_group}={value}")
    return override


def _leftover(word: str) -> str:
    if not word.strip():
        return f"{shown(word)}: expected key=value"
    for group in group_names():
        for option in option_names(group):
            if word.lower() == option.lower():
                return f"{word}: expected key=value; did you mean {group}={option}?"
    near = nearest_key(word, [*known_keys(ALGORITHMS), *group_names()])
    return f"{word}: expected key=value" + (f"; did you mean {near}=...?" if near else "")


def _unreadable(key: str, value: str) -> str:
    if "" in key.lstrip("+~").split("."):
        start = key.partition("..")[0].rstrip(".")
        return f"a name is missing beside a dot of the key, as in {start}.name={value}"
    for opening, closing, example in _BRACKETS:
        if value.count(opening) != value.count(closing):
            wrong = opening if value.count(opening) > value.count(closing) else closing
            return f"'{wrong}' has no partner; brackets come in pairs, as in {key}={example}"
    if key in group_names():
        return f"conf/{key}/ has no such file; {choose(value, option_names(key))}"
    expected = expected_value(key.lstrip("+"), value, [])
    if expected and "a text" not in expected:
        return expected
    quoted = '{}="{}"'.format(key, value.replace("\\", "\\\\").replace('"', '\\"'))
    with suppress(HydraException):
        OverridesParser.create().parse_override(quoted)
        return f"quotes, brackets and commas inside a text need quoting; write {shlex.quote(quoted)}"
    return "cannot be read as key=value; keys are words with dots between them, as algo.gamma=0.99"


def check_overrides(overrides: Sequence[Override], loader: ConfigLoader) -> list[Override]:
    """Refuse groups, names and keys that do not exist; the others, with names as Hydra finds them."""
    seen, checked = set[str](), []
    for override in overrides:
        key, line = override.key_or_group, str(override.input_line)
        if key in seen:
            raise ConfigError(f"{line}: {key} is given twice")
        seen.add(key)
        _check_sign(override)
        if key in group_names():
            names = [_option(key, value) for value in _values(override)]
            override = parse_override(f"{key}={','.join(names)}", loader)
        elif key in HYDRA_GROUPS:
            _check_hydra_group(override, loader)
        checked.append(override)
    for override in checked:
        _check_key(override, checked)
    return checked


def _check_sign(override: Override) -> None:
    """Allow `+` and `~` only for the arguments of the environment."""
    if override.type == OverrideType.CHANGE or override.key_or_group.startswith("env.kwargs."):
        return
    key, line = override.key_or_group, str(override.input_line)
    if override.type == OverrideType.DEL:
        instead = f"write {key}=null" if key in OPTIONAL else "set another value instead"
        raise ConfigError(f"{line}: nothing can be removed; {instead}")
    known = known_keys(ALGORITHMS)
    if key in group_names() or key in known:
        raise ConfigError(f"{line}: exists already; write it without '+', as {line.lstrip('+')}")
    raise ConfigError(f"{line}: keys can be added to env.kwargs only; {unknown_key(key, known)}")


def _check_hydra_group(override: Override, loader: ConfigLoader) -> None:
    key, line = override.key_or_group, str(override.input_line)
    allowed = loader.get_group_options(key, results_filter=ObjectType.CONFIG)
    for value in _values(override):
        if value not in allowed:
            raise ConfigError(f"{line}: not installed; {choose(str(value), allowed)}")
        if value == "submitit_slurm" and shutil.which("srun") is None:
            raise ConfigError(
                f"{line}: there is no srun here, so this is no machine of a Slurm cluster; "
                "use hydra/launcher=joblib"
            )
    if override.is_sweep_override():
        raise ConfigError(f"{line}: a sweep has one {key.partition('/')[2]}")


def _values(override: Override) -> list[Any]:
    """The values that the override stands for, one unless it is a sweep."""
    if not override.is_sweep_override():
        return [override.value()]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line}: a name is needed, or several separated by commas")
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        found = [str(name) for name in override.sweep_string_iterator() if not str(name).startswith("_")]
        if not found:
            allowed = ", ".join(option_names(override.key_or_group))
            raise ConfigError(f"{override.input_line}: matches nothing; allowed: {allowed}")
        return found
    return [value.text if isinstance(value, QuotedString) else value for value in override.sweep_iterator()]


def _option(group: str, value: Any) -> str:
    """The name under which Hydra finds the option `value` of a group."""
    allowed = [*option_names(group), *([NONE] if group in OPTIONAL else [])]
    if value is None and group in OPTIONAL:
        return NONE
    if value in allowed:
        return str(value)
    if group == "env" and isinstance(value, str) and value:
        return environment_option(value, allowed)
    name = "null" if value is None else str(value)
    if (group, name) == ("logger", "tensorboard"):
        raise ConfigError("logger=tensorboard: files for TensorBoard are part of logger=local, the default")
    owner = next((each for each in group_names() if value in option_names(each)), None)
    if owner is not None:
        raise ConfigError(f"{group}={name}: is no {group}; did you mean {owner}={name}?")
    what = f"allowed: {', '.join(allowed)}" if value is None else choose(name, allowed)
    raise ConfigError(f"{group}={name}: conf/{group}/ has no such file; {what}")


def _check_key(override: Override, overrides: Sequence[Override]) -> None:
    """Refuse a key that a chosen algorithm does not have, or that is not set on its own."""
    key, line = override.key_or_group, str(override.input_line)
    if f"{key}.".startswith("hydra.sweeper.params."):
        raise ConfigError(f"{line}: the values of a sweep are written as overrides, as in seed=1,2")
    if key in (*group_names(), *HYDRA_GROUPS) or key.startswith(("hydra.launcher.", "hydra.sweeper.")):
        return
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        raise ConfigError(
            f"{line}: of Hydra's own settings only hydra/launcher, hydra/sweeper and the keys below "
            "hydra.launcher and hydra.sweeper can be set; folders are chosen with runs_dir and run_dir"
        )
    if key in IDENTITY:
        group = IDENTITY[key]
        raise ConfigError(
            f"{line}: goes with other values; choose it with {group}=, as in {_EXAMPLES[group]}"
        )
    if key.startswith("env.kwargs."):
        if override.type == OverrideType.CHANGE and not _has_kwarg(key, overrides):
            raise ConfigError(f"{line}: adds an argument; arguments are added with '+', as +{line}")
        return
    value = None if override.is_sweep_override() else override.value()
    if key == "env.kwargs" and isinstance(value, dict):
        added = " ".join(f"+env.kwargs.{name}={each}" for name, each in value.items())
        raise ConfigError(f"{line}: arguments are added one by one, as {added or '+env.kwargs.name=value'}")
    for algorithm in _chosen("algo", overrides):
        if key not in known_keys([algorithm]):
            raise ConfigError(f"{line}: {unknown_key(key, known_keys([algorithm]), algorithm)}")
    if override.is_sweep_override() and key in ("runs_dir", "run_dir"):
        raise ConfigError(f"{line}: all jobs of a sweep have one {key}")


def _has_kwarg(key: str, overrides: Sequence[Override]) -> bool:
    """True if every chosen environment passes this argument already, so that it can be changed."""
    composed = [compose_with_hydra([f"env={name}"]) for name in _chosen("env", overrides)]
    return all(OmegaConf.select(each, key, default=None) is not None for each in composed)


def _chosen(group: str, overrides: Sequence[Override]) -> list[str]:
    lines = [str(each.input_line) for each in overrides if each.key_or_group == group]
    return lines[0].partition("=")[2].split(",") if lines else [default_option(group)]
