"""Signals that ask a process to end: who hears them, when, and the answer of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# Ctrl-C, termination, a closed terminal, and the warnings of schedulers before they end a job.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_EVERY_S = 0.2  # for signals that wait
# A scheduler signals all processes of a job, and one of them may pass the signal on to another: a repetition
# within this time is the same request, unless Ctrl-C was pressed twice.
_SAME_REQUEST_S = 2.0


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handler` for `STOP_SIGNALS` while the block runs; an ignored signal (nohup) stays ignored.

    In a thread it changes nothing: Python hears signals in the main one alone.
    """
    in_main = threading.current_thread() is threading.main_thread()
    heard = [each for each in STOP_SIGNALS if in_main and signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def reported(number: int | None) -> signal.Signals:
    """SIGINT for Ctrl-C, and SIGTERM for any other signal: exit statuses tell only these two apart."""
    return signal.SIGINT if number == signal.SIGINT else signal.SIGTERM


def end_at_once(number: int) -> None:
    """End this process by a signal, as if it were not handled."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class SignalHandler:
    """A handler for this process alone, which does nothing; a process that is forked from it is ended.

    A child process inherits handlers, and an environment that asks its children to end would wait for ever.
    """

    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.handle(number)
        else:
            end_at_once(number)

    def handle(self, number: int) -> None:
        """Act on a signal."""

    def answer(self, number: int) -> None:
        """Say that a signal was heard for which `handle` has to wait (`stop_signals_wait`)."""


class Interrupt(SignalHandler):
    """Raises KeyboardInterrupt, so that temporary files are removed. Later signals end the process at once.

    `exit_status` is the one after the first signal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heard, self.exit_status, self._since = False, 128 + signal.SIGINT, 0.0

    def handle(self, number: int) -> None:
        if not self.heard:
            self.heard, self.exit_status, self._since = True, 128 + reported(number), time.monotonic()
            raise KeyboardInterrupt
        if number == signal.SIGINT or time.monotonic() - self._since > _SAME_REQUEST_S:
            end_at_once(number)


@contextlib.contextmanager
def stop_signals_wait() -> Iterator[None]:
    """Let `STOP_SIGNALS` wait for the end of the block; the first one is answered at once, in a thread.

    Programs that are started in the block, such as a compiler, inherit that Ctrl-C does not reach them.
    """
    before, over = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS), threading.Event()

    def answer() -> None:
        while not over.wait(_LOOK_EVERY_S):
            for number in signal.sigpending().intersection(STOP_SIGNALS):
                if isinstance(handler := signal.getsignal(number), SignalHandler):
                    handler.answer(number)
                    return

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Stop(SignalHandler):
    """A request to end a run after the present iteration; a later one ends the process at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` gets a line at the first request: an iteration may take a while."""
        super().__init__()
        self.signal: int | None = None
        self._say, self._since, self._answered = say, 0.0, False

    def requested(self) -> bool:
        """True once the run has been asked to end."""
        return self.signal is not None

    def exit_status(self) -> int:
        """The exit status of a run that was asked to end."""
        return 128 + reported(self.signal)

    def answer(self, number: int, when: str = "once it is compiled") -> None:
        if not self._answered:
            self._answered = True
            self._say(f"{signal.Signals(number).name}: the run ends {when}")

    def handle(self, number: int) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
            # A second Ctrl-C ends even a process that is busy outside of Python.
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            again = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self.answer(number, f"after this iteration; another {again} ends it at once")
        elif now - self._since > _SAME_REQUEST_S:
            end_at_once(number)
