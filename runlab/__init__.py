"""The machinery of research in reinforcement learning: every run can be traced, resumed and made again.

It serves the project that pyproject.toml declares, and imports nothing of it (config/project.py). Importing
the package imports nothing heavy: neither torch nor Hydra.
"""

import contextlib
import gc
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

__version__ = "0.1.0"
PROJECT = Path(__file__).resolve().parents[1]  # the folder whose repository has the code of a run
INSTALLED = not (PROJECT / "pyproject.toml").is_file()  # from a wheel: that code is in the working folder
with contextlib.suppress(OSError):  # it was deleted
    if INSTALLED:
        PROJECT = Path.cwd()
        sys.path.append(str(PROJECT))  # last, so that no file there hides a module


def _open_standard_streams() -> None:
    """Open standard streams that the parent closed (`>&-`): the next opened file would get their number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)  # `lossy` drops it


class _Lossy(io.FileIO):
    """A file that takes whatever is written to it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def lossy(stream: TextIO) -> TextIO:
    """A stream to the same place, where a closed console or a full disk costs text and nothing else.

    Other streams raise, in code of others too, and let Python end with status 120.
    """
    raw = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
    errors, lines = stream.errors or "backslashreplace", stream.isatty() or stream is sys.stderr
    return io.TextIOWrapper(raw, stream.encoding, errors, line_buffering=lines)


_open_standard_streams()
# Started as `python -m runlab...` or as the installed program.
if os.path.basename(sys.argv[0]) in ("-m", __name__):  # noqa: PTH119
    # A launcher may block signals while it starts a process, which inherits that and would never hear Ctrl-C.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.stderr = lossy(sys.stderr)  # nothing but notes and errors; the exit status tells of these too
    # Importing torch is going to take a second. Until a command begins, Ctrl-C ends the process without a
    # traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Imported modules are not garbage: searching them for garbage takes a sixth of the start.
    gc.set_threshold(50_000, 100)
