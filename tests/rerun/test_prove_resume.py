"""The command that kills runs: what it counts and what it would not let pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_kills_are_counted_and_differences_are_seen(tmp_path: Path) -> None:
    """The result of one case; then a table made from one that was not identical, which is tried again."""
    out = tmp_path / "resume"
    words = ["works=ppo-CartPole", "num_envs=4", "num_workers=0", "compile=false", "times=2", f"out={out}"]
    command = [sys.executable, str(ROOT / "scripts" / "prove_resume.py"), *words]

    def prove() -> tuple[int, str, list[dict[str, object]]]:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        lines = out.with_suffix(".jsonl").read_text().splitlines()
        return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]

    status, said, (result,) = prove()
    assert status == 0, said
    assert (result["kills"], result["identical"], result["differences"]) == (2, True, [])
    assert "2 kills in 1 cases" in out.with_suffix(".md").read_text()
    status, said, results = prove()
    assert (status, len(results)) == (0, 1)
    assert "already" in said
    out.with_suffix(".jsonl").write_text(json.dumps(result | {"identical": False}) + "\n")
    status, said, results = prove()
    assert (status, len(results)) == (0, 2)  # nothing is known of it until it was identical
