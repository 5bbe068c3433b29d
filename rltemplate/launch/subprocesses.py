"""Processes of ours that do a part of the work: started, watched, and ended with all that they have started.

Each has a session of its own. Ctrl-C on a terminal therefore reaches this process alone, which ends the one
that runs; and what that one has left behind can be ended as one group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from rltemplate.types import STOP_SIGNALS

REFUSED = 2  # the exit status of a process of ours that was asked for what cannot be had

_GRACE_S = 8.0  # for one that is asked to end because the user wants to go
_PATIENCE_S = 120.0  # for one that has done enough and is to end its iteration
_LOOK_EVERY_S = 0.02
_ERROR = "error:"  # begins what a process of ours says to the user when it gives up

# Ends by itself when its parent is gone, however that ended.
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100_000))"


class Interrupted(Exception):
    """A signal asked this process to end; its child is gone.

    `number` is the signal's, `notes` are for the user, such as what is left.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number
        self.notes: list[str] = []


class Children:
    """One process after the other; a signal ends the one that runs, and the work that they are for."""

    def __init__(self) -> None:
        self._heard: list[int] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals that ask a process to end as requests while the block runs; what is ignored stays so.

        Only in the main thread, as Python has it.
        """
        numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._heard.append(number)

    def check(self) -> None:
        """Raise `Interrupted` if there was a signal."""
        if self._heard:
            raise Interrupted(self._heard[0])

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        out: Path | None = None,
        cwd: Path | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> int:
        """Run a command to its end, or until `enough` says so; its exit status, as a shell gives it.

        What it says goes to `log`, but for its standard output if there is another file for that. Raises
        `Interrupted` after a signal.
        """
        self.check()
        with contextlib.ExitStack() as files:
            errors = files.enter_context(log.open("wb"))
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=errors if out is None else files.enter_context(out.open("wb")),
                stderr=errors,
                start_new_session=True,
            )
        try:
            while process.poll() is None and not self._heard:
                if enough():
                    self._end(process, _PATIENCE_S)
                    break
                time.sleep(_LOOK_EVERY_S)
            if self._heard:
                self._end(process, _GRACE_S)
        finally:
            # Also what it has left behind, such as processes of its environments.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        self.check()
        return code if code >= 0 else 128 - code

    def _end(self, process: subprocess.Popen[bytes], patience_s: float) -> None:
        """Ask once, and wait; another signal cuts that short."""
        process.terminate()
        until, heard = time.monotonic() + patience_s, len(self._heard)
        while process.poll() is None and time.monotonic() < until and len(self._heard) == heard:
            time.sleep(_LOOK_EVERY_S)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """A process that does nothing but compute while the block runs."""
    command = [sys.executable, "-I", "-S", "-c", _BUSY, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


# --- What they said --------------------------------------------------------------------------------------


def lines_of(log: Path) -> list[str]:
    """All that a process has written, without empty lines; nothing if there is no such file."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line.strip() for line in text.splitlines() if line.strip()]


def complaint(log: Path) -> str:
    """The error with which a process gave up, in a line or two; empty if it named none."""
    lines = lines_of(log)
    last = max((i for i, line in enumerate(lines) if line.startswith(_ERROR)), default=len(lines))
    return "\n".join(lines[last:]).removeprefix(_ERROR).strip()


def last_words(log: Path, exit_status: int) -> str:
    """Why a process ended, in a line: by a signal, with an error, or with whatever it said last."""
    if exit_status > 128:
        return f"ended by signal {exit_status - 128}"
    said = complaint(log).splitlines() or lines_of(log)[-1:]
    return said[0] if said else f"exit status {exit_status}"
