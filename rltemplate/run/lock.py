"""One process at a time writes a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from pathlib import Path

from rltemplate.run.paths import LOCK
from rltemplate.types import ConfigError


class RunLock:
    """Held from `acquire` on until the process ends, however it ends.

    A POSIX record lock: the kernel takes it back from a process that was killed, worker processes do not
    inherit it, and it works on network file systems that know locks.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises ConfigError in a line if another process has it or nothing can be written."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{self._path.parent} cannot be written: {error.strerror}") from error
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            os.close(fd)
            raise ConfigError(
                f"{self._path.parent} is in use, by {holder or 'a process'}; wait, or end that first"
            ) from None
        except OSError:  # a file system without locks: every process gets it
            pass
        self._fd = fd
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)

    def moved_to(self) -> str | None:
        """New place of the locked folder; empty if it is gone or cannot be found, None if it did not move."""
        if self._fd is None:
            return None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), self._path.stat()):
                return None
        with contextlib.suppress(OSError):  # only Linux tells
            now = Path(f"/proc/self/fd/{self._fd}").readlink()
            if now.exists():
                return str(now.parent)
        return ""

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
