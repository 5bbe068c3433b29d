"""Does it learn? The recipes as users get them, to the returns that they promise. Minutes, not seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Command

from rltemplate.run import paths

QUIET = ["logger=none", "video_every=0", "checkpoint_every=0"]


def final_return(run_dir: Path) -> float:
    """The last evaluation of a finished run."""
    record = json.loads((run_dir / paths.RECORD).read_text())
    assert record["status"] == "finished"
    return float(record["final_metrics"]["eval/return"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "env", "least"),
    [
        ("ppo", "CartPole", 499.0),
        ("ppo", "Acrobot", -100.0),
        ("ppo", "Pendulum", -250.0),
        ("sac", "Pendulum", -220.0),
    ],
)
def test_a_recipe_learns(train_command: Command, tmp_path: Path, algo: str, env: str, least: float) -> None:
    """Thresholds leave room for one seed's bad luck; the means over seeds are in results/."""
    words = [f"algo={algo}", f"env={env}", "eval_episodes=30", *QUIET, f"run_dir={tmp_path / 'run'}"]
    done = train_command(*words)
    assert done.returncode == 0, done.stderr
    assert final_return(tmp_path / "run") >= least


@pytest.mark.slow
def test_without_learning_the_threshold_is_out_of_reach(train_command: Command, tmp_path: Path) -> None:
    """The inverse: with a step size of nearly nothing the same check fails."""
    words = ["algo.learning_rate=1e-12", "total_env_steps=20000", *QUIET, f"run_dir={tmp_path / 'run'}"]
    assert train_command("algo=ppo", "env=CartPole", *words).returncode == 0
    assert final_return(tmp_path / "run") < 200.0
