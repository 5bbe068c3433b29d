"""An environment or a library that ends the process: that is no success of the run."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def seen() -> Iterator[None]:
    """While the block runs, `os._exit` raises SystemExit as `sys.exit` does, but for forked processes."""
    leave, owner = os._exit, os.getpid()

    def leave_openly(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        raise SystemExit(status)

    os._exit = leave_openly
    try:
        yield
    finally:
        os._exit = leave


def told(error: SystemExit) -> str:
    """One line that names the code which ended the process."""
    # The W&B client puts a function of its own in front of sys.exit.
    passing = (__file__, f"wandb{os.sep}sdk{os.sep}lib{os.sep}exit_hooks.py")
    places = [at for at in traceback.extract_tb(error.__traceback__) if not at.filename.endswith(passing)]
    where = f" in {places[-1].filename}, line {places[-1].lineno}" if places else ""
    return f"the environment or a library ended the process with status {error.code or 0}{where}"
