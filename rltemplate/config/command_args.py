"""`key=value` words of the commands that compose no configuration, and how words are shown in messages."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rltemplate.config.secrets import secret_in_value
from rltemplate.types import ConfigError

# By key, what turns the text of its value into the value.
Kinds = Mapping[str, Callable[[str], Any]]
# Of a longer word, beginning and end are enough to know it again.
_LONGEST = 120
_SECRET_SIZED = re.compile(r"[^\s'\"=,\[\]{}]{16,}")


def parse_words(
    argv: Sequence[str],
    kinds: Kinds,
    required: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> dict[str, Any]:
    """Values by key, converted by `kinds`; `ConfigError` names the first word that is wrong.

    A kind raises `ConfigError` to say what it expects, or `ValueError`. Of `flags`, such as `--json`, those
    that were given are keys with the value True.
    """
    allowed = ", ".join([*(f"{key}=" for key in kinds), *flags])
    values: dict[str, Any] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        if key in flags and not equals:
            values[key] = True
        elif key.startswith("-"):
            raise ConfigError(f"{word}: no such option; {_nearest(key, kinds, flags)}allowed: {allowed}")
        elif not equals:
            raise ConfigError(
                f"{shown(word)}: expected key=value; {_nearest(key, kinds, flags)}allowed: {allowed}"
            )
        elif key not in kinds:
            raise ConfigError(f"{word}: no such key; {_nearest(key, kinds, flags)}allowed: {allowed}")
        elif key in values:
            raise ConfigError(f"{word}: {key} is given twice")
        else:
            values[key] = _converted(word, kinds[key], text)
    for key in required:
        if key not in values:
            raise ConfigError(f"{key}= is missing; allowed: {allowed}")
    return values


def _nearest(wrong: str, kinds: Mapping[str, Any], flags: Sequence[str]) -> str:
    names = {key: f"{key}=" for key in kinds} | {flag.lstrip("-"): flag for flag in flags}
    near = difflib.get_close_matches(wrong[:_LONGEST].strip("-+~ ").lower(), names, n=1)
    return f"did you mean {names[near[0]]}? " if near else ""


def _converted(word: str, kind: Callable[[str], Any], text: str) -> Any:
    if not text.strip():
        raise ConfigError(f"{word}: a value is missing after '='")
    try:
        return kind(text)
    except ConfigError as error:
        raise ConfigError(f"{word}: {error}") from error
    except ValueError as error:
        names: dict[Any, str] = {int: "a whole number", float: "a number"}
        raise ConfigError(f"{word}: expected {names.get(kind, 'another value')}") from error


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The kind of a whole number from `least` to `most`."""

    def convert(text: str) -> int:
        expected = f"at least {least}" if most is None else f"from {least} to {most}"
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise ConfigError(f"expected a whole number, {expected}")
        value = int(text)
        if value < least or (most is not None and value > most):
            raise ConfigError(f"must be {expected}")
        return value

    return convert


def one_of(*names: str) -> Callable[[str], str]:
    """The kind of a word that is one of a few."""

    def convert(text: str) -> str:
        if text in names:
            return text
        near = difflib.get_close_matches(text[:_LONGEST], names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{hint}expected {', '.join(names[:-1])} or {names[-1]}")

    return convert


def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The kind of a list of words with commas between them, each of this kind and none twice."""

    def convert(text: str) -> list[Any]:
        values = [kind(word) for word in text.split(",")]
        twice = [word for word, value in zip(text.split(","), values, strict=True) if values.count(value) > 1]
        if twice:
            raise ConfigError(f"{shown(twice[0])} is given twice")
        return values

    return convert


def finite(text: str) -> float:
    """The kind of a number above zero, and below infinity."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError("expected a number") from None
    if not 0 < value < math.inf:
        raise ConfigError("must be greater than 0, and finite")
    return value


def folder(text: str) -> Path:
    """The kind of a folder to write to; a yes or no is not the name of one."""
    if text.lower() in ("true", "false", "yes", "no", "1", "0"):
        raise ConfigError(f"expected the name of a folder; ./{text} if that is one")
    return Path(text).expanduser()


def make_folder(key: str, folder: Path) -> None:
    """Make the folder that the word `key=folder` names, unless it is there; `ConfigError` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{key}={folder}: is a file; expected a folder") from None
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be made, {error.strerror}") from error


def shown(text: str) -> str:
    """`text` on one line and not too long; quoted where it would not be seen otherwise."""
    if not text.isprintable() or not text.strip():
        text = repr(text)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 4 :]} ({len(text):,} characters)"
    return text


def readable(message: str, argv: Sequence[str]) -> str:
    """A message about words of a command, in which odd or long ones are replaced by how they are shown.

    Nobody looks for a line break or a hundred kilobytes in a word when quoting it. A secret is not shown.
    """
    message = _SECRET_SIZED.sub(
        lambda found: "(a secret)" if secret_in_value("", found[0]) else found[0], message
    )
    for word in argv:
        for part in (word, word.partition("=")[2]):
            if part.strip() and shown(part) != part:
                message = message.replace(part, shown(part))
    # What quotes a part of a word in another form.
    return re.sub(rf"\S{{{2 * _LONGEST},}}", lambda match: shown(match[0]), message)
