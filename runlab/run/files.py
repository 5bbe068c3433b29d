"""Files of a run: its lock, lines that are added, and files that are replaced as a whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO

from runlab.config.terminal import drop_output, escaped
from runlab.errors import ConfigError, in_a_line
from runlab.run.paths import LOCK

# A run folder may have come from somebody else: a link in it may lead to any file of the user.
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


class InUse(ConfigError):
    """Another process has locked a folder."""


def lock(folder: Path, name: str = LOCK) -> Callable[[], None]:
    """Lock a folder for this process until the returned function is called, or the process ends.

    A POSIX record lock: the kernel releases the lock of a killed process, worker processes do not inherit it,
    and it works on network file systems with locks. Raises InUse if another process has it, and
    ConfigError if nothing can be written.
    """
    with in_a_line(f"{folder} cannot be written"):
        fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    except (BlockingIOError, PermissionError):
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
        os.close(fd)
        raise InUse(f"{folder} is in use, by {holder}; wait, or end that first") from None
    except OSError:  # no locks on this file system, or a full disk: go on without
        pass
    return partial(os.close, fd)


def in_use(folder: Path) -> bool:
    """True while another process has locked a folder, and where that cannot be found out.

    Not for a process that has locked the folder itself: POSIX would release its lock.
    """
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK)
    except OSError:
        return True
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


class LineFile:
    """Appends lines to a file. A written line survives the end of the process.

    If the disk refuses a line, it waits in memory until the disk takes lines again, and nothing is raised.
    `warn` gets one line when waiting begins and one when it ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warn: Callable[[str], None] = to_stderr
        self._waiting = bytearray()
        self._failing = False
        self._fd: int | None = None
        self._unflushed = False
        self._named = False  # its name in the folder survives a power failure

    def write(self, lines: str) -> None:
        """Append one line, or several with line ends between them."""
        self._waiting += lines.encode() + b"\n"
        self._write_waiting()

    def sync(self) -> int:
        """Flush all lines to the disk, so that they survive a power failure; warn if the disk refuses.

        Returns the size of the file including waiting lines. Raises OSError if the size cannot be read.
        """
        self._write_waiting()
        if self._fd is not None and self._unflushed:
            self._unflushed = False
            try:
                os.fsync(self._fd)
            except OSError as error:
                self.warn(f"{self.path} cannot be flushed to the disk ({error.strerror})")
            if not self._named:
                flush_folder(self.path.parent)
                self._named = True
        return (self.path.stat().st_size if self.path.exists() else 0) + len(self._waiting)

    def close(self) -> None:
        """Try once more to write the waiting lines, and flush them; warns of the lost ones if that fails."""
        with contextlib.suppress(OSError):  # the folder was moved
            self.sync()
        if lost := self._waiting.count(b"\n"):
            self.warn(f"{self.path}: {lost} lines could not be written and are lost")
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write_waiting(self) -> None:
        try:
            if self._waiting and self._fd is None:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o644)
            while self._waiting and self._fd is not None:
                self._unflushed = True
                del self._waiting[: os.write(self._fd, self._waiting)]
        except OSError as error:
            if not self._failing:
                self.warn(f"{self.path} cannot be written ({error.strerror}); lines wait in memory")
            self._failing = True
            return
        if self._failing:
            self.warn(f"{self.path} can be written again, no line is lost")
            self._failing = False


def replace_file(
    path: Path, write: Callable[[IO[bytes]], object], announce: Callable[[Path], object] | None = None
) -> None:
    """Put a file in place in one step: a crash or a power failure leaves the old or the new one, whole.

    `announce` gets the new file while the old one is still in its place.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process that had the same number
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if announce is not None:
            announce(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def move_in_place(written: Path, path: Path) -> None:
    """Put a file that another program has written in place, as `replace_file` does."""
    with written.open("rb") as file:
        os.fsync(file.fileno())
    written.replace(path)
    flush_folder(path.parent)


def make_durable_folder(path: Path) -> list[Path]:
    """Make a folder and its missing parents, so that they survive a power failure.

    Returns the new folders, each before the one around it.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush_folder(folder.parent)
    return missing


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder: a flushed file whose name is lost is lost with it."""
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def replace_text(path: Path, lines: Iterable[str]) -> None:
    """Replace the content of a text file in one step."""
    replace_file(path, lambda file: file.writelines(line.encode() for line in lines))


def strict_json(value: Any, indent: int | None = None, default: Callable[[Any], str] | None = None) -> str:
    """JSON that every parser accepts: numbers that are not finite become null; `default` as in `json`."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, default=default)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_file(path: Path, size: int) -> None:
    """Cut a file to its first bytes; raises OSError, also for a link."""
    with os.fdopen(os.open(path, os.O_WRONLY | _NO_LINK), "wb") as file:
        file.truncate(size)


def say(text: str, end: str = "\n", stream: TextIO | None = None) -> None:
    """Print a line that is no result. The work goes on if nobody reads: a pipe was closed, as in `| head`."""
    try:
        print(text, end=end, flush=True, file=stream)
    except OSError:
        drop_output()


def to_stderr(text: str) -> None:
    """Write `text` to standard error, with escapes in the place of controls, unless that is closed."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # the last: a signal in the middle of a line
        print(escaped(text), file=sys.stderr, flush=True)
