"""Guards around code of environments, which may end the process that calls it, or fork it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from runlab.errors import RunError


@contextlib.contextmanager
def exits_are_errors() -> Iterator[None]:
    """Raise `RunError`, naming file and line, where code in the block calls `sys.exit` or `os._exit`.

    An environment or a library that ends the process of a run is an error, whatever its exit status. A thread
    cannot raise in the block: its `os._exit` ends the process with a message, and never with status 0. A
    library that ends the process from C is not noticed.
    """
    process, end_process = os.getpid(), os._exit

    def end(status: int) -> NoReturn:
        if os.getpid() != process:  # of a child
            end_process(status)
        if threading.current_thread() is not threading.main_thread():
            at = traceback.extract_stack(limit=2)[0]
            with contextlib.suppress(OSError, ValueError):
                text = (
                    f"error: {at.filename}, line {at.lineno}, ended the process in a thread, status {status}"
                )
                print(text, file=sys.stderr, flush=True)
            end_process(status % 256 or 1)
        raise SystemExit(status)

    os._exit = end
    try:
        yield
    except SystemExit as error:
        end_forked(process)
        frames, status = traceback.extract_tb(error.__traceback__), error.code or 0
        # The innermost frame, except for a replacement of sys.exit, such as W&B's, and for the one above.
        stand_in = getattr(getattr(sys.exit, "__code__", None), "co_filename", None)
        at = next(each for each in reversed(frames) if each.filename not in (stand_in, __file__))
        raise RunError(f"{at.filename}, line {at.lineno}, ended the process, status {status}") from error
    finally:
        os._exit = end_process


@contextlib.contextmanager
def forks_end_here() -> Iterator[None]:
    """End a process that code in the block has forked and that leaves the block."""
    process = os.getpid()
    try:
        yield
    finally:
        end_forked(process)


def end_forked(process: int) -> None:
    """End this process if it is not `process` but was forked from it, without acting in its place.

    Such a child would go on as a second one of the same run, or end the run. To be called where code of an
    environment returns or raises. `sys.exit` of the child gives its exit status; nothing else of it runs.
    """
    if os.getpid() == process:
        return
    error: Any = sys.exc_info()[1]
    with contextlib.suppress(OSError, ValueError):
        if error is None:
            print(f"note: a process that an environment forked from {process} is ended", file=sys.stderr)
        elif not isinstance(error, SystemExit):
            traceback.print_exception(error)
    # No standard output: what the parent had not written yet would be written twice.
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else int(code is not None))
