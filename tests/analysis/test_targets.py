"""Where a return stands: against which published results, and for which runs nothing is said."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, SHRUNK, Command, run_facts

from rltemplate.analysis import targets
from rltemplate.run.sinks.console import ConsoleSink

ENV_FILES = {path.stem: path for path in (ROOT / "conf" / "env").glob("[!_]*.yaml")}
# Not the files of a fork for environments of its own.
SHIPPED = {row.env: ENV_FILES[row.env] for row in targets.references()}


def config(env_id: str = "Hopper-v5", algo: str = "ppo", **env: Any) -> dict[str, Any]:
    return {"algo": {"name": algo}, "env": {"id": env_id, "kwargs": {}, "max_episode_steps": None, **env}}


def test_every_row_has_a_source_and_belongs_to_a_shipped_environment() -> None:
    rows = targets.references()
    assert len(rows) > 250
    for row in rows:
        assert row.source.strip(), row
        assert row.algo in ("ppo", "sac", "sac-discrete", "stretch", targets.RANDOM), row
        assert math.isfinite(row.return_mean), row
        assert (row.steps > 0) == (row.algo != targets.RANDOM), row
        assert row.return_std is None or row.return_std >= 0, row


def test_every_shipped_environment_has_its_random_policy_and_a_target() -> None:
    for name, path in SHIPPED.items():
        version = str(yaml.safe_load(path.read_text())["id"]).rpartition("-")[2]
        chance = [row for row in targets.references() if (row.env, row.algo) == (name, targets.RANDOM)]
        assert [row.env_version for row in chance] == [version]
        assert "results/random_returns.py episodes=100" in chance[0].source
        found = targets.standing("ppo", name, 1_000_000, 0.0)
        assert found is not None
        assert found.published
        assert found.top is not None
        assert chance[0].return_mean < found.top  # what others reach is better than chance


def row(algo: str, steps: int, mean: float, source: str, version: str = "v4") -> targets.Reference:
    return targets.Reference("Thing", version, algo, algo.upper(), steps, mean, None, 5, source)


ROWS = (
    row(targets.RANDOM, 0, 18.2, "measured", "v5"),
    row("ppo", 1_000_000, 2159.0, "one a"),
    row("ppo", 2_000_000, 9000.0, "one b"),  # the same source, farther from a million
    row("ppo", 1_500_000, 2400.0, "two", "v3"),
    row("ppo", 600_000, 3200.0, "three"),
    row("ppo", 8_000_000, 9999.0, "four"),
    row("sac", 1_000_000, 5000.0, "five"),
    row("stretch", 1_000_000, 8000.0, "six"),
    row("stretch", 9_000_000, 12000.0, "seven"),
)


@pytest.fixture
def thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "references", lambda: ROWS)


@pytest.mark.usefixtures("thing")
def test_results_at_about_as_many_steps_are_compared() -> None:
    found = targets.standing("ppo", "Thing", 1_001_472, 3175.4)
    assert found is not None
    assert found.text == (
        "eval/return 3,175 at 1,001,472 steps: random 18.2, published for PPO at 600,000 to 1.5M steps "
        "2,159 to 3,200 (3 results; v3, v4); above 2 of 3"
    )
    assert (found.floor, found.top, found.beaten, found.same_steps) == (2159.0, 3200.0, 2, True)
    assert found.stretch is not None
    assert found.stretch.return_mean == 8000.0
    sac = targets.standing("sac", "Thing", 1_000_000, 1.0)
    assert sac is not None
    assert sac.text.endswith("published for SAC at 1M steps 5,000 (1 result; v4); above 0 of 1")
    assert sac.brief.endswith("published 5,000: above 0 of 1")


@pytest.mark.usefixtures("thing")
def test_other_numbers_of_steps_are_named_and_not_counted() -> None:
    early = targets.standing("ppo", "Thing", 10_000, 100.0)
    late = targets.standing("ppo", "Thing", 50_000_000, 100.0)
    assert early is not None
    assert late is not None
    assert early.text.endswith(
        "published for PPO at 600,000 to 1M steps 2,159 to 3,200 (2 results; v4), at another number of steps"
    )
    assert "at 8M steps 9,999 (1 result; v4), at another number of steps" in late.text
    assert "above" not in early.text + late.text
    assert late.brief.endswith("published 9,999, at other steps")
    assert early.same_steps is False


@pytest.mark.usefixtures("thing")
def test_without_a_result_there_is_the_random_policy_or_nothing() -> None:
    found = targets.standing("dqn", "Thing", 1000, 20.0)
    assert found is not None
    assert found.text == "eval/return 20 at 1,000 steps: random 18.2"
    assert found.brief == "random 18.2"
    other = targets.standing("ppo", "Thing", 1_000_000, 20.0, "v4")
    assert other is not None
    assert other.random is None  # it was measured on another version
    assert "random" not in other.text
    assert targets.standing("ppo", "Nothing", 1000, 20.0) is None


def test_changed_environments_are_not_compared() -> None:
    assert targets.standing_of(config(), 1_000_000, 3000.0) is not None
    assert targets.standing_of(config(max_episode_steps=500), 1_000_000, 3000.0) is None
    assert targets.standing_of(config(kwargs={"forward_reward_weight": 2.0}), 1_000_000, 3000.0) is None
    assert targets.standing_of(config("MountainCarContinuous-v0"), 1_000_000, 90.0) is None
    continuous = targets.standing_of(config("LunarLander-v3", kwargs={"continuous": True}), 1_000_000, 250.0)
    assert continuous is not None
    assert continuous.env == "LunarLanderContinuous"
    windy = {"continuous": True, "enable_wind": True}
    assert targets.standing_of(config("LunarLander-v3", kwargs=windy), 1_000_000, 250.0) is None
    older = targets.standing_of(config("Hopper-v4"), 1_000_000, 3000.0)
    assert older is not None
    assert older.random is None
    assert older.published


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_environments_are_found_by_what_their_files_say(name: str) -> None:
    env = yaml.safe_load(SHIPPED[name].read_text())
    assert targets.comparable_env({"max_episode_steps": None, **env}) == (name, env["id"].rpartition("-")[2])


# --- At the end of a run -----------------------------------------------------------------------------------


def ending(status: str, metrics: dict[str, float], **kinds: Any) -> list[str]:
    stream = io.StringIO()
    sink = ConsoleSink(run_facts(Path("/r"), total_env_steps=100, **kinds), stream)
    sink.write({"env_steps": 100, "wall_time_s": 1.0, **metrics})
    sink.close(status, metrics)
    return stream.getvalue().splitlines()[2:-2]


def test_the_console_says_it_once_and_only_of_finished_runs() -> None:
    def standing(steps: int, value: float) -> str:
        return f"{value} at {steps}"

    metrics = {"eval/return": 7.5}
    assert ending("finished", metrics, standing=standing) == [
        "finished after 100 steps in 0:00:01",
        "7.5 at 100",
    ]
    assert len(ending("interrupted", metrics, standing=standing)) == 1
    assert len(ending("finished", {}, standing=standing)) == 1
    assert len(ending("finished", metrics, standing=lambda steps, value: None)) == 1
    assert len(ending("finished", metrics)) == 1


def test_a_run_ends_with_where_it_stands(train_command: Command) -> None:
    words = [
        *SHRUNK["ppo"],
        "total_env_steps=64",
        "eval_episodes=1",
        "video_every=0",
        "logger.tensorboard=false",
    ]
    done = train_command(*words, "env=CartPole")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("finished after 64 steps"))
    assert lines[at + 1].startswith("eval/return ")
    assert " at 64 steps: random 25, published for PPO at 100,000" in lines[at + 1]
    assert re.fullmatch(r"next: make evaluate run=[0-9a-z-]+-seed1-[0-9a-f]+", lines[-1])
    assert Path(lines[-2]).name == lines[-1].rpartition("=")[2]
    changed = train_command(*words, "env=CartPole", "env.max_episode_steps=50")
    assert changed.returncode == 0, changed.stderr
    assert "published" not in changed.stderr


def test_standing_needs_nothing_slow() -> None:
    asked = "import sys, rltemplate.analysis.targets as t; t.standing('ppo', 'Hopper', 10**6, 1.0)"
    script = f"{asked}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {"numpy", "scipy", "torch", "pandas"}.isdisjoint(done.stdout.split())
