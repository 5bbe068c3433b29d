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
from pathlib import Path

from bench.works import MeasurementError, Work
from rltemplate.run import paths
from rltemplate.run.git.snapshot import GitRecord, Snapshot, withdraw_run
from rltemplate.run.paths import PROJECT
from rltemplate.run.record import read_record

# Overrides that make an iteration one step of the environments.
ONE_STEP = {
    "ppo": ["algo.num_steps=1", "algo.num_minibatches=1", "algo.update_epochs=1"],
    "sac": ["algo.steps_per_iteration=1"],
}


def time_to_first_step(work: Work) -> dict[str, float]:
    """Start a run, and kill it after its first step: seconds on the clock, and of the processor."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir, said = Path(scratch) / "run", Path(scratch) / "said"
        words = [f"algo={work.algo}", f"env={work.env}", *ONE_STEP[work.algo], f"run_dir={run_dir}"]
        with said.open("wb") as out:
            began = time.perf_counter()
            command = [sys.executable, "scripts/train.py", *words]
            process = subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        trace = run_dir / paths.TRACE
        while not (trace.exists() and trace.stat().st_size) and not _ended(process.pid):
            time.sleep(0.002)
        wall_s, started = time.perf_counter() - began, trace.exists()
        if started:
            os.kill(read_record(run_dir)["pid"], signal.SIGKILL)
        _, _, used = os.wait4(process.pid, 0)
        if not started:
            lines = said.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise MeasurementError(f"the command ended before its first step: {lines[-1]}")
        withdraw_run(Snapshot(top=str(PROJECT)), GitRecord.from_dict(read_record(run_dir)["git"]))
    return {"wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime}


def _ended(pid: int) -> bool:
    """True if the process is over, whose times can still be asked for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
