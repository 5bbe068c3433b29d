"""Words of the command as overrides: texts stay as they were typed, and groups have the options named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.cli.environments import environment_option
from rltemplate.config.cli.keys import (
    HYDRA_GROUPS,
    IDENTITY,
    group_names,
    key_types,
    nearest_key,
    option_names,
    takes_text,
    wrong_value,
)
from rltemplate.config.command_args import shown
from rltemplate.config.loading import literal
from rltemplate.config.schema import NONE, OPTIONAL
from rltemplate.config.validation import choose
from rltemplate.types import ConfigError

_OF_HYDRA = (*HYDRA_GROUPS, "hydra.launcher.", "hydra.sweeper.")


def read_overrides(words: Iterable[str], loader: ConfigLoader) -> list[Override]:
    """The words as Hydra is to read them; `ConfigError` for the first that it cannot, or would misread."""
    parser = OverridesParser.create(config_loader=loader)
    overrides: dict[str, Override] = {}
    for word in words:
        override = _read(word, parser)
        key = override.get_key_element().lstrip("+")
        if key in overrides:
            raise ConfigError(f"{word}: {key} is given twice")
        if key in IDENTITY:
            raise ConfigError(f"{word}: goes with other values; choose it with {IDENTITY[key]}=")
        if key.startswith("hydra") and not key.startswith(_OF_HYDRA):
            raise ConfigError(
                f"{word}: of Hydra's own settings only hydra/launcher, hydra/sweeper and the keys below them "
                "can be set; folders are chosen with runs_dir and run_dir"
            )
        if key in (*group_names(), *HYDRA_GROUPS):
            allowed = option_names(key) or loader.get_group_options(key, results_filter=ObjectType.CONFIG)
            names = [_option(key, value, allowed) for value in _values(override)]
            if not names:
                raise ConfigError(f"{word}: matches nothing; allowed: {', '.join(allowed)}")
            override = parser.parse_overrides([f"{key}={','.join(names)}"])[0]
        overrides[key] = override
    return list(overrides.values())


def _read(word: str, parser: OverridesParser) -> Override:
    sign, key, value = re.fullmatch(r"([+~]*)([^=]*)(=.*)?", word, re.DOTALL).groups()  # type: ignore[union-attr]
    if not key.strip() or value is None or "~" in sign:
        raise ConfigError(f"{shown(word)}: expected key=value{_meant(word)}")
    # A sign is not needed: arguments of the environment are added, and every other key is there.
    kept = "++" if re.match(r"env\.kwargs\b", key) else sign if key.startswith("hydra") else ""
    value, override = value[1:], None
    with suppress(HydraException, ValueError):  # ValueError: a number of thousands of digits
        override = parser.parse_overrides([f"{kept}{key}={value}"])[0]
    if takes_text(key) and _would_change(key, value, override):
        value = QuotedString(literal(value) if key == "note" else value, Quote.double).with_quotes()
        override = parser.parse_overrides([f"{key}={value}"])[0]
    if override is None:
        if key in group_names():
            raise ConfigError(f"{word}: no such {key}; {choose(value, option_names(key))}")
        expected = wrong_value(key, value, next(iter(ALGORITHMS))) or "it cannot be read as key=value"
        raise ConfigError(f"{word}: {expected}; quotes and brackets come in pairs, as in seed=range(1,3)")
    return override


def _would_change(key: str, value: str, override: Override | None) -> bool:
    """True if the override grammar reads another value than the text: for 9e5387, or a note with commas."""
    if value == "null":
        return False
    if override is None or override.is_sweep_override():
        return override is None or key == "note"
    quoted = re.fullmatch(r"""(["']).*\1""", value, re.DOTALL)
    return not quoted and (key == "note" or not isinstance(override.value(), str))


def _meant(word: str) -> str:
    for group in group_names():
        for option in option_names(group):
            if word.lower() == option.lower():
                return f"; did you mean {group}={option}?"
    near = nearest_key(word, [key for name in ALGORITHMS for key in key_types(name)])
    return f"; did you mean {near}=...?" if near and word.strip() else ""


def _values(override: Override) -> list[Any]:
    """The names that the override of a group stands for, one unless it is a sweep."""
    if not override.is_sweep_override():
        return [override.value()]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line}: a name is needed, or several separated by commas")
    names = [value.text if isinstance(value, QuotedString) else value for value in override.sweep_iterator()]
    return [name for name in names if not str(name).startswith("_")]  # which glob() finds as well


def _option(group: str, value: Any, allowed: Sequence[str]) -> str:
    """The name under which Hydra finds the option `value` of a group."""
    if group in OPTIONAL and value in (None, NONE):
        return NONE
    if value in allowed:
        return str(value)
    if group == "env" and isinstance(value, str) and value:
        return environment_option(value, allowed)
    name = "null" if value is None else str(value)
    raise ConfigError(f"{group}={name}: no such {group}; {choose(name, allowed)}")
