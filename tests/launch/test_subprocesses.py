"""Child processes end when they should, with all that they have started, and their last words are found."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import ROOT, alive, until

from runlab.launch import subprocesses
from runlab.launch.subprocesses import PARENT_VARIABLE, Children, Interrupted, complaint, last_words, lines_of

# Prints its number, then works until it is ended; the other one has to be killed.
STEADY = "import os, time; print(os.getpid(), flush=True)\nwhile True: time.sleep(0.05)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {STEADY}"
LEAVES_ONE_BEHIND = (
    "import subprocess, sys\n"
    f"other = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], stdout=subprocess.PIPE)\n"
    "sys.stdout.buffer.write(other.stdout.readline())"
)


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


def assert_gone(log: Path) -> None:
    """The process whose number is in a log is gone; a signal takes its time."""
    until(lambda: not alive(lines_of(log)[0]), 2.0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_a_process_ends_with_its_status_or_when_there_is_enough_and_with_all_it_started(
    log: Path,
) -> None:
    run = Children().run
    program = "import sys; print('data', flush=True); print('trouble', file=sys.stderr); raise SystemExit(3)"
    assert run(python(program), os.environ, log) == 3
    assert lines_of(log) == ["data", "trouble"]
    assert run(python(LEAVES_ONE_BEHIND), os.environ, log) == 0
    assert_gone(log)
    log.unlink()
    status = run(python(STEADY), os.environ, log, enough=lambda: bool(lines_of(log)))
    assert status == 128 + signal.SIGTERM
    assert_gone(log)


@pytest.mark.parametrize(
    ("program", "numbers"),
    [
        (STEADY, [signal.SIGUSR2]),  # under nohup, SIGHUP is ignored
        (STUBBORN, [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]),  # ignored, asks, kills
    ],
)
def test_signals_end_the_child_and_then_the_work(
    log: Path, program: str, numbers: list[signal.Signals]
) -> None:
    def send() -> None:
        until(lambda: bool(lines_of(log)))
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    children, began = Children(), time.monotonic()
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        with children.listening():
            with pytest.raises(Interrupted) as caught:
                children.run(python(program), os.environ, log)
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)  # later tests would ignore it, too
    assert caught.value.number == signal.SIGTERM  # as the exit status tells any signal but Ctrl-C
    assert_gone(log)
    seconds = time.monotonic() - began
    assert 0.3 * (len(numbers) - 1) < seconds < 7.0, "not at once, and not after the time that one has"
    with pytest.raises(Interrupted):
        children.run(python("pass"), os.environ, log.with_name("later"))
    assert not log.with_name("later").exists()


def test_last_words(log: Path) -> None:
    assert last_words(log, 4) == "exit status 4"
    log.write_text("error: an old one\nerror: a=1: is wrong\nuse a=2\n")
    assert (last_words(log, 2), complaint(log)) == ("a=1: is wrong", "a=1: is wrong\nuse a=2")
    assert last_words(log, 128 + signal.SIGSEGV) == "ended by signal 11"
    log.write_text("Traceback\n\nValueError: error: it\n\n-----\n")
    assert (last_words(log, 1), complaint(log)) == ("ValueError: error: it", "")


def test_a_child_gets_the_signal_that_it_asked_for_when_its_parent_is_killed() -> None:
    child = f"from runlab.launch.subprocesses import end_with_parent\nend_with_parent()\n{STUBBORN}"
    parent = f"import os, subprocess, sys\nos.environ[{PARENT_VARIABLE!r}] = f'{{os.getpid()}} 9'\n"
    command = [sys.executable, "-c", f"{parent}subprocess.run([sys.executable, '-c', {child!r}])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = process.stdout.readline()
        process.kill()
    until(lambda: not alive(pid), 2.0)


@pytest.mark.parametrize("program", ["launch/worker", "rerun/prove", "rerun/replay"])
def test_every_program_that_is_started_as_a_child_ends_with_its_parent(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocesses, "ctypes", Mock())  # or this process would end with its own parent
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # a program may replace it
    monkeypatch.setenv(PARENT_VARIABLE, "0 9")  # of a parent that is gone
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"{ROOT}/runlab/{program}.py", run_name="__main__")
    assert ended.value.code == 128 + 9
