"""The table of first ratios says what the runs' metrics say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from rltemplate.analysis.ratios import METRIC, table
from rltemplate.types import ConfigError


def run(folder: Path, level: str, errors: list[float], algo: str = "ppo") -> Path:
    folder.mkdir(parents=True)
    config = f"algo: {{name: {algo}, num_steps: 64, num_minibatches: 4}}\nenv: {{id: A-v0, num_envs: 2}}\n"
    (folder / "config.yaml").write_text(f"{config}determinism: {{level: {level}}}\nnum_threads: 1\n")
    record = {"schema": 1, "trace": {"iterations": len(errors), "digest": "0"}}
    (folder / "record.json").write_text(json.dumps(record))
    rows = [{"env_steps": 1, "wall_time_s": 1}, *({METRIC: error} for error in errors)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_the_largest_error_of_each_setting_is_shown(tmp_path: Path) -> None:
    folders = [
        run(tmp_path / "a", "invariant", [0.0, 0.0]),
        run(tmp_path / "b", "invariant", [0.0] * 1500),
        run(tmp_path / "c", "repeat", [0.0, 2.5e-6, 0.0]),
    ]
    lines = table(folders).splitlines()[2:]
    assert lines == [
        "| A-v0 | invariant | 2 | 32 | 1 | 2 | 1,502 | 0 |",
        "| A-v0 | repeat | 2 | 32 | 1 | 1 | 3 | 2.5e-06 |",
    ]


def test_what_is_no_run_of_ppo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run of PPO"):
        table([run(tmp_path / "s", "repeat", [0.0], algo="sac")])
    command = [sys.executable, str(ROOT / "scripts/ratios.py"), "runs=nothing/*"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: runs=nothing/*: no run folders there\n")
