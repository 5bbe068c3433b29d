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


class _Escapes(dict[int, str]):
    """The text for each character: itself, or its escape in Python for a control or a reversed direction."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        # Controls, formats such as U+202E, halves of characters and unknown ones; separators of lines.
        obeyed = unicodedata.category(character)[0] == "C" or unicodedata.category(character) in ("Zl", "Zp")
        self[code] = repr(character)[1:-1] if obeyed and character not in "\n\t" else character
        return self[code]


_ESCAPES = _Escapes()


def escaped(text: str) -> str:
    """`text` without colours, and with other characters that a terminal would obey written as `\\x1b`."""
    return _COLOUR.sub("", text).translate(_ESCAPES)


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


def raw(stream: TextIO) -> TextIO:
    """The stream behind an escaping one, for text that draws."""
    return stream.stream if isinstance(stream, _Escaping) else stream
