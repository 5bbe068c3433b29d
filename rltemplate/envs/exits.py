"""An environment or a library that ends the process of a run is an error, whatever its exit status."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import NoReturn

from rltemplate.types import RunError

# The W&B client puts a function of its own in front of sys.exit.
_PASSED_THROUGH = (__file__, os.path.join("wandb", "sdk", "lib", "exit_hooks.py"))  # noqa: PTH118


@contextlib.contextmanager
def exits_are_errors() -> Iterator[None]:
    """Raise `RunError`, naming file and line, where code in the block calls `sys.exit` or `os._exit`.

    Forked child processes may call `os._exit`. Native code that ends the process is not noticed.
    """
    leave, owner = os._exit, os.getpid()

    def leave_openly(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        raise SystemExit(status)

    os._exit = leave_openly
    try:
        yield
    except SystemExit as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = [frame for frame in frames if not frame.filename.endswith(_PASSED_THROUGH)][-1]
        status = error.code or 0
        raise RunError(f"{at.filename}, line {at.lineno}, ended the process, status {status}") from error
    finally:
        os._exit = leave
