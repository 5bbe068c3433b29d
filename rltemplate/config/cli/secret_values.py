"""Secrets in a configuration are refused, because its values are recorded, committed and shown.

The words of the command are checked first, so that no later message can repeat a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rltemplate.config.loading import to_dict
from rltemplate.config.schema import Config
from rltemplate.config.secrets import secret_in_value
from rltemplate.types import ConfigError

# A name and its value inside braces.
_ENTRY = re.compile(r"([\w.-]{1,100})[\"']?\s*:\s*[\[\"']*([^\s,\"'{}\[\]]+)")


def check_words(words: Sequence[str]) -> None:
    """Raise `ConfigError` for the first word whose value is a secret."""
    for word in words:
        key, equals, value = word.lstrip("+~").partition("=")
        _check(key if equals else "a word of the command", value.strip("'\"") if equals else word)
        for name, text in _ENTRY.findall(value) if "{" in value else ():
            _check(f"{key}.{name}", text)


def check_values(config: Config) -> None:
    """Raise `ConfigError` for the first value that is a secret, also from a file or a variable."""
    for key, text in _texts(to_dict(config), ""):
        _check(key, text)


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield key, str(name)
            yield from _texts(item, f"{key}.{name}" if key else str(name))


def _check(key: str, text: str) -> None:
    reason = secret_in_value(key, text)
    if reason is not None:
        raise ConfigError(
            f"{key}: its value {reason}; it would be recorded and shown with the run. Leave it out, and have "
            "the code that needs it read a variable of the environment"
        )
