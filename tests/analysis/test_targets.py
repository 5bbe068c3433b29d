"""The standing of a return: which published results it is compared with, and for which runs there is none."""

from __future__ import annotations

import csv
import math
import re
from typing import Any

import pytest
import yaml
from conftest import ROOT

from runlab.analysis import published as targets
from runlab.config.project import reference_returns

ENV_FILES = {path.stem: path for path in (ROOT / "conf" / "env").glob("[!_]*.yaml")}
# Not the files of a fork for environments of its own.
SHIPPED = {row.env: ENV_FILES[row.env] for row in targets.references()}


def standing(algo: str, env_id: str, steps: int, value: float, **env: Any) -> targets.Standing | None:
    config = {"algo": {"name": algo}, "env": {"id": env_id, "kwargs": {}, "max_episode_steps": None, **env}}
    return targets.standing_of(config, steps, value)


def test_every_row_has_a_source_and_a_number() -> None:
    table = reference_returns()
    assert table is not None
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    named = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{7,} \S+|results/random_returns.py")
    assert all(named.fullmatch(row["source"]) for row in rows)
    assert all(math.isfinite(row.return_mean) for row in targets.references())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_environment_has_its_random_policy_and_a_target(name: str) -> None:
    env = {"max_episode_steps": None, **yaml.safe_load(SHIPPED[name].read_text())}
    published = [row for row in targets.references() if (row.env, row.algo) == (name, "ppo")]
    found = targets.standing_of({"algo": {"name": "ppo"}, "env": env}, published[0].steps, 0.0)
    assert found is not None
    assert found.random is not None
    assert found.random < max(found.published)


def row(
    algo: str, steps: int, mean: float, version: str = "v4", source: str = "them", method: str = ""
) -> targets.Reference:
    return targets.Reference("Thing", version, algo, method, steps, mean, "3", source, "")


def test_results_at_about_as_many_steps_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        row(targets.RANDOM, 0, 18.2, "v5"),
        row("ppo", 1_000_000, 2159.0),
        row("ppo", 600_000, 3200.0, "v3"),
        row("ppo", 8_000_000, 9999.0),
        row("sac", 1_000_000, 5000.0),
    )
    monkeypatch.setattr(targets, "references", lambda: rows)
    about = "published for PPO at about as many steps 2,159 to 3,200 (v3, v4); the mean is above 1 of 2"
    for algo, env_id, steps, expected in (
        ("ppo", "Thing-v5", 1_001_472, f"random policy 18.2, {about}"),
        ("ppo", "Thing-v5", 10_000, "random policy 18.2"),
        ("ppo", "Thing-v4", 1_001_472, about),  # random was measured on another version
    ):
        found = standing(algo, env_id, steps, 3175.4)
        assert found is not None
        assert found.summary == expected
    assert standing("ppo", "Nothing-v1", 1000, 20.0) is None


def test_a_learning_curve_is_compared_at_its_nearest_point(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        row("sac", 100_000, 1.0, source="them/it@a1 early.json"),
        row("sac", 300_000, 3.0, source="them/it@b2 late.json"),
        row("sac", 200_000, 2.0, source="them/it@a1 early.json"),
        row("sac", 200_000, 4.0, "v3", source="them/it@a1 early.json"),  # other runs
        row("sac", 400_000, 5.0, source="us/it@c3 all.csv"),
        row("sac", 200_000, 6.0, source="them/it@a1 early.json", method="of others"),
    )
    monkeypatch.setattr(targets, "references", lambda: rows)
    for steps, expected in (
        (210_000, [2.0, 4.0, 5.0, 6.0]),
        (290_000, [3.0, 4.0, 5.0, 6.0]),
        (99_000, [1.0]),
    ):
        found = targets.published_near("sac", "Thing", steps)
        assert [each.return_mean for each in found] == expected


def test_changed_environments_are_not_compared() -> None:
    assert standing("ppo", "Hopper-v5", 1_000_000, 3000.0) is not None
    assert standing("ppo", "LunarLander-v3", 300_000, 250.0, kwargs={"continuous": True}) is not None
    for env_id, changed in (
        ("Hopper-v5", {"max_episode_steps": 500}),
        ("Hopper-v5", {"wrappers": {"FlattenObservation": None}}),
        ("Hopper-v5", {"training_wrappers": {"FlattenObservation": None}}),
        ("LunarLander-v3", {"kwargs": {"continuous": True, "enable_wind": True}}),
    ):
        assert standing("ppo", env_id, 1_000_000, 3000.0, **changed) is None
