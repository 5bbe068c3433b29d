"""Files to which whole lines are added. Trouble with the disk costs none, as long as memory can hold them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path


class LineFile:
    """Appends lines to a file, each of which survives the death of the process whole.

    Never raises for trouble of the machine. While the file cannot be written (disk full, folder gone,
    permission taken) lines wait in memory, at most `max_waiting` of them, and are written with the first
    one that succeeds again. A file that was deleted is created anew with all its lines. `warn` gets one
    line when trouble begins and one when it is over.
    """

    def __init__(self, path: Path, max_waiting: int = 100_000) -> None:
        self.path = path
        self.warn: Callable[[str], None] = to_stderr
        self._waiting: deque[bytes] = deque(maxlen=max_waiting)
        self._dropped = 0
        self._failing = False
        self._fd: int | None = None

    def write(self, line: str) -> None:
        """Append `line`, or several with ends between them, whole or not at all."""
        self._dropped += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(line.encode() + b"\n")
        self._write_waiting()

    def sync(self) -> None:
        """Have all lines on the disk, so that they outlive the machine too."""
        self._write_waiting()
        if self._fd is not None:
            with contextlib.suppress(OSError):  # the next line will tell
                os.fsync(self._fd)

    def close(self) -> None:
        """Try once more to write the waiting lines; says how many are lost if that fails."""
        self._write_waiting()
        if lost := len(self._waiting) + self._dropped:
            self.warn(f"{self.path}: {lost} lines could not be written and are lost")
        self._close_fd()

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                _append_whole(self._open(), self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._failing:
                self.warn(f"{self.path} cannot be written ({error.strerror or error}); lines wait in memory")
            self._failing = True
            return
        if self._failing:
            lost = f"{self._dropped} lines are lost" if self._dropped else "no line is lost"
            self.warn(f"{self.path} can be written again, {lost}")
            self._failing, self._dropped = False, 0

    def _open(self) -> int:
        """The descriptor of the file that is at `path` now; the lines of a deleted one wait to be written."""
        if self._fd is not None:
            try:
                if os.path.samestat(os.fstat(self._fd), self.path.stat()):
                    return self._fd
            except FileNotFoundError:
                with os.fdopen(os.dup(self._fd), "rb") as deleted:
                    deleted.seek(0)
                    self._waiting.appendleft(deleted.read())
                self.warn(f"{self.path} was deleted and is written anew, with all its lines")
            self._close_fd()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _drop_torn_line(self._fd)
        return self._fd

    def _close_fd(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def _append_whole(fd: int, data: bytes) -> None:
    """All of `data` or nothing: the part that a full disk took is taken back."""
    size = os.fstat(fd).st_size
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


def _drop_torn_line(fd: int) -> None:
    """Cut off a last line without its end, as a power failure leaves it, so that new rows start a line."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.ftruncate(fd, os.pread(fd, size, 0).rfind(b"\n") + 1)


def replace_text(path: Path, lines: Iterable[str]) -> None:
    """Put other lines into a file in one step, so that a crash leaves the old or the new ones."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_stderr(text: str) -> None:
    """Write `text` to standard error, unless that is closed."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
