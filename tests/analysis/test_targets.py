"""The standing of a return: which published results it is compared with, and for which runs there is none."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import yaml
from conftest import ROOT, SHRUNK, Command

from rltemplate.analysis import targets

ENV_FILES = {path.stem: path for path in (ROOT / "conf" / "env").glob("[!_]*.yaml")}
# Not the files of a fork for environments of its own.
SHIPPED = {row.env: ENV_FILES[row.env] for row in targets.references()}


def config(env_id: str = "Hopper-v5", algo: str = "ppo", **env: Any) -> dict[str, Any]:
    return {"algo": {"name": algo}, "env": {"id": env_id, "kwargs": {}, "max_episode_steps": None, **env}}


def standing(algo: str, env: str, steps: int, value: float, **changes: Any) -> targets.Standing:
    found = targets.standing_of(config(env, algo, **changes), steps, value)
    assert found is not None
    return found


def test_every_row_has_a_source_and_a_number() -> None:
    rows = targets.references()
    assert len(rows) > 250
    for row in rows:
        assert row.source.strip(), row
        assert row.algo in ("ppo", "sac", "sac-discrete", "stretch", targets.RANDOM), row
        assert math.isfinite(row.return_mean), row
        assert (row.steps > 0) == (row.algo != targets.RANDOM), row


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_environment_has_its_random_policy_and_a_target(name: str) -> None:
    env = {"max_episode_steps": None, **yaml.safe_load(SHIPPED[name].read_text())}
    found = targets.standing_of({"algo": {"name": "ppo"}, "env": env}, 1_000_000, 0.0)
    assert found is not None
    assert found.random is not None
    assert found.random < max(found.returns)


def row(algo: str, steps: int, mean: float, source: str, version: str = "v4") -> targets.Reference:
    return targets.Reference("Thing", version, algo, algo.upper(), steps, mean, source)


@pytest.fixture
def thing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        row(targets.RANDOM, 0, 18.2, "measured", "v5"),
        row("ppo", 1_000_000, 2159.0, "one a"),
        row("ppo", 2_000_000, 9000.0, "one b"),  # the same source, farther from a million
        row("ppo", 1_500_000, 2400.0, "two", "v3"),
        row("ppo", 600_000, 3200.0, "three"),
        row("ppo", 8_000_000, 9999.0, "four"),
        row("sac", 1_000_000, 5000.0, "five"),
    )
    monkeypatch.setattr(targets, "references", lambda: rows)


@pytest.mark.usefixtures("thing")
def test_results_at_about_as_many_steps_are_compared() -> None:
    found = standing("ppo", "Thing-v5", 1_001_472, 3175.4)
    assert found.text == (
        "eval/return 3,175 at 1,001,472 steps: random 18.2, published for PPO at 600,000 to 1.5M steps "
        "2,159 to 3,200 (3 results; v3, v4); above 2 of 3"
    )
    sac = standing("sac", "Thing-v5", 1_000_000, 1.0)
    assert sac.text.endswith("published for SAC at 1M steps 5,000 (1 result; v4); above 0 of 1")


@pytest.mark.usefixtures("thing")
def test_other_numbers_of_steps_are_named_and_not_counted() -> None:
    early, late = (standing("ppo", "Thing-v5", steps, 100.0) for steps in (10_000, 50_000_000))
    assert early.text.endswith(
        "published for PPO at 600,000 to 1M steps 2,159 to 3,200 (2 results; v4), at another number of steps"
    )
    assert "at 8M steps 9,999 (1 result; v4), at another number of steps" in late.text
    assert (early.same_steps, late.same_steps) == (False, False)


@pytest.mark.usefixtures("thing")
def test_without_a_result_there_is_the_random_policy_or_nothing() -> None:
    assert standing("dqn", "Thing-v5", 1000, 20.0).text == "eval/return 20 at 1,000 steps: random 18.2"
    assert standing("ppo", "Thing-v4", 1_000_000, 20.0).random is None  # measured on another version
    assert targets.standing_of(config("Nothing-v1"), 1000, 20.0) is None


def test_changed_environments_are_not_compared() -> None:
    assert standing("ppo", "Hopper-v5", 1_000_000, 3000.0).published
    continuous = standing("ppo", "LunarLander-v3", 1_000_000, 250.0, kwargs={"continuous": True})
    assert continuous.random != standing("ppo", "LunarLander-v3", 1_000_000, 250.0).random
    for changed in (
        config(max_episode_steps=500),
        config(kwargs={"forward_reward_weight": 2.0}),
        config("MountainCarContinuous-v0"),
        config("LunarLander-v3", kwargs={"continuous": True, "enable_wind": True}),
    ):
        assert targets.standing_of(changed, 1_000_000, 3000.0) is None


@pytest.mark.long
def test_a_run_ends_with_its_standing(train_command: Command) -> None:
    words = [*SHRUNK["ppo"], "total_env_steps=64", "eval_episodes=1", "video_every=0", "env=CartPole"]
    done = train_command(*words, "logger.tensorboard=false")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("finished after 64 steps"))
    assert lines[at + 1].startswith("eval/return ")
    assert " at 64 steps: random 25, published for PPO at 100,000" in lines[at + 1]


def test_standing_needs_nothing_slow() -> None:
    words = "import sys, rltemplate.analysis.targets as t; t.references(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"numpy", "scipy", "torch", "pandas"}.isdisjoint(done.stdout.split())
