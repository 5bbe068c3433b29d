"""The logger: what a row holds, that reading is lazy, and that nothing a machine does stops it."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rltemplate.run.lines import LineFile
from rltemplate.run.logger import Logger, cut_metrics
from rltemplate.run.sinks.sink import Row
from rltemplate.types import Episode, IterationResult


class Memory:
    """A sink that remembers, and fails on request."""

    def __init__(self, fails: bool = False) -> None:
        self.rows: list[dict[str, float]] = []
        self.videos: list[tuple[Path, int]] = []
        self.notes: list[str] = []
        self.closed: list[str] = []
        self.fails = fails

    def write(self, row: Row) -> None:
        if self.fails:
            raise OSError("no luck")
        self.rows.append(dict(row))

    def video(self, path: Path, env_steps: int) -> None:
        self.videos.append((path, env_steps))

    def note(self, text: str) -> bool:
        self.notes.append(text)
        return True

    def close(self, status: str, final_metrics: Row) -> None:
        self.closed.append(status)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def result(episodes: list[Episode] | None = None, **metrics: float) -> IterationResult:
    tensors = {name.replace("__", "/"): torch.tensor(value) for name, value in metrics.items()}
    return IterationResult(tensors, episodes or [])


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that must be strict JSON, every line whole."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def _saved(state: Mapping[str, Any], folder: Path) -> Path:
    path = folder / "state.pt"
    torch.save(state, path)
    return path


def run_python(source: str, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **env}
    command = [sys.executable, "-c", source, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_a_row_holds_the_means_since_the_last_row(tmp_path: Path) -> None:
    sink, path = Memory(), tmp_path / "metrics.jsonl"
    logger = Logger([sink], LineFile(path))
    logger.observe(result([Episode(10.0, 5), Episode(30.0, 9)], loss__policy=1.0, loss__value=4.0))
    logger.observe(result([Episode(2.0, 1)], loss__policy=2.0))
    first = logger.log(2048, {"eval/return": 7})
    logger.observe(result(loss__policy=-0.5))
    second = logger.log(4096)

    assert first["loss/policy"] == 1.5
    assert first["loss/value"] == 4.0  # over the one iteration that reported it
    assert first["episode/return"] == 14.0
    assert first["episode/length"] == 5.0
    assert first["eval/return"] == 7.0
    assert second["loss/policy"] == -0.5
    assert not {"loss/value", "episode/return", "episode/length", "eval/return"} & set(second)
    rows = read(path)
    assert rows == sink.rows
    assert [row["env_steps"] for row in rows] == [2048, 4096]
    assert {k: v for k, v in rows[0].items() if k not in ("env_steps", "wall_time_s")} == first


def test_kept_tensors_are_bounded_when_nobody_logs(tmp_path: Path) -> None:
    logger = Logger([], LineFile(tmp_path / "m.jsonl"))
    first = torch.tensor(1.0)
    alive = weakref.ref(first)
    logger.observe(IterationResult({"m": first}))
    del first
    assert alive() is not None
    for _ in range(5000):
        logger.observe(result(m=1.0))
    assert alive() is None
    assert logger.log(1)["m"] == 1.0


@pytest.mark.parametrize("fold", [False, True])
def test_a_logger_goes_on_where_another_one_stood(tmp_path: Path, fold: bool) -> None:
    """The same row as without the change; its means, its episodes, its clock."""
    clock, rng = Clock(), random.Random(1)
    values = [rng.gauss(0, 1e6) for _ in range(3000 if fold else 30)]

    def feed(logger: Logger, part: list[float]) -> None:
        for value in part:
            episodes = [Episode(value, 3)] if value > 0 else []
            logger.observe(result(episodes, m=value, a_max_error=value))

    def row(split: bool, forget: str | None = None) -> dict[str, float]:
        clock.now = 0.0
        logger = Logger([], LineFile(tmp_path / "m.jsonl"), clock)
        feed(logger, values[:17])
        clock.now += 4.0
        if split:
            state = logger.state_dict()
            if forget is not None:
                state[forget] = Logger([], LineFile(tmp_path / "m.jsonl"), clock).state_dict()[forget]
            clock.now = 1000.0  # another process, another clock
            logger = Logger([], LineFile(tmp_path / "m.jsonl"), clock)
            logger.load_state_dict(torch.load(_saved(state, tmp_path), weights_only=True))
        feed(logger, values[17:])
        clock.now += 1.0
        logger.log(500)
        return read(tmp_path / "m.jsonl")[-1]

    whole = row(split=False)
    assert row(split=True) == whole
    assert whole["wall_time_s"] == 5.0
    assert whole["time/steps_per_second"] == 100.0
    for piece in ("pending", "episodes", "wall_time_s", "last_log"):
        assert row(split=True, forget=piece) != whole, piece


def test_a_row_that_was_written_is_not_made_again(tmp_path: Path) -> None:
    clock = Clock()
    logger = Logger([], LineFile(tmp_path / "m.jsonl"), clock)
    logger.observe(result([Episode(1.0, 3)], m=1.0))
    clock.now += 3.0
    state = logger.state_dict()
    logger.log(100)
    clock.now = 50.0
    again = Logger([], LineFile(tmp_path / "m.jsonl"), clock)
    again.load_state_dict(state, logged=read(tmp_path / "m.jsonl")[-1])
    again.observe(result(m=5.0))
    clock.now += 2.0
    again.log(200)
    last = read(tmp_path / "m.jsonl")[-1]
    assert last == {"env_steps": 200, "wall_time_s": 5.0, "m": 5.0, "time/steps_per_second": 50.0}


def test_numbers_that_are_not_finite_are_null_in_the_file_and_themselves_in_sinks(tmp_path: Path) -> None:
    sink, path = Memory(), tmp_path / "m.jsonl"
    logger = Logger([sink], LineFile(path))
    logger.observe(result(a=math.nan, b=-math.inf, c=1.0))
    logger.log(1)
    assert read(path)[0]["a"] is None
    assert read(path)[0]["b"] is None
    assert read(path)[0]["c"] == 1.0
    assert math.isnan(sink.rows[0]["a"])
    # The reader of this test does refuse what Python writes by default.
    path.write_text(json.dumps({"a": math.nan}) + "\n")
    with pytest.raises(ValueError, match="NaN"):
        read(path)


class Reads(TorchFunctionMode):
    """Counts what makes a program wait for its device."""

    names = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


def test_values_are_read_once_per_log_and_never_between(tmp_path: Path) -> None:
    logger = Logger([], LineFile(tmp_path / "m.jsonl"))
    metrics = {f"m{i}": torch.tensor(float(i)) for i in range(15)}
    with Reads() as observing:
        for _ in range(8):
            logger.observe(IterationResult(metrics))
    with Reads() as logging:
        row = logger.log(1)
    assert row["m7"] == 7.0
    assert observing.count == 0
    assert logging.count == 1
    with Reads() as careless:  # what this test guards against does count
        [metrics[name].item() for name in metrics]
        float(metrics["m1"])
    assert careless.count >= 16


def test_a_metric_that_is_not_one_number_is_our_bug_and_is_named(tmp_path: Path) -> None:
    logger = Logger([], LineFile(tmp_path / "m.jsonl"))
    logger.observe(IterationResult({"loss/policy": torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"loss/policy.*\(3,\)"):
        logger.log(1)


def test_a_failing_sink_is_reported_once_and_switched_off(tmp_path: Path) -> None:
    console, bad, other = Memory(), Memory(fails=True), Memory()
    path = tmp_path / "m.jsonl"
    logger = Logger([console, bad, other], LineFile(path))
    for step in range(3):
        logger.observe(result(m=1.0))
        logger.log(step)
    logger.close("finished", {})
    assert [note for note in console.notes if "Memory" in note] == [
        "Memory is switched off: OSError: no luck"
    ]
    assert bad.closed == ["failed"]
    assert other.closed == console.closed == ["finished"]
    assert len(console.rows) == len(other.rows) == len(read(path)) == 3


def test_videos_and_the_end_reach_every_sink_once(tmp_path: Path) -> None:
    sinks = [Memory(), Memory()]
    logger = Logger(sinks, LineFile(tmp_path / "m.jsonl"))
    logger.video(Path("v.mp4"), 5)
    logger.close("interrupted", {})
    logger.close("finished", {})
    assert [sink.videos for sink in sinks] == [[(Path("v.mp4"), 5)]] * 2
    assert [sink.closed for sink in sinks] == [["interrupted"]] * 2


def test_a_deleted_folder_comes_back_with_every_row(tmp_path: Path) -> None:
    console, path = Memory(), tmp_path / "runs" / "a" / "metrics.jsonl"
    logger = Logger([console], LineFile(path))
    for step in range(3):
        logger.log(step)
    shutil.rmtree(tmp_path / "runs")
    for step in range(3, 6):
        logger.log(step)
    assert [row["env_steps"] for row in read(path)] == [0, 1, 2, 3, 4, 5]
    assert len(console.notes) == 1
    assert "was deleted" in console.notes[0]


def test_a_full_disk_leaves_no_half_line_and_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    source = """
import json, resource, sys
from pathlib import Path
from rltemplate.run.lines import LineFile
path = Path(sys.argv[1])
writer = LineFile(path)
notes = []
writer.warn = notes.append
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
for step in range(100):
    writer.write(json.dumps({"env_steps": step, "wall_time_s": step * 0.5}))
whole = path.read_text()
assert 900 < len(whole) <= 1000 and whole.endswith("\\n"), whole[-50:]
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
writer.write(json.dumps({"env_steps": 100, "wall_time_s": 50.0}))
writer.close()
print(len(notes), *notes, sep="|")
"""
    done = run_python(source, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2|")
    assert "cannot be written" in done.stdout
    assert "no line is lost" in done.stdout
    assert [row["env_steps"] for row in read(path)] == list(range(101))


def test_a_torn_last_line_is_cut_before_new_rows(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"env_steps": 1}\n{"env_st')
    LineFile(path).write(json.dumps({"env_steps": 2}))
    assert read(path) == [{"env_steps": 1}, {"env_steps": 2}]
    path.write_text('{"env_steps": 1}\n')
    LineFile(path).write(json.dumps({"env_steps": 2}))
    assert read(path) == [{"env_steps": 1}, {"env_steps": 2}]


def test_cut_metrics_keeps_what_the_checkpoint_saw(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert cut_metrics(path, 100) == ([], 0)
    rows = [{"env_steps": s, "wall_time_s": s / 10, "m": 0.1 + s} for s in (10, 20, 30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"env_steps": 4')
    assert cut_metrics(path, 20) == (rows[:2], 0)
    assert read(path) == rows[:2]
    assert cut_metrics(path, 5) == ([], 0)
    assert read(path) == []
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(json.dumps(rows[0]).encode() + b"\n\xff\n{}\n7\n" + json.dumps(rows[1]).encode() + b"\n")
    assert cut_metrics(path, 25) == (rows[:2], 3)  # what cannot be read costs no row beside it
    assert read(path) == rows[:2]


@pytest.mark.parametrize("careful", [True, False], ids=["ours", "buffered file"])
def test_kill_right_after_a_row_loses_nothing(tmp_path: Path, careful: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    source = """
import os, signal, sys
from pathlib import Path
from rltemplate.run.lines import LineFile
from rltemplate.run.logger import strict_json
path = Path(sys.argv[1])
lines = LineFile(path)
write = lambda row: lines.write(strict_json(row))
if sys.argv[2] == "False":  # the inverse: this check notices a writer that does not hand rows over
    file = path.open("w")
    write = lambda row: file.write(strict_json(row) + "\\n")
for step in range(500):
    write({"env_steps": step, "wall_time_s": step * 0.25})
os.kill(os.getpid(), 9)
"""
    done = run_python(source, path, careful)
    assert done.returncode == -signal.SIGKILL, done.stderr
    complete = path.read_text().count("\n") == 500
    assert complete is careful
    if careful:
        assert [row["env_steps"] for row in read(path)] == list(range(500))
