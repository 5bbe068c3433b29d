"""The two kinds of errors that a user sees as a line or two, without a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator


class ConfigError(Exception):
    """The user asked for something that cannot be had. The message is one or two lines for the user."""


class RunError(RuntimeError):
    """A run cannot go on, for a reason that is neither the user's configuration nor a mistake of this code.

    An environment returned NaN, a worker process died, the disk is full. The message is one or two lines for
    the user, printed without a traceback; the exit status is 1.
    """


@contextlib.contextmanager
def in_a_line(trouble: str, kind: type[Exception] = ConfigError) -> Iterator[None]:
    """Turn an OSError in the block into an error for the user: the text `trouble`, and the reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{trouble}: {error.strerror or error}") from error


def no_more_processes(error: BaseException) -> bool:
    """True if the system refused a process or a thread to this user."""
    # A full pipe that does not block raises EAGAIN with another text.
    refused = getattr(error, "strerror", None) == os.strerror(errno.EAGAIN)
    return refused or str(error) == "can't start new thread"


REFUSED = 2  # exit status after a ConfigError
