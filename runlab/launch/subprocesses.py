"""Child processes that do a part of the work: started, watched, and ended with all processes they started.

Each has its own session. Ctrl-C on a terminal reaches only this process, which then ends its children.
Processes that a child leaves behind are ended as one group.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from runlab.signals import reported, stop_signals

PARENT_VARIABLE = "RUNLAB_PARENT"  # of a child: the process that waits for it, and the signal at its end
_PATIENCE_S = 120.0  # for a child that has done enough, to end its iteration
_POLL_EVERY_S = 0.02
_ERROR = "error:"  # begins the message of a child that gives up


class Interrupted(Exception):
    """A signal asked this process to end; its child is gone. `number` is SIGINT or SIGTERM."""

    def __init__(self, number: int) -> None:
        self.number = number


class Children:
    """Child processes. A signal ends the running ones, and no more are started."""

    def __init__(self) -> None:
        self._received: list[int] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Collect signals that ask a process to end while the block runs."""
        with stop_signals(lambda number, _: self._received.append(reported(number))):
            yield

    def check(self) -> None:
        """Raise `Interrupted` if there was a signal."""
        if self._received:
            raise Interrupted(self._received[0])

    def stop(self) -> None:
        """End all as after a signal."""
        self._received = self._received or [signal.SIGTERM]

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        cwd: Path | None = None,
        enough: Callable[[], bool] = lambda: False,
        grace_s: float = 8.0,
    ) -> int:
        """Run a command to its end, or until `enough` is true; its exit status, as a shell gives it.

        Its output goes to `log`. The first signal asks it to end within `grace_s` seconds, and a second one
        kills it. Then this raises `Interrupted`.
        """
        self.check()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**environment, PARENT_VARIABLE: f"{os.getpid()} {signal.SIGTERM.value}"},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        asked_at = math.inf
        try:
            while process.poll() is None and len(self._received) < 2:
                if asked_at == math.inf and (self._received or enough()):
                    process.terminate()
                    asked_at = time.monotonic()
                if time.monotonic() - asked_at > (grace_s if self._received else _PATIENCE_S):
                    break
                time.sleep(_POLL_EVERY_S)
        finally:
            # Also the processes that it left behind, such as workers of its environments.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        self.check()
        return code if code >= 0 else 128 - code


def end_with_parent() -> None:
    """Let Linux send this process, a child, a signal when the one that waits for it is killed."""
    parent, _, number = os.environ.pop(PARENT_VARIABLE, "").partition(" ")
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG
        if parent != str(os.getppid()):
            sys.exit(128 + int(number))


def lines_of(log: Path) -> list[str]:
    """The output of a process without empty and drawn lines; nothing if there is no such file."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]


def complaint(log: Path) -> str:
    """The last error message of a process, in a line or two; empty if it printed none."""
    lines = lines_of(log)
    last = max((i for i, line in enumerate(lines) if line.startswith(_ERROR)), default=len(lines))
    return "\n".join(lines[last:]).removeprefix(_ERROR).strip()


def last_words(log: Path, exit_status: int) -> str:
    """The reason why a process ended, in a line: a signal, an error, or its last line of output."""
    if exit_status > 128:
        return f"ended by signal {exit_status - 128}"
    lines = complaint(log).splitlines() or lines_of(log)[-1:]
    return lines[0] if lines else f"exit status {exit_status}"
