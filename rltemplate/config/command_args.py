"""`key=value` words of the commands that compose no configuration, and how words are shown in messages.

A command is a module with a dataclass `Args`, whose fields are made by `word`, `flag` and `rest`, and a
function `main(args: Args) -> int`. The text of a value is data: nothing in it is resolved or evaluated, and
`run=007` is the text 007.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rltemplate.config.secrets import secret_in_value
from rltemplate.config.validation import choose
from rltemplate.types import ConfigError

# Turns the text of a value into the value; raises `ConfigError` with what is expected.
Kind = Callable[[str], Any]
Args = TypeVar("Args")
_LONGEST = 120  # characters of a word that a message shows; beginning and end identify a longer one
_SECRET_SIZED = re.compile(r"[^\s'\"=,\[\]{}]{16,}")


def word(kind: Kind = str, default: Any = dataclasses.MISSING, *, key: str | None = None) -> Any:
    """A field for `key=value`, by default under the field's name. Required unless there is a default."""
    return dataclasses.field(default=default, metadata={"kind": kind, "key": key})


def flag(name: str = "--json") -> Any:
    """A field that is True if the flag is given."""
    return dataclasses.field(default=False, metadata={"flag": name})


def rest(*, options: bool = False) -> Any:
    """A field for the words `key=value` with other keys, as typed; with `options` for all other words."""
    return dataclasses.field(default_factory=list, metadata={"rest": options})


def parse(argv: Sequence[str], args: type[Args]) -> Args:
    """The command's words as an instance of its dataclass; `ConfigError` names the first wrong word."""
    fields = dataclasses.fields(args)  # type: ignore[arg-type]
    words = {field.metadata["key"] or field.name: field for field in fields if "kind" in field.metadata}
    flags = {field.metadata["flag"]: field.name for field in fields if "flag" in field.metadata}
    rest_field = next((field for field in fields if "rest" in field.metadata), None)
    names = [*(f"{key}=" for key in words), *flags]
    values: dict[str, Any] = {}
    others: list[str] = []
    for text in argv:
        key, equals, value = text.partition("=")
        if key in flags and not equals:
            values[flags[key]] = True
        elif key in words and equals:
            if words[key].name in values:
                raise ConfigError(f"{text}: {key} is given twice")
            values[words[key].name] = _converted(text, words[key].metadata["kind"], value)
        elif rest_field and (rest_field.metadata["rest"] or (equals and re.match(r"\s*[^-\s]", key))):
            others.append(text)
        else:
            wrong = (
                "no such option" if key.startswith("-") else "no such key" if equals else "expected key=value"
            )
            raise ConfigError(f"{shown(text)}: {wrong}; {choose(key, names)}")
    for key, field in words.items():
        if field.name not in values and field.default is dataclasses.MISSING:
            raise ConfigError(f"{key}= is missing; allowed: {', '.join(names)}")
    return args(**values, **({rest_field.name: others} if rest_field else {}))


def usage(name: str, args: type[Any]) -> str:
    """The words of a command with their defaults, and the description of its dataclass."""
    words = []
    for field in dataclasses.fields(args):
        key = field.metadata.get("key") or field.name
        if "flag" in field.metadata:
            words.append(f"[{field.metadata['flag']}]")
        elif "rest" in field.metadata:
            words.append("[KEY=VALUE ...]")
        elif field.default is dataclasses.MISSING:
            words.append(f"{key}=...")
        else:
            words.append(f"[{key}={'...' if field.default is None else field.default}]")
    return f"usage: {' '.join(program(name, *words))}\n\n{inspect.getdoc(args)}"


def program(*words: str) -> list[str]:
    """The command line of this program, as it is recorded."""
    return ["python", "-m", __name__.partition(".")[0], *(words or sys.argv[1:])]


def _converted(word: str, kind: Kind, text: str) -> Any:
    if not text.strip():
        raise ConfigError(f"{word}: a value is missing after '='")
    try:
        return kind(text)
    except ConfigError as error:
        raise ConfigError(f"{word}: {error}") from error


def whole(least: int, most: int | None = None) -> Kind:
    """The kind of a whole number from `least` to `most`."""
    expected = f"at least {least}" if most is None else f"from {least} to {most}"

    def convert(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise ConfigError(f"expected a whole number, {expected}")
        if not least <= int(text) <= (most or math.inf):
            raise ConfigError(f"must be {expected}")
        return int(text)

    return convert


def finite(text: str) -> float:
    """The kind of a finite number greater than 0."""
    try:
        if 0 < float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise ConfigError("expected a number greater than 0")


def one_of(*names: str) -> Kind:
    """The kind of one of several names."""

    def convert(text: str) -> str:
        if text in names:
            return text
        raise ConfigError(choose(text, names))

    return convert


def several(kind: Kind) -> Kind:
    """The kind of a list of values with commas between them."""
    return lambda text: [kind(word) for word in text.split(",")]


def folder(text: str) -> Path:
    """The kind of a folder to write to."""
    path = _path(text)
    if path.is_file():
        raise ConfigError("is a file; expected a folder")
    return path


def file(text: str) -> Path:
    """The kind of a file to write to, in a folder that is there."""
    path = _path(text)
    if path.is_dir():
        raise ConfigError("is a folder; expected a file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot be written, there is no folder {path.parent}")
    return path


def _path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
        path.exists()
    except RuntimeError:
        raise ConfigError("this machine does not know whose home that is") from None
    except OSError as error:  # longer than any name
        raise ConfigError(f"cannot be written, {error.strerror}") from None
    return path


def make_folder(key: str, folder: Path) -> None:
    """Make the folder that the word `key=folder` names, unless it is there; `ConfigError` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be made, {error.strerror}") from error


def few(names: Sequence[str], most: int = 3) -> str:
    """The first of many names, and the number of the names left out."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shown(text: str) -> str:
    """`text` on one line and shortened; quoted if it is not printable."""
    if not text.isprintable() or not text.strip():
        text = repr(text)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 4 :]} ({len(text):,} characters)"
    return text


def readable(message: str, argv: Sequence[str]) -> str:
    """`message` with secrets left out, and with long and unprintable words of `argv` as `shown` has them."""
    message = _SECRET_SIZED.sub(
        lambda found: "(a secret)" if secret_in_value("", found[0]) else found[0], message
    )
    for word in argv:
        for part in (word, word.partition("=")[2]):
            if part.strip() and shown(part) != part:
                message = message.replace(part, shown(part))
    return re.sub(rf"\S{{{2 * _LONGEST},}}", lambda match: shown(match[0]), message)
