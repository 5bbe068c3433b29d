"""Arguments `key=value` of the commands that compose no configuration.

A command is a module with a dataclass `Args`, whose fields are made by `argument` and `rest`,
and a function `main(args: Args) -> int`. The text of a value is data: nothing in it is resolved or evaluated,
and `run=007` is the text 007.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from runlab.config.texts import choose, readable, with_digits
from runlab.errors import REFUSED, ConfigError, RunError, in_a_line, no_more_processes
from runlab.signals import Interrupt, stop_signals

# Converts the text of a value; raises `ConfigError` that names the expected values.
Kind = Callable[[str], Any]
Args = TypeVar("Args")


def argument(kind: Kind = str, default: Any = dataclasses.MISSING, *, key: str | None = None) -> Any:
    """A field for `key=value`, by default under the field's name. Required unless there is a default."""
    return dataclasses.field(default=default, metadata={"kind": kind, "key": key})


def rest(*, options: bool = False) -> Any:
    """A field for arguments `key=value` with other keys; with `options` for all other arguments."""
    return dataclasses.field(default_factory=list, metadata={"rest": options})


def parse(argv: Sequence[str], args: type[Args]) -> Args:
    """The command's arguments as an instance of its dataclass; `ConfigError` names the first wrong one."""
    fields = dataclasses.fields(args)  # type: ignore[arg-type]
    words = {field.metadata["key"] or field.name: field for field in fields if "kind" in field.metadata}
    rest_field = next((field for field in fields if "rest" in field.metadata), None)
    names = [f"{key}=" for key in words]
    values: dict[str, Any] = {}
    others: list[str] = []
    texts = iter(argv)
    for typed in texts:
        # Hydra's `+` in front of a key says nothing, but for a setting of its launcher.
        text = re.sub(r"^\+{1,2}(?=\w)(?!hydra)", "", typed)
        key, equals, value = text.partition("=")
        if key.startswith("-") and key in words and not equals:
            equals, value = "=", next(texts, "")  # an option and its value may be two arguments
        if key in words and equals:
            if words[key].name in values:
                raise ConfigError(f"{text}: {key} is given twice")
            values[words[key].name] = converted(key, value, words[key].metadata["kind"])
        elif rest_field and (rest_field.metadata["rest"] or (equals and re.match(r"\s*[^-\s]", key))):
            others.append(text)
        elif rest_field and equals and text.startswith("--"):
            raise ConfigError(f"{text}: write {text.lstrip('-')}")
        else:
            wrong = (
                "no such option" if key.startswith("-") else "no such key" if equals else "expected key=value"
            )
            raise ConfigError(f"{text}: {wrong}; {choose(key, names)}")
    for key, field in words.items():
        if field.name not in values and field.default is dataclasses.MISSING:
            raise ConfigError(f"{key}= is missing; allowed: {', '.join(names)}")
    return args(**values, **({rest_field.name: others} if rest_field else {}))


def usage(name: str, args: type[Any]) -> str:
    """The arguments of a command with their defaults, and the description of its dataclass."""
    words = []
    for field in dataclasses.fields(args):
        key = field.metadata.get("key") or field.name
        if "rest" in field.metadata:
            words.append("[KEY=VALUE ...]")
        elif field.default is dataclasses.MISSING:
            words.append(f"{key}=...")
        else:
            default = str(field.default).lower() if isinstance(field.default, bool) else field.default
            words.append(f"[{key}={'...' if default is None else default}]")
    return f"usage: {' '.join(program(name, *words))}\n\n{inspect.getdoc(args)}"


def program(*words: str) -> list[str]:
    """The command line of this program, as it is recorded."""
    return ["python", "-m", __name__.partition(".")[0], *(words or sys.argv[1:])]


def converted(key: str, text: str, kind: Kind) -> Any:
    """The converted value of `key=text`; a `ConfigError` of `kind` gets the argument in front."""
    if not text.strip():
        raise ConfigError(f"{key}={text}: a value is missing after '='")
    try:
        return kind(text)
    except ConfigError as error:
        raise ConfigError(f"{key}={text}: {error}") from error


def whole(least: int, most: int | None = None) -> Kind:
    """The kind of a whole number from `least` to `most`."""
    expected = f"at least {least}" if most is None else f"from {least} to {most}"

    def convert(text: str) -> int:
        text = with_digits(text)
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise ConfigError(f"expected a whole number, {expected}")
        if not least <= int(text) <= (most or math.inf):
            raise ConfigError(f"must be {expected}")
        return int(text)

    return convert


def one_of(*names: str) -> Kind:
    """The kind of one of several names."""

    def convert(text: str) -> str:
        if text in names:
            return text
        raise ConfigError(choose(text, names))

    return convert


def switch(text: str) -> bool:
    """The kind of true or false, or of 1 or 0."""
    return one_of("true", "false")({"1": "true", "0": "false"}.get(text, text)) == "true"  # type: ignore[no-any-return]


def folder(text: str) -> Path:
    """The kind of a folder that exists or can be made."""
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.lstat()
        # A broken link does not exist, and no folder can be made in its place.
        parts = path.absolute(), *path.absolute().parents
        lowest = next(each for each in parts if os.path.lexists(each))
    except (OSError, RuntimeError) as error:  # longer than any name, or ~somebody without a home here
        raise ConfigError(f"cannot be made, {getattr(error, 'strerror', None) or error.args[-1]}") from None
    if not (lowest.is_dir() and os.access(lowest, os.W_OK | os.X_OK)):
        raise ConfigError(f"cannot be made, {lowest} is no folder that can be written")
    return path


def existing(text: str) -> Path:
    """The kind of a folder that is there."""
    path = Path(os.path.expanduser(text)).absolute()  # noqa: PTH111 - never raises
    if not os.path.isdir(path):  # noqa: PTH112 - False also for a name that is too long
        raise ConfigError("no such folder")
    return path


def runs_folder(text: str) -> Path:
    """The kind of a folder of runs, which may be missing."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - never raises
    with in_a_line("cannot be read"):  # such as a name that is too long
        path.is_dir()
    return path


def new_folder(text: str) -> Path:
    """The kind of a folder that is empty or can be made."""
    path = folder(text)
    if path.exists() and any(path.iterdir()):
        raise ConfigError("is not empty; expected a new folder")
    return path


def file(text: str) -> Path:
    """The kind of a file to write to, in an existing folder."""
    path = folder(str(Path(text).parent)) / Path(text).name
    with in_a_line("cannot be written"):  # such as a name that is too long
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError("expected a file in a folder that is there")
    return path


def make_folder(key: str, folder: Path) -> None:
    """Make the folder that the argument `key=folder` names, if it is missing; `ConfigError` if that fails."""
    with in_a_line(f"{key}={folder} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)


def exit_status(work: Callable[[], int | None]) -> int:
    """Do the `work` of a process; its exit status. An error for the user is printed in a line or two.

    A signal that asks the process to end is a KeyboardInterrupt in `work`, which removes temporary files.
    """
    interrupt = Interrupt()
    try:
        with stop_signals(interrupt):
            return work() or 0
    except (ConfigError, RunError) as error:
        print(f"error: {readable(str(error))}", file=sys.stderr)
        refused = REFUSED if isinstance(error, ConfigError) else 1
        return interrupt.exit_status if interrupt.heard else refused
    except (KeyboardInterrupt, Exception) as error:
        if interrupt.heard or isinstance(error, KeyboardInterrupt):
            return interrupt.exit_status  # a library that is interrupted may raise another error
        if not (isinstance(error, OSError | RuntimeError) and no_more_processes(error)):
            raise
        why = "no more processes or threads can be started here; `ulimit -u` shows a limit of their number"
        print(f"error: {why}", file=sys.stderr)
        return 1
