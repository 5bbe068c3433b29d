"""The benchmark: contenders do the same work, tables say what was measured, wrong words are refused."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import tables
from bench.__main__ import Args, main, measure_part, missing
from bench.contenders import atari, build, configuration
from bench.works import GPU, PARTS, WORKS, BenchJob, jobs
from runlab.envs.make import make_env


def job(work: str = "ppo-CartPole", contender: str = "rltemplate, eager", **values: Any) -> BenchJob:
    return BenchJob(part="peers", work=work, contender=contender, **values)


def test_every_job_of_this_project_is_a_configuration_that_trains() -> None:
    made = [job for part in (*PARTS, GPU) for job in jobs(part, 1.0, 2)]
    ours = {(job.work, job.overrides): job for job in made if job.overrides and not missing(job)}
    assert len(ours) > 15
    for each in ours.values():
        assert configuration(each).algo.name == WORKS[each.work].algo


def test_a_contender_that_does_other_work_is_not_in_the_tables() -> None:
    measured: list[dict[str, Any]] = []
    failed: list[str] = []

    def run(job: BenchJob) -> dict[str, Any]:
        if job.contender == "fails":
            return {"error": "no compiler"}
        batch = 64 if job.contender == "one" else 128
        return {"result": {"steps_per_s": 1.0}, "facts": {"batch_size": batch}}

    measure_part([job(contender=name) for name in ("fails", "one", "two")], 2, run, measured, failed)
    assert [each["job"]["contender"] for each in measured] == ["one", "one"]
    assert ["no compiler" in text for text in failed] == [True, False] * 2
    assert ["does other work" in text and "128" in text for text in failed] == [False, True] * 2


def test_a_work_whose_game_is_missing_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "cv2" else name)
    measured: list[dict[str, Any]] = []
    failed: list[str] = []
    part = [job("ppo-Pong"), job("ppo-Pong", "Stable-Baselines3"), job()]
    measure_part(part, 1, lambda job: {"result": {}}, measured, failed)
    assert ([each["job"]["work"] for each in measured], failed) == (["ppo-CartPole"], [])
    assert capsys.readouterr().out.count("cv2 of PPO Pong is not installed") == 1


def test_both_play_the_same_pong() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    config = configuration(job("ppo-Pong")).env
    ours, theirs = make_env(config, training=True), atari(config.id)
    played = []
    for env, seed in ((ours, 3), (theirs, 3), (theirs, 4)):
        seen, actions = [np.asarray(env.reset(seed=seed)[0])], np.random.default_rng(1)
        for _ in range(60):
            obs, reward, *ended, _ = env.step(int(actions.integers(6)))
            seen += [np.asarray(obs), np.array([float(reward), *ended])]
        played.append(b"".join(each.tobytes() for each in seen))
    assert played[0] == played[1] != played[2]


@pytest.mark.long
def test_both_do_the_same_work_on_pong() -> None:
    for package in ("ale_py", "cv2", "stable_baselines3"):
        pytest.importorskip(package)
    ours = ("determinism=fast", "compile=false")
    part = [
        job("ppo-Pong", "Stable-Baselines3", library="stable_baselines3"),
        job("ppo-Pong", overrides=ours),
        job("ppo-Pong", overrides=(*ours, "algo.num_minibatches=8")),
    ]

    def run(job: BenchJob) -> dict[str, Any]:
        with closing(build(job)) as contender:
            return {"result": {}, "facts": contender.facts()}

    measured: list[dict[str, Any]] = []
    failed: list[str] = []
    measure_part(part, 1, run, measured, failed)
    assert len(measured) == 2
    assert ["does other work" in line and "'batch_size': 128" in line for line in failed] == [True]


def test_a_gpu_is_asked_for_and_compared_with_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert GPU not in Args().only
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["only=gpu", f"out={tmp_path / 'no'}"]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    measured = [
        {"job": asdict(each), "repetition": 1, "result": {"steps_per_s": rate, "first_s": 2.0}}
        for each, rate in zip(jobs(GPU, 1.0, 2), (200, 100, 600), strict=False)
    ]
    assert "| PPO Hopper | GPU, compile=true | 600 (600 to 600) | 3.00 | 2.0 |" in tables.document(
        measured, {GPU: "made so"}
    )


def test_tables_compare_within_a_repetition() -> None:
    measured = [
        {
            "job": {"part": "peers", "work": "sac-Hopper", "contender": contender},
            "repetition": i,
            "result": {"steps_per_s": rate, "first_s": 2.0, "peak_bytes": 4e8},
        }
        # The machine was twice as fast in the second repetition.
        for contender, rates in {"SBX": (100, 200, 100), "rltemplate, eager": (150, 300)}.items()
        for i, rate in enumerate(rates)
    ]
    text = tables.document(measured, {"peers": "made so"})
    assert "| SAC Hopper | rltemplate, eager | 225 (150 to 300) |  | 1.50 | 2.0 | 400 |" in text
    assert "| SAC Hopper | SBX | 100 (100 to 200) |  | 1.00 |" in text


@pytest.mark.long
@pytest.mark.parametrize("part", ["time", "observers"])
def test_a_part_is_measured_and_written(part: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [f"only={part}", "works=ppo-Hopper", "seconds=1", "repetitions=1"]
    assert main([*words, f"out={tmp_path}"]) == 0, capfd.readouterr().err
    assert "| PPO Hopper |" in (tmp_path / "bench.md").read_text().partition(f"## {part}")[2]
    for each in json.loads((tmp_path / "bench.json").read_text())["measurements"] if part == "time" else []:
        shares = [each["result"][name] for name in ("environments", "updates", "rest")]
        assert min(shares) > 0.0
        assert sum(shares) == pytest.approx(1.0)
    assert main(["only=peer", f"out={tmp_path / 'no'}"]) == 2
    assert "did you mean peers?" in capfd.readouterr().err
    assert not (tmp_path / "no").exists()
