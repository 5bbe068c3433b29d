"""How long it takes from a command to the first environment step of its run, measured from outside.

The command is the user's own, with its checks, its git snapshot and all that a run writes. The iterations are
made as short as they can be, one step of the environments, so that the first line of the trace tells when
that step was made. Nothing in a run knows that it is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rltemplate.launch import PROJECT
from rltemplate.run import paths
from rltemplate.run.record import read_record
from rltemplate.run.snapshot import GitRecord, Snapshot, withdraw_run
from rltemplate.types import ConfigError, RunError

# What makes an iteration one step of the environments. Of an algorithm that is not listed the first iteration
# is counted too.
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
    """Start a run with these overrides, and end it when it has made its first step. It leaves nothing behind.

    `command` is what stands before the words: without it `python scripts/train.py`; `("make", "train")` adds
    what make takes. Processor time is what another program on the machine does not add to. Raises ConfigError
    if the command is refused, and RunError if it ends otherwise before its first step.
    """
    chosen = dict(word.partition("=")[::2] for word in words)
    before = command or (sys.executable, str(project / "scripts" / "train.py"))
    with tempfile.TemporaryDirectory() as scratch:
        run_dir, said = Path(scratch) / "run", Path(scratch) / "said"
        line = [*before, *ONE_STEP.get(chosen.get("algo", "ppo"), ()), *words, f"run_dir={run_dir}"]
        with said.open("wb") as out:
            began = time.perf_counter()
            process = subprocess.Popen(
                line, cwd=project, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            try:
                ended = _wait(process.pid, run_dir / paths.TRACE)
                wall_s = time.perf_counter() - began
                if (
                    not ended
                ):  # what stands above the run, such as make, ends then by itself, and has its times
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(read_record(run_dir)["pid"], signal.SIGKILL)
                    _wait(process.pid)
            finally:
                cpu_s = _end(process)
        if ended:
            raise _reason(process.returncode, said.read_text(errors="replace"))
        git = GitRecord.from_dict(read_record(run_dir)["git"])
        withdraw_run(Snapshot(top=str(project)), git)
    return Start(wall_s, cpu_s)


def _wait(pid: int, trace: Path | None = None) -> bool:
    """Wait for the first line of the trace, or for the end of the process: whether it was that."""
    while True:
        if trace is not None and trace.exists() and trace.stat().st_size:
            return False
        # Left as it is, so that its times can still be asked for.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return trace is None or not trace.exists()
        time.sleep(_LOOK_EVERY_S)


def _end(process: subprocess.Popen[bytes]) -> float:
    """End the process and what it has started; the seconds of the processor that they took."""
    if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        os.killpg(process.pid, signal.SIGKILL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def _reason(status: int, said: str) -> ConfigError | RunError:
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[-1:]
    text = told[0] if told else f"exit status {status}"
    # make gives 2 for everything, but only a refusal says so.
    refused = status == 2 and any(line.startswith("error: ") for line in lines)
    return ConfigError(text) if refused else RunError(f"ended before its first step: {text}")
