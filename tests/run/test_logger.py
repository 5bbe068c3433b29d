"""The logger: rows, lazy reading, and sinks that fail."""

from __future__ import annotations

import json
import math
import random
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch

from runlab.interfaces import Episode, IterationResult
from runlab.run.files import LineFile
from runlab.run.logger import Logger


def result(episodes: list[Episode] | None = None, **metrics: float) -> IterationResult:
    tensors = {name.replace("__", "/"): torch.tensor(value) for name, value in metrics.items()}
    return IterationResult(tensors, episodes or [])


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that must be strict JSON, every line whole."""
    text = path.read_text()
    assert text.endswith("\n")
    assert not [constant for constant in ("NaN", "Infinity") if constant in text]
    return [json.loads(line) for line in text.splitlines()]


def test_a_row_holds_the_means_since_the_last_row(tmp_path: Path) -> None:
    sink, path = Mock(), tmp_path / "metrics.jsonl"
    logger = Logger([sink], LineFile(path))
    logger.observe(result([Episode(10.0, 5), Episode(30.0, 9)], loss__policy=1.0, loss__value=4.0))
    logger.observe(result([Episode(2.0, 1)], loss__policy=2.0))
    logger.log(2048, {"eval/return": 7})
    logger.observe(result(loss__policy=-0.5))
    logger.log(4096, {})
    means = {"loss/policy": 1.5, "loss/value": 4.0}  # the second over the one iteration that reported it
    first = {**means, "episode/return": 14.0, "episode/length": 5.0, "eval/return": 7.0}
    second = {"loss/policy": -0.5}
    assert logger.final_metrics == first | second
    rows = read(path)
    assert [call(row) for row in rows] == sink.write.call_args_list
    times = [row.pop("wall_time_s") for row in rows]
    assert times == sorted(times)
    assert rows == [{"env_steps": 2048, **first}, {"env_steps": 4096, **second}]
    logger.observe(result(a=math.nan, b=-math.inf, c=1.0))
    logger.log(6144, {})
    assert [read(path)[2][name] for name in "abc"] == [None, None, 1.0]
    assert math.isnan(sink.write.call_args.args[0]["a"])  # a sink gets the number itself


def test_a_logger_resumes_where_another_one_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is the same as without the interruption: its means, its episodes, its clock."""
    now, rng = [0.0], random.Random(1)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    values = [rng.gauss(0, 1e6) for _ in range(30)]

    def new() -> Logger:
        return Logger([], LineFile(tmp_path / "m.jsonl"))

    def feed(logger: Logger, part: list[float]) -> None:
        for value in part:
            logger.observe(result([Episode(value, 3)] if value > 0 else [], m=value, a_max_error=value))

    def row(split: bool, forget: str | None = None) -> dict[str, float]:
        now[0] = 0.0
        logger = new()
        logger.log(0, {"old": 5.0})
        feed(logger, values[:17])
        now[0] += 4.0
        if split:
            state = logger.state_dict()
            if forget is not None:
                state[forget] = new().state_dict()[forget]
            now[0] = 1000.0  # another process, another clock
            torch.save(state, tmp_path / "state.pt")
            logger = new()
            logger.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        feed(logger, values[17:])
        now[0] += 1.0
        logger.log(500, {})
        return read(tmp_path / "m.jsonl")[-1] | {"final": logger.final_metrics}

    whole = row(split=False)
    assert row(split=True) == whole
    assert whole["wall_time_s"] == 5.0
    for piece in ("pending", "episodes", "wall_time_s", "final_metrics"):
        assert row(split=True, forget=piece) != whole, piece


def test_a_value_that_is_no_number_and_a_name_that_is_taken_are_refused(tmp_path: Path) -> None:
    logger = Logger([], LineFile(tmp_path / "m.jsonl"))
    several = (torch.zeros(3), r"tensor\(\[0\., 0\., 0\.\]\)")
    no_tensor: Any = several, (0.1, "0.1"), (np.mean([0.1]), r"np\.float64\(0\.1\)")
    for value, shown in no_tensor:
        with pytest.raises(ValueError, match=f"'loss/policy' must be .* a single number, got {shown}"):
            logger.observe(IterationResult({"loss/policy": value}))
    for name in ("env_steps", "wall_time_s", "eval/return", "episode/length", "time/steps_per_second"):
        with pytest.raises(ValueError, match=f"metric '{name}' would hide a value of the row"):
            logger.observe(IterationResult({name: torch.zeros(())}))
    for _ in range(1500):  # more than wait in memory
        logger.observe(result(m=1.0))
    logger.log(2, {})
    assert logger.final_metrics["m"] == 1.0


@pytest.mark.parametrize(
    ("error", "shown"),
    [(OSError("no luck"), "OSError: no luck"), (KeyError("x"), r"KeyError in .*\.py, line \d+: 'x'")],
)
def test_a_failing_sink_is_reported_once_and_switched_off(
    tmp_path: Path, error: Exception, shown: str
) -> None:
    console, bad, other = Mock(), Mock(), Mock()
    bad.write.side_effect = error
    logger = Logger([console, bad, other], LineFile(tmp_path / "m.jsonl"))
    for step in range(3):
        logger.log(step, {"m": 1.0})
    logger.video(Path("v.mp4"), 5)
    logger.close("finished", 7)
    (((message,), _),) = console.note.call_args_list
    assert re.fullmatch(f"Mock is switched off: {shown}", message)
    bad.close.assert_called_once_with("failed", {})
    for sink in (console, other):
        status, final = sink.close.call_args.args
        assert final.pop("wall_time_s") > 0
        assert (status, final) == ("finished", {"m": 1.0, "env_steps": 7})
        sink.video.assert_called_once_with(Path("v.mp4"), 5)
        assert sink.write.call_count == len(read(tmp_path / "m.jsonl")) == 3
