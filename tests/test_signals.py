"""Signals that ask a process to end reach this process, and only when they should."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, run

from runlab.config.command_args import exit_status
from runlab.errors import RunError
from runlab.signals import SignalHandler, stop_signals, stop_signals_wait


@pytest.mark.parametrize("guarded", [True, False])  # the inverse
def test_a_child_of_an_environment_can_be_ended_by_a_signal(guarded: bool) -> None:
    """As `terminate` of multiprocessing does, which then waits for the child."""
    heard, (reader, writer) = list[int](), os.pipe()

    class Heard(SignalHandler):
        def handle(self, number: int) -> None:
            heard.append(number)

    handler = Heard()
    with stop_signals(handler if guarded else lambda number, _: handler.handle(number)):
        if (child := os.fork()) == 0:
            os.write(writer, b"1")  # Python drops signals that arrive in the fork itself
            time.sleep(1.0)
            os._exit(7)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (-signal.SIGTERM if guarded else 7)
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_asked_to_end_removes_its_temporary_files(number: int, status: int) -> None:
    """The signal may come twice: from a terminal, and from a program around the command."""
    made = list[Path]()

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as cleaning:
            made.append(Path(folder))
            cleaning.callback(os.kill, os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), number)
            time.sleep(5.0)

    assert exit_status(work) == status
    assert not made[0].exists()


def test_an_error_of_a_library_that_was_interrupted_is_none_of_the_command() -> None:
    def work() -> None:
        with contextlib.ExitStack() as half_made:
            half_made.callback(getattr, None, "cache")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5.0)

    assert exit_status(work) == 128 + signal.SIGTERM


def test_what_a_command_could_not_do_is_said_after_a_signal_too(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5.0)
        finally:
            raise RunError("the record cannot be written")

    assert exit_status(work) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "error: the record cannot be written\n"


def test_a_command_works_in_a_thread() -> None:
    """Of a notebook or a server, for example. Signals stay with the main one."""
    before, statuses = signal.getsignal(signal.SIGTERM), list[int]()
    thread = threading.Thread(target=lambda: statuses.append(exit_status(lambda: 3)))
    thread.start()
    thread.join()
    assert (statuses, signal.getsignal(signal.SIGTERM)) == ([3], before)


COMPILES = """
import os, signal, subprocess, time
from runlab.signals import SignalHandler, stop_signals, stop_signals_wait

said, handled = [], []
handler = SignalHandler()
handler.handle, handler.answer = handled.append, said.append
with stop_signals(handler):
    with stop_signals_wait():
        program = subprocess.Popen(["sleep", "0.5"])
        for pid in (program.pid, os.getpid()):
            os.kill(pid, signal.SIGINT)
        limit = time.monotonic() + 5.0
        while not said and time.monotonic() < limit:
            time.sleep(0.01)
        assert not handled
        assert program.wait() == 0
assert said == handled == [signal.SIGINT]
"""


def test_a_signal_that_waits_for_a_compiler_is_answered_at_once(tmp_path: Path) -> None:
    """And reaches no program that is started meanwhile, as Ctrl-C on a terminal would.

    In a process of its own: a thread of another library would take the signal.
    """
    run(tmp_path, sys.executable, "-c", COMPILES, status=0, PYTHONPATH=str(ROOT))
    began = time.monotonic()
    for _ in range(20):
        with stop_signals_wait():
            pass
    assert time.monotonic() - began < 2.0  # no call waits for the thread
