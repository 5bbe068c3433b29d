"""Does it learn? The recipes as users get them, to the returns that they promise. Minutes, not seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import record, run_train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "least", "learns"),
    [
        ("algo=ppo env=CartPole", 499.0, True),
        ("algo=ppo env=Acrobot", -100.0, True),
        ("algo=ppo env=Pendulum", -250.0, True),
        ("algo=ppo env=Catch", 0.9, True),
        ("algo=sac env=Pendulum", -220.0, True),
        ("algo=ppo_recurrent env=CartPoleNoVel", 400.0, True),
        # The inverse: without a memory.
        ("algo=ppo env=CartPoleNoVel recipe=ppo_recurrent-CartPoleNoVel", 100.0, False),
        # The inverse: with a step size of nearly nothing.
        ("algo=ppo env=CartPole algo.learning_rate=1e-12 total_env_steps=20000", 200.0, False),
    ],
)
def test_a_recipe_learns(fork: Path, tmp_path: Path, words: str, least: float, learns: bool) -> None:
    """Thresholds leave room for one seed's bad luck; the means over seeds are in results/."""
    quiet = ["logger=none", "video_every=0", "checkpoint_every=0", "eval_episodes=30"]
    run_train(fork, tmp_path, *words.split(), *quiet, "run_dir=run", status=0)
    ended = record(tmp_path / "run")
    assert ended["status"] == "finished"
    assert (ended["final_metrics"]["eval/return"] >= least) == learns
