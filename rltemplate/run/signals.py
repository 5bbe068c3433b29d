"""Signals that ask a run to end: a flag that the training loop reads."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from rltemplate.types import STOP_SIGNALS

# A scheduler signals all processes of a job, and one of them may pass the signal on to another: a repetition
# within this time is the same request, unless Ctrl-C was pressed twice.
_SAME_REQUEST_S = 2.0


class Stop:
    """A request to end after the present iteration; a later one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests while the block runs; an ignored signal (nohup) stays ignored."""
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._request) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """Exit status of a process that was asked to end: 130 for Ctrl-C, 143 for all other signals."""
        return 128 + (signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
            # A second Ctrl-C ends even a process that is busy outside of Python.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        elif now - self._since > _SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
