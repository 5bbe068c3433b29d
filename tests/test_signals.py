"""Signals that ask a process to end reach this process, and only when they should."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from conftest import until

from rltemplate.interfaces import SignalHandler, stop_signals, stop_signals_wait
from rltemplate.train import Stop


@pytest.mark.parametrize("guarded", [True, False])  # the inverse
def test_a_child_of_an_environment_can_be_ended_by_a_signal(guarded: bool) -> None:
    """As `terminate` of multiprocessing does, which then waits for the child."""
    heard, (reader, writer) = list[int](), os.pipe()

    def handler(number: int, _: object) -> None:
        heard.append(number)

    with stop_signals(SignalHandler(handler) if guarded else handler):
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


def test_a_signal_that_waits_for_a_compiler_is_answered_at_once() -> None:
    """And reaches no program that is started meanwhile, as Ctrl-C on a terminal would."""
    said = list[str]()
    stop = Stop(said.append)
    with stop_signals(SignalHandler(stop.request, stop.answer)):
        with stop_signals_wait():
            program = subprocess.Popen(["sleep", "0.5"])
            for pid in (program.pid, os.getpid()):
                os.kill(pid, signal.SIGINT)
            until(lambda: bool(said), 5.0)
            assert not stop.requested()
            assert program.wait() == 0
        assert stop.requested()
    assert said == ["SIGINT: the run ends after this iteration, once it is compiled"]
    began = time.monotonic()
    for _ in range(20):
        with stop_signals_wait():
            pass
    assert time.monotonic() - began < 2.0  # no call waits for the thread
