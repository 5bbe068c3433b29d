"""One run has a folder and a process of its own; `debug=here` needs none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SHRUNK, Configure, environment

from rltemplate.run.job import run_folder


def test_folders_are_named_after_what_the_user_chose(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["seed=1", "env=ALE/Pong-v5"]
    assert run_folder(configure(), "id", typed) == tmp_path / "runs" / "ppo-ALE-Pong-v5" / "id"
    assert run_folder(configure("runs_dir=/x", "env=Hopper"), "id", []) == Path("/x/ppo-Hopper/id")
    assert run_folder(configure("run_dir=a/b"), "id", []) == tmp_path / "a" / "b"


@pytest.mark.long
def test_debug_here_stops_at_breakpoints_and_computes_the_same(fork: Path, tmp_path: Path) -> None:
    """The debugger stops inside of the algorithm; without `debug=here` it loses the process before that."""
    small = [*SHRUNK["ppo"], "total_env_steps=64", "eval_every=0", "video_every=0", "logger=none"]
    place = "rltemplate.algos.ppo"
    questions = f"import {place}\nb {place}.compute_gae\nc\np 6 * 7, gamma\nclear 1\nc\nq\n"

    def train(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "pdb", str(fork / "scripts" / "train.py"), *small, *words]
        variables = environment(PYTHONPATH=str(fork))
        return subprocess.run(
            line, cwd=tmp_path, env=variables, input=questions, capture_output=True, text=True
        )

    assert "(42, 0." in train("debug=here", "run_dir=here").stdout
    assert "(42, 0." not in train("run_dir=away").stdout
    traces = [(tmp_path / name / "trace.jsonl").read_bytes() for name in ("here", "away")]
    assert traces[0] == traces[1] != b""
    assert "debug=here: is for a single run" in train("debug=here", "seed=1,2").stderr
