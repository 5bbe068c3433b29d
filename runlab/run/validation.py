"""Files that others may have written, read into typed values; ConfigError in a line for any other content.

Every file that is read back from a run folder, a sweep, a ref or a policy file comes through here: it may be
damaged, made by another version, or made to do harm. What passes has the types that its reader declares, so
that no code behind it needs to check them again.
"""

from __future__ import annotations

import contextlib
import json
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml

from runlab.config import yaml_files
from runlab.config.yaml_files import MAX_DEPTH, MAX_DIGITS
from runlab.errors import ConfigError

MAX_BYTES = 64_000_000  # of a file that is read as a whole; the index of a large search has fifteen
# A text that is shown: an id, a status, a name.
Line = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
T = TypeVar("T")


class Missing(ConfigError):
    """There is no such file."""


def read_bytes(path: Path, name: str = "", most: int = MAX_BYTES) -> bytes:
    """The content of a file, called `name` in errors.

    Raises Missing if there is none, and ConfigError for others, for pipes and for huge files too.
    """
    name = name or str(path)
    with reading(path, name) as size:
        if size > most:
            raise damaged(name, f"{size:,} bytes, and at most {most:,} are read")
        return path.read_bytes()


@contextlib.contextmanager
def reading(path: Path, name: str = "") -> Iterator[int]:
    """The size of a file, which the block may open. Raises as `read_bytes` does, for the block too."""
    name = name or str(path)
    try:
        facts = path.stat()
        if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):  # reading might never end
            raise ConfigError(f"{name} cannot be read: it is no file")
        yield facts.st_size
    except OSError as error:
        kind = Missing if isinstance(error, FileNotFoundError) else ConfigError
        raise kind(f"{name} cannot be read: {error.strerror}") from None


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a file in UTF-8, as `read_bytes` reads it."""
    try:
        return read_bytes(path, most=most).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: no UTF-8 at byte {error.start:,}") from None


def read_json(path: Path, kind: type[T]) -> T:
    """The values of a file of strict JSON, typed."""
    return typed(parse_json(read_text(path), str(path)), kind, str(path))


def parse_json(text: str | bytes, name: str, finite: bool = True) -> Any:
    """The values of a JSON text, with limited nesting and numbers; strict JSON if `finite` is set."""
    number = _finite if finite else float
    try:
        values = json.loads(text, parse_int=_integer, parse_float=number, parse_constant=number)
    except RecursionError:
        raise damaged(name, _TOO_DEEP) from None
    except ValueError as error:
        raise damaged(name, error) from None
    return _limited(values, name)


def parse_yaml(text: str, name: str) -> Any:
    """The values of a YAML text of plain values, with limited nesting."""
    try:
        return yaml_files.parse(text)[1]
    except (ValueError, yaml.YAMLError) as error:
        raise damaged(name, error) from None


def typed(values: Any, kind: type[T], name: str) -> T:
    """`values` as an instance of `kind`: a dataclass, a TypedDict, or a type such as `dict[str, float]`.

    Nothing is converted, except whole numbers to float. Keys that `kind` does not have are left out.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} is damaged, or of another version: {error}") from None
    except UnicodeEncodeError:  # of a text with half a character in the place of another type
        raise damaged(name, "a text is no Unicode") from None


def damaged(name: object, why: object) -> ConfigError:
    """The error about a file of the wrong content, in a line."""
    return ConfigError(f"{name} is damaged: {' '.join(str(why).split())[:300]}")


_TOO_DEEP = f"more than {MAX_DEPTH} levels"


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def _limited(values: Any, name: str) -> Any:
    """`values`, unless they are nested too deeply."""
    level = [values]
    for _ in range(MAX_DEPTH):
        nested = [each for each in level if isinstance(each, dict | list)]
        if not nested:
            return values
        level = [part for each in nested for part in (each.values() if isinstance(each, dict) else each)]
    raise damaged(name, _TOO_DEEP)
