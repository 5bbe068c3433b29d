"""Seconds from a command to the first environment step of its run, measured from outside.

The command is the user's own, with its checks, its git snapshot and its files. Iterations are made as short
as they can be, one step of the environments: the first line of the trace tells when that step was made.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.works import MeasurementError
from rltemplate.run import paths
from rltemplate.run.git.snapshot import GitRecord, Snapshot, withdraw_run
from rltemplate.run.job import PROJECT
from rltemplate.run.record import read_record

# Overrides that make an iteration one step of the environments. Of another algorithm it is a whole iteration.
ONE_STEP = {
    "ppo": ("algo.num_steps=1", "algo.num_minibatches=1", "algo.update_epochs=1"),
    "sac": ("algo.steps_per_iteration=1",),
}
_LOOK_EVERY_S = 0.002


class Start(NamedTuple):
    """Seconds until the first environment step: on the clock, and of the processor."""

    wall_s: float
    cpu_s: float


def time_to_first_step(
    words: Sequence[str] = (), command: Sequence[str] | None = None, project: Path = PROJECT
) -> Start:
    """Start a run with these overrides, and kill it after its first step. It leaves nothing behind.

    `command` stands before the words: without it `python scripts/train.py`; `("make", "train")` adds the time
    of make. Raises MeasurementError with what it said if the command ends before its first step.
    """
    algo = dict(word.partition("=")[::2] for word in words).get("algo", "ppo")
    before = command or (sys.executable, str(project / "scripts" / "train.py"))
    with tempfile.TemporaryDirectory() as scratch:
        run_dir, said = Path(scratch) / "run", Path(scratch) / "said"
        line = [*before, *ONE_STEP.get(algo, ()), *words, f"run_dir={run_dir}"]
        with said.open("wb") as out:
            began = time.perf_counter()
            process = subprocess.Popen(
                line, cwd=project, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        trace = run_dir / paths.TRACE
        while not (trace.exists() and trace.stat().st_size) and not _ended(process.pid):
            time.sleep(_LOOK_EVERY_S)
        wall_s, started = time.perf_counter() - began, trace.exists()
        if started:  # the run alone: make, which may stand above it, ends by itself then and has its times
            os.kill(read_record(run_dir)["pid"], signal.SIGKILL)
        _, _, used = os.wait4(process.pid, 0)
        if not started:
            lines = said.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            told = next((line for line in lines if line.startswith("error: ")), lines[-1])
            raise MeasurementError(f"the command ended before its first step: {told}")
        withdraw_run(Snapshot(top=str(project)), GitRecord(**read_record(run_dir)["git"]))
    return Start(wall_s, used.ru_utime + used.ru_stime)


def _ended(pid: int) -> bool:
    """True if the process is over. It is left as it is, so that its times can still be asked for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
