"""The launcher of a sweep: a process beside the one that looks after it, and the signals for its jobs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rltemplate.launch.process import INHERITED_VARIABLE, SESSION_VARIABLE, SWEEP_VARIABLE
from rltemplate.run.job import PROJECT
from rltemplate.types import STOP_SIGNALS

# What launchers change in the environment of their workers, and a single run would not have.
_CHANGED_BY_LAUNCHERS = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS", "ENABLE_IPC"),
    *("KMP_INIT_AT_FORK", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"),
)


def catch_signals() -> list[int]:
    """Collect signals that ask a process to end, from before there is a launcher; ignored ones stay so."""
    received: list[int] = []
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(number))
    return received


def fork_launcher(folder: Path, session: int) -> int:
    """Split off the process in which Hydra's launcher works; its id, and 0 inside of it.

    It leaves the process group of the terminal, and takes workers and runs with it: Ctrl-C would otherwise
    kill the workers that wait for the runs. Now only the supervisor hears it, and asks the runs to end.
    """
    inherited = {name: os.environ.get(name) for name in _CHANGED_BY_LAUNCHERS}
    sys.stdout.flush()
    sys.stderr.flush()
    # The supervisor alone has the end that is written to, which closes with it however it ends.
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reading)
        return pid
    os.setpgid(0, 0)
    os.close(writing)

    def end_without_supervisor() -> None:
        os.read(reading, 1)
        print(f"sweep {folder.name} has lost its supervisor: its runs are ended", file=sys.stderr)
        ask(stop_file(folder, session), signal.SIGTERM)

    threading.Thread(target=end_without_supervisor, daemon=True).start()
    for number in STOP_SIGNALS:  # some schedulers signal every process; other programs do not inherit this
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    # Workers import this package to find the function that they are to call.
    path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        INHERITED_VARIABLE: json.dumps(inherited),
        SWEEP_VARIABLE: str(folder),
        SESSION_VARIABLE: str(session),
        "PYTHONPATH": os.pathsep.join(path),
    }
    return 0


def wait_for_launcher(launcher: int, received: Sequence[int], stop: Path) -> bool:
    """Wait for the launcher and pass signals on to the jobs; true if it came to its end.

    The first signal asks the runs to end, which may take them an iteration; the second reaches them again;
    the third ends everything at once.
    """
    # Needed at the end, when the files may hold other code than what runs here.
    import rltemplate.analysis.journal  # noqa: F401

    passed = 0
    while not (ended := os.waitpid(launcher, os.WNOHANG))[0]:
        for number in received[passed:]:
            passed += 1
            if passed > 2:
                os.killpg(launcher, signal.SIGKILL)
            else:  # a run knows more signals, but only two ways to say that it was asked to end
                ask(stop, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        time.sleep(0.05)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return os.waitstatus_to_exitcode(ended[1]) == 0


def stop_file(folder: Path, session: int) -> Path:
    """The signals that jobs pass on to their runs, one a line. With it, no further job starts."""
    return folder / f"stop-{session}"


def ask(stop: Path, number: int) -> None:
    with stop.open("a") as file:
        file.write(f"{int(number)}\n")


def asked(stop: Path) -> list[int]:
    return [int(line) for line in stop.read_text().split()] if stop.exists() else []
