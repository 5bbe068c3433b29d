"""Parts of messages: short lists, the nearest name, and an error in a line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runlab import INSTALLED
from runlab.config.secrets import secret_in_value
from runlab.config.terminal import escaped

ENOUGH = 10  # names in an answer
# In a message: the start, more than is shown, and the end.
_LONG_WORD = re.compile(r"([^\s:]{100})[^\s:]{50,}([^\s:]{50})")
_LONG_LINE = re.compile(r"(?m)^(.{350}).{100,}(.{350})$")
_POWER_OF_TEN = re.compile(r"(?<![\w.])[0-9]{1,18}(?:\.[0-9]{1,18})?[eE]\+?[0-9]{1,2}(?![\w.])")
_SECRET_SIZED = re.compile(r"[^\s'\"=,\[\]{}]{16,}")


def choose(wrong: str, allowed: Iterable[Any], where: str = "") -> str:
    """`did you mean X? allowed: ...` for an unknown name. Of many names the first, and `where` to see all."""
    names = [str(name) for name in allowed]
    return f"{nearest(wrong, names)}allowed: {few(names, ENOUGH, where)}"


def nearest(wrong: str, allowed: Iterable[str]) -> str:
    """A hint at the name most like `wrong`, or nothing. A mapping gives the text to show for each name."""
    meant = allowed if isinstance(allowed, Mapping) else {name: name for name in allowed}
    names = {name.lower().strip("-="): value for name, value in meant.items()}
    near = difflib.get_close_matches(wrong[:100].lower().strip("-="), names, n=1, cutoff=0.5)
    return f"did you mean {names[near[0]]}? " if near else ""


def few(names: Sequence[str], most: int = 3, where: str = "") -> str:
    """The first names, the number of further ones, and `where` to see all."""
    more = f" and {len(names) - most} more{where and f', see {where}'}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def with_digits(text: str) -> str:
    """The text with whole numbers written out: 1000000 for 1e6, 1500 for 1.5e3. A float has their digits."""
    exact = {found: float(found) for found in _POWER_OF_TEN.findall(text)}
    whole = {found: f"{value:.0f}" for found, value in exact.items() if value.is_integer() and value < 2**53}
    return _POWER_OF_TEN.sub(lambda found: whole.get(found[0], found[0]), text)


def readable(message: str) -> str:
    """`message` without secrets, with long words shortened and unprintable characters escaped."""
    message = _SECRET_SIZED.sub(
        lambda found: "(a secret)" if secret_in_value("", found[0]) else found[0], message
    )
    for long in (_LONG_WORD, _LONG_LINE):
        message = long.sub(lambda found: f"{found[1]}...{found[2]} ({len(found[0]):,} characters)", message)
    return escaped(message)


def from_here(path: Path) -> Path:
    """The path as typed in the current folder."""
    with suppress(OSError):  # the current folder was deleted
        if path.is_relative_to(Path.cwd()):
            return path.relative_to(Path.cwd())
    return path


def error_text(error: BaseException) -> str:
    """The message of an error; empty for one of a library that cannot give it."""
    try:
        return str(error)
    except Exception:
        return ""


def package_of(env_id: str) -> str:
    """The package with games of Atari or with MiniGrid, for an id that begins as theirs do; else nothing."""
    packages = {"ale/": "ale_py", "minigrid-": "minigrid"}
    return next((package for start, package in packages.items() if env_id.lower().startswith(start)), "")


def to_install(error: BaseException) -> str:
    """The packages of Atari to install, if an error says that one is missing; Gymnasium names another one."""
    missing = "opencv" in str(error) or (isinstance(error, ImportError) and "ale_py" in str(error))
    return f"; {installing('atari', 'ale-py opencv-python-headless')}" if missing else ""


def installing(extra: str, packages: str) -> str:
    """The cure for missing packages, which an extra of the project brings."""
    return f"install the extra [{extra}]" if INSTALLED else f"use .venv/bin/python -m pip install {packages}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, its type where it has none."""
    # Gymnasium adds these words to a TypeError of an environment.
    line = (error_text(error) or type(error).__name__).splitlines()[0]
    return line.partition(" was raised from the environment creator")[0]
