"""The files of a folder that this process opens, noted by an audit hook.

It costs a run nothing that can be measured. Files that compiled code opens by itself are not seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

_READING = frozenset({"open", "sqlite3.connect", "ctypes.dlopen"})  # audit events about a path
_opened: set[str] = set()  # absolute paths in the folder that is watched
_tops: list[str] = []  # this folder, with a slash at its end; none while nothing is noted


def watch(top: Path) -> None:
    """Note the files of the folder `top` that are opened from now on, and forget the others."""
    _listen()
    _opened.clear()
    _tops[:] = [f"{top}{os.sep}"]


def opened() -> list[Path]:
    """The files that were opened for reading since `watch`, in the order of their paths."""
    return [Path(path) for path in sorted([*_opened])]


@contextmanager
def unheard() -> Iterator[None]:
    """Note nothing while the block reads files itself."""
    tops, _tops[:] = [*_tops], []
    try:
        yield
    finally:
        _tops[:] = tops


@cache
def _listen() -> None:
    """Have `_opened` filled from now on; an audit hook cannot be removed."""
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event not in _READING:  # as nearly all are: the rest may be slow
        return
    with suppress(OSError, TypeError, ValueError, IndexError):  # whatever it is called with, it must not fail
        if event == "open":
            mode, flags = args[1:3]
            if "r" not in mode if isinstance(mode, str) else flags & os.O_ACCMODE == os.O_WRONLY:
                return
        path = os.path.normpath(Path(os.fsdecode(args[0])).absolute())
        if any(path.startswith(top) or os.path.realpath(path).startswith(top) for top in _tops):
            _opened.add(path)
