"""Temporary folders that do not stay for ever where their process was killed: the next one removes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "rltemplate-"
_LOCK = ".in-use"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder of this process alone, which is gone after the block."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        begun = Path(name) / f"{_LOCK}.begun"
        with begun.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            begun.rename(begun.with_name(_LOCK))  # found by others from now on, when it is held
            yield Path(name)


def _remove_abandoned(where: Path) -> None:
    """Remove what processes have left that are gone: the kernel has taken their locks back."""
    for path in where.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # in use, another user's, or already being removed
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(fd)
