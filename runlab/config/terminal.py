"""Text on a terminal. Text of others is shown, and never obeyed: it may come from files of anyone.

The streams of every command are replaced once, by `escape_output`. Code that moves the cursor or draws in
colour writes to the `raw` stream, and escapes the text in between itself.
"""

from __future__ import annotations

import io
import os
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any, TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def escaped(text: str) -> str:
    """`text` without colours, and with other characters that a terminal would obey written as `\\x1b`."""
    text = _COLOUR.sub("", text)
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    """The character, or its escape in Python for a control, a format such as U+202E or half a character."""
    plain = character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"
    return character if plain else repr(character)[1:-1]


class _Escaping:
    """A text stream that escapes what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(escaped(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def escape_output() -> None:
    """From now on, escape all that this process prints, and what the encoding of a stream lacks."""
    streams = raw(sys.stdout), raw(sys.stderr)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = map(_Escaping, streams)


def drop_output() -> None:
    """Let standard output go nowhere. Python would otherwise fail at its end if it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def takes_drawing(stream: TextIO) -> bool:
    """True for a terminal that can move its cursor and show colours."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def raw(stream: TextIO) -> TextIO:
    """The stream behind an escaping one, for text that draws."""
    return stream.stream if isinstance(stream, _Escaping) else stream
