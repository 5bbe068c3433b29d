"""Ends of a process that an environment or a library asks for: they are no success of the run.

Nothing can be done about native code that ends the process by itself. The record then still says that the
run is running, and a sweep goes by the record.
"""

from __future__ import annotations

import contextlib
import os
import posix
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def seen() -> Iterator[None]:
    """While the block runs, `os._exit` raises SystemExit, as `sys.exit` does.

    In a process that was forked off it ends that one, and in another thread the whole process with an error.
    """
    leave, owner = os._exit, os.getpid()

    def leave_openly(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        if threading.current_thread() is not threading.main_thread():
            print("error: a thread of the environment or of a library ended the process", file=sys.stderr)
            leave(status or 1)
        raise SystemExit(status)

    os._exit = posix._exit = leave_openly
    try:
        yield
    finally:
        os._exit = posix._exit = leave


def hold(status: int) -> None:
    """Let the process end with `status` even if a function of `atexit` leaves with status 0."""
    leave, owner, held = os._exit, os.getpid(), status

    def leave_with(status: int) -> NoReturn:
        leave(status or (held if os.getpid() == owner else 0))

    os._exit = posix._exit = leave_with


def told(error: SystemExit) -> str:
    """One line that names the code which ended the process."""
    places = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
    where = f" in {places[-1].filename}, line {places[-1].lineno}" if places else ""
    return f"the environment or a library ended the process with status {error.code or 0}{where}"
