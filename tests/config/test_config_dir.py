"""Configurations outside of conf/: found, guessed, and no longer needed once a run is recorded."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from conftest import environment, program, record, run_train, small

from rltemplate.config.cli.preflight import preflight
from rltemplate.types import ConfigError


def test_configurations_of_another_folder_are_found_and_guessed(tmp_path: Path) -> None:
    for group, text in {
        "experiment": "seed: 9",
        "env": "defaults: [_gymnasium, _self_]\nid: CartPole-v1",
    }.items():
        (tmp_path / group).mkdir()
        head = "# @package _global_\n" if group == "experiment" else ""
        (tmp_path / group / "mine.yaml").write_text(f"{head}{text}\n")
    given = [f"--config-dir={tmp_path}", "experiment=mine", "env=mine"]
    (config,) = preflight(given).configs
    assert (config.seed, config.experiment, config.env.id) == (9, "mine", "CartPole-v1")
    for words, hint in {
        ("experiment=mne",): "did you mean mine?",
        ("experiment=mine", "seed=1,x"): "seed=x",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(hint)):
            preflight([given[0], *words])
    with pytest.raises(ConfigError, match="no such experiment"):
        preflight(given[1:])


@pytest.mark.long
def test_a_recorded_run_needs_its_configurations_no_more(fork: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    file = tmp_path / "mine" / "experiment" / "tried.yaml"
    file.write_text("# @package _global_\nalgo:\n  gamma: 0.7\n")
    given = small("ppo", "total_env_steps=64", "eval_every=0", "video_every=0", "logger=none")
    run_train(fork, tmp_path, *given, "--config-dir=mine", "experiment=tried", "run_dir=first", status=0)
    file.unlink()
    assert "gamma: 0.7" in (tmp_path / "first" / "config.yaml").read_text()
    for command, *words in (["reproduce"], ["resume", "total_env_steps=96"]):
        line = [*program(fork, command), "run=first", *words]
        done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert [part["env_steps"] for part in record(tmp_path / "first")["resumed"]] == [64]
