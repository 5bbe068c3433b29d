"""`key=value` words of the commands that compose no configuration."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rltemplate.types import ConfigError


def parse_words(
    argv: Sequence[str], kinds: Mapping[str, Callable[[str], Any]], required: Sequence[str] = ()
) -> dict[str, Any]:
    """Values by key, converted by `kinds`; `ConfigError` names the first word that is wrong.

    The last of several words with one key counts, as in make.
    """
    allowed = ", ".join(f"{key}=" for key in kinds)
    values: dict[str, Any] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: expected key=value with a key of {allowed}")
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]}=? " if near else ""
            raise ConfigError(f"{word}: no such key; {hint}allowed: {allowed}")
        try:
            values[key] = kinds[key](text)
        except ValueError as error:
            kind = {int: "a whole number", float: "a number"}.get(kinds[key], "another value")  # type: ignore[call-overload]
            raise ConfigError(f"{word}: expected {kind}") from error
    for key in required:
        if not values.get(key):
            raise ConfigError(f"{key}= is missing; allowed: {allowed}")
    return values
