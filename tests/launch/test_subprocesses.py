"""Child processes end when they should, with all that they have started, and their last words are found."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import alive

from rltemplate.launch.subprocesses import (
    Children,
    Interrupted,
    complaint,
    last_words,
    lines_of,
)

MOMENT_S = 30.0  # as long as a busy machine may take for what takes a tenth of a second
# Tells its number, then works until it is ended; the other one has to be killed.
STEADY = "import os, time; print(os.getpid(), flush=True)\nwhile True: time.sleep(0.05)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {STEADY}"


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


def run(
    log: Path, program: str, *, out: Path | None = None, enough: Callable[[], bool] = lambda: False
) -> int:
    return Children().run(python(program), os.environ, log, out=out, enough=enough)


def is_gone(log: Path) -> bool:
    """Whether the process that has told of itself in a log is gone, or so within a moment."""
    pid = pid_in(log)
    assert pid is not None
    until = time.monotonic() + 2.0
    while alive(pid) and time.monotonic() < until:  # a signal takes its time
        time.sleep(0.01)
    return not alive(pid)


def pid_in(log: Path) -> int | None:
    """What a process has told of itself, once it has."""
    lines = lines_of(log)
    return int(lines[0]) if lines else None


def signals_to_come(log: Path, *numbers: signal.Signals, apart_s: float = 0.3) -> threading.Thread:
    """Signals to this process, as soon as its child is there."""

    def send() -> None:
        until = time.monotonic() + MOMENT_S
        while pid_in(log) is None and time.monotonic() < until:
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(apart_s)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


# --- How they end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ],
)
def test_the_exit_status_is_that_of_a_shell(log: Path, program: str, status: int) -> None:
    assert run(log, program) == status


def test_both_outputs_are_in_the_log_unless_one_has_a_file_of_its_own(log: Path, tmp_path: Path) -> None:
    program = "import sys; print('data', flush=True); print('trouble', file=sys.stderr)"
    run(log, program)
    assert lines_of(log) == ["data", "trouble"]
    run(log, program, out=tmp_path / "out")
    assert (lines_of(log), lines_of(tmp_path / "out")) == (["trouble"], ["data"])


def test_what_a_process_leaves_behind_is_ended_with_it(log: Path) -> None:
    program = (
        "import subprocess, sys\n"
        f"other = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], stdout=subprocess.PIPE)\n"
        "sys.stdout.buffer.write(other.stdout.readline())"
    )
    assert run(log, program) == 0
    assert is_gone(log)


def test_one_that_has_done_enough_is_asked_to_end(log: Path) -> None:
    asked: list[bool] = []

    def enough() -> bool:
        asked.append(pid_in(log) is not None)
        return asked[-1]

    assert run(log, STEADY, enough=enough) == 128 + signal.SIGTERM
    assert asked[-1]
    assert asked.count(True) == 1
    assert is_gone(log)


# --- Signals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_child_and_then_the_work(log: Path, number: signal.Signals) -> None:
    children, handler = Children(), signal.getsignal(number)
    thread = signals_to_come(log, number)
    with children.listening(), pytest.raises(Interrupted) as caught:
        children.run(python(STEADY), os.environ, log)
    thread.join()
    assert caught.value.number == number
    assert number.name in str(caught.value)
    assert is_gone(log)
    assert signal.getsignal(number) is handler
    # The others are not started.
    later = log.with_name("later")
    with pytest.raises(Interrupted):
        children.run(python("pass"), os.environ, later)
    assert not later.exists()


def test_a_second_signal_kills_one_that_will_not_end(log: Path) -> None:
    children, began = Children(), time.monotonic()
    thread = signals_to_come(log, signal.SIGTERM, signal.SIGTERM)
    with children.listening():
        with pytest.raises(Interrupted):
            children.run(python(STUBBORN), os.environ, log)
        thread.join()
    assert 0.3 < time.monotonic() - began < 7.0, "not at once, and not after the time that one has"
    assert is_gone(log)


def test_a_signal_that_is_ignored_stays_so(log: Path) -> None:
    children, before = Children(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with children.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert children.run(python("pass"), os.environ, log) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# --- Last words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "status", "words", "named"),
    [
        ("a warning\nerror: no such key\n", 2, "no such key", "no such key"),
        ("error: an old one\nerror: a=1: is wrong\nuse a=2\n", 2, "a=1: is wrong", "a=1: is wrong\nuse a=2"),
        ("Traceback\n\nValueError: error: it\n", 1, "ValueError: error: it", ""),
        ("error: no such key\n", 128 + signal.SIGSEGV, "ended by signal 11", "no such key"),
        (None, 4, "exit status 4", ""),
    ],
)
def test_last_words(log: Path, said: str | None, status: int, words: str, named: str) -> None:
    if said is not None:
        log.write_text(said)
    assert last_words(log, status) == words
    assert complaint(log) == named
