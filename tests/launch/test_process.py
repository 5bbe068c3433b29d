"""One run is one fresh process, with the same environment from any parent; `debug=here` needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SHRUNK, Configure

from rltemplate.config.loading import to_dict
from rltemplate.launch import command
from rltemplate.launch.command import become
from rltemplate.launch.process import STOP_VARIABLE, worker_environment
from rltemplate.run.job import JOB_VARIABLE, Job, run_folder
from rltemplate.run.record import SweepMembership
from rltemplate.types import ConfigError


@pytest.fixture(scope="session")
def job(configure: Configure) -> Job:
    sweep = SweepMembership(id="s", dir="/somewhere/s", job=3)
    values: dict[str, Any] = {"command": ["train.py", "seed=1"], "overrides": ["seed=1"], "sweep": sweep}
    return Job(config=to_dict(configure()), run_id="id", run_dir="/somewhere/id", snapshot="{}", **values)


def test_a_job_survives_the_environment_and_is_taken_out_of_it(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_VARIABLE, job.to_json())
    assert Job.from_environment() == job
    assert JOB_VARIABLE not in os.environ
    with pytest.raises(ConfigError, match=r"scripts/train\.py"):
        Job.from_environment()
    monkeypatch.setattr(command, "worker_command", lambda: [str(tmp_path / "no_such_interpreter")])
    with pytest.raises(ConfigError, match="could not be started"):
        become(job)


def test_equal_jobs_get_equal_environments_from_different_parents(job: Job, configure: Configure) -> None:
    config = configure("num_threads=3")
    plain = worker_environment(job, config, {"PATH": "/bin"})
    other = {"OMP_NUM_THREADS": "7", "PYTHONHASHSEED": "5", STOP_VARIABLE: "/s", "PYTHONPATH": str(ROOT)}
    assert worker_environment(job, config, {"PATH": "/bin", **other}) == plain
    assert (plain["OMP_NUM_THREADS"], plain["PYTHONHASHSEED"]) == ("3", "0")
    assert worker_environment(job, configure("num_threads=2"), {"PATH": "/bin"}) != plain
    path = worker_environment(job, config, {"PYTHONPATH": f"/other:{ROOT}"})["PYTHONPATH"]
    assert path == f"{ROOT}:/other"


def test_folders_are_named_after_what_the_user_chose(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder(configure(), "id", "ALE/Pong-v5") == tmp_path / "runs" / "ppo-ALE-Pong-v5" / "id"
    assert run_folder(configure("runs_dir=/x"), "id", "Hopper") == Path("/x/ppo-Hopper/id")
    assert run_folder(configure("run_dir=a/b"), "id", "Hopper") == tmp_path / "a" / "b"


@pytest.mark.long
def test_debug_here_stops_at_breakpoints_and_computes_the_same(tmp_path: Path) -> None:
    """The debugger stops inside of the algorithm; without `debug=here` it loses the process before that."""
    small = [*SHRUNK["ppo"], "total_env_steps=64", "eval_every=0", "video_every=0", "logger=none"]
    place = "rltemplate.algos.ppo"
    questions = f"import {place}\nb {place}.compute_gae\nc\np 6 * 7, gamma\nclear 1\nc\nq\n"

    def train(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "pdb", str(ROOT / "scripts" / "train.py"), *small, *words]
        return subprocess.run(line, cwd=tmp_path, input=questions, capture_output=True, text=True)

    assert "(42, 0." in train("debug=here", "run_dir=here").stdout
    assert "(42, 0." not in train("run_dir=away").stdout
    traces = [(tmp_path / name / "trace.jsonl").read_bytes() for name in ("here", "away")]
    assert traces[0] == traces[1] != b""
    assert "debug=here: is for a single run" in train("debug=here", "seed=1,2").stderr
