"""A run as its sinks see it: facts about it, rows and videos."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conftest import write_video

from runlab.run import paths
from runlab.run.git.snapshot import GitRecord
from runlab.run.sinks.sink import RunFacts


def run_facts(run_dir: Path, config: Mapping[str, Any] | None = None, **known: Any) -> RunFacts:
    """Facts of a run of 1000 steps for its sinks; `config` and `known` are added, or replace others."""
    values: dict[str, Any] = {"total_env_steps": 1000, "checkpoint_every": 100, "seed": 1, "note": "why"}
    values |= {"algo": {"name": "ppo", "gamma": 0.99, "learning_rate": 1e-3}, "env": {"id": "CartPole-v1"}}
    values |= {"determinism": {"level": "repeat"}, **(config or {})}
    facts: dict[str, Any] = {"run_id": "run-1", "sweep": "sweep-7", "notify": lambda text: None}
    facts |= {"git": GitRecord(commit="0123456789abcdef" * 2 + "01234567", ref="refs/runs/run-1")}
    facts |= {"overrides": ["algo.learning_rate=1e-3", "seed=1", "trace=off", "note='why'"]}
    return RunFacts(run_dir=run_dir, config=values, **{**facts, **known})


def feed(sink: Any, first: int, last: int, every: int = 100) -> None:
    """Steps `first` to `last` of a run: rows in metrics.jsonl and in `sink`, and a video every 400 steps."""
    metrics = sink.facts.run_dir / paths.METRICS
    kept = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    metrics.write_text("".join(line for line in kept if json.loads(line)["env_steps"] < first))
    for at in range(first, last + 1, every):
        row = {"env_steps": at, "wall_time_s": at / 10, "m": at / 8}
        with metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        sink.write(row)
        if at % 400 == 0:
            video = paths.video_path(sink.facts.run_dir, at)
            video.parent.mkdir(exist_ok=True)
            write_video(video, at)
            sink.video(video, at)
