"""The benchmark: what is compared, and that its table says what was measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT


@pytest.fixture
def bench() -> ModuleType:
    """scripts/bench.py as a module."""
    spec = importlib.util.spec_from_file_location("bench", ROOT / "scripts" / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_has_medians_and_ratios_to_the_peer(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {"Stable-Baselines3": [100.0, 130.0, 110.0], "rltemplate, eager": [220.0, 200.0, 400.0]}
    taken: list[str] = []

    def measure(contender: str, algo: str, seconds: float, threads: int, part: str) -> float:
        taken.append(contender)
        return speeds.get(contender, [550.0] * 3)[(taken.count(contender) - 1) // 2]

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "peer_is_installed", lambda: True)
    assert bench.main(["only=peers", "repetitions=3", f"out={tmp_path}"]) == 0
    table = (tmp_path / "bench.md").read_text()
    assert "| rltemplate, eager | 220 (200 to 400) | 2.00 |" in table
    assert "| rltemplate, compile=true | 550 (550 to 550) | 5.00 |" in table
    assert table in capsys.readouterr().out
    assert json.loads((tmp_path / "bench.json").read_text())["peers"]["rates"]["ppo"][
        "Stable-Baselines3"
    ] == [
        100,
        130,
        110,
    ]
    assert taken[:6] == [*bench.CONTENDERS] * 2  # they take turns


def test_bad_words_are_refused(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["repetitions=0"]) == 2
    assert bench.main(["thread=2"]) == 2
    assert bench.main(["only=level"]) == 2
    assert "did you mean threads=?" in capsys.readouterr().err


def test_both_sides_do_the_same_work(bench: ModuleType) -> None:
    """The peer's numbers are written in its own call; these are ours, from the composed configuration."""
    ppo = bench.configuration("ppo", False)
    assert (ppo.env.id, ppo.env.num_envs, ppo.algo.num_steps, ppo.algo.update_epochs) == (
        "Hopper-v5",
        8,
        256,
        10,
    )
    assert ppo.algo.num_steps * ppo.env.num_envs // ppo.algo.num_minibatches == 64
    assert ppo.algo.hidden_sizes == [64, 64]
    sac = bench.configuration("sac", True)
    assert (sac.env.num_envs, sac.algo.batch_size, sac.algo.hidden_sizes) == (1, 256, [256, 256])
    assert (sac.algo.updates_per_step, sac.algo.policy_delay, sac.compile) == (1.0, 1, True)


def test_a_measurement_runs_for_real(bench: ModuleType) -> None:
    assert bench.measure("rltemplate, eager", "ppo", 0.5, 1) > 50.0


def test_levels_and_trace_are_costs_against_their_base(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured before stays in the report."""
    rates = {"fast": 100.0, "repeat": 98.0, "invariant": 95.0, "profile": 50.0}

    def measure(contender: str, algo: str, seconds: float, threads: int, part: str) -> Any:
        if part == "trace":
            return {"off": 100.0, "iteration": 99.0, "step": 80.0}
        return rates.get(contender, 200.0)

    monkeypatch.setattr(bench, "measure", measure)
    assert bench.main(["only=levels", f"out={tmp_path}"]) == 0
    assert bench.main(["only=trace", f"out={tmp_path}"]) == 0
    table = (tmp_path / "bench.md").read_text()
    assert "| PPO Hopper | invariant | 95 (95, 95, 95) | 1.053 |" in table
    assert "| PPO Hopper | repeat, compile=true | 200 (200, 200, 200) | 1.000 |" in table
    assert "| SAC Hopper | eager | 1.010 | 1.250 |" in table


@pytest.mark.parametrize("level", ["fast", "invariant"])
def test_a_level_is_measured_for_real(bench: ModuleType, level: str) -> None:
    assert bench.measure(level, "ppo", 0.5, 1, "levels") > 50.0


def test_the_trace_is_measured_for_real(bench: ModuleType) -> None:
    rates = bench.measure("eager", "ppo", 0.5, 1, "trace")
    assert set(rates) == {"off", "iteration", "step"}
    assert min(rates.values()) > 50.0
