"""TensorBoard's event files, read by its own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, feed, run_facts

from rltemplate.run import paths
from rltemplate.run.sinks.tensorboard import TensorBoardSink


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return reader


def scalars(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars("m")]


def texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    found = events(folder).Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def train(run_dir: Path, first: int, last: int, resumed_at: int | None = None, every: int = 100) -> None:
    """Steps `first` to `last` of a run, killed afterwards."""
    feed(TensorBoardSink(run_facts(run_dir, resumed_at=resumed_at)), first, last, every)


@pytest.mark.parametrize("torn", [0, 7, 10**6], ids=["whole", "torn end", "file lost"])
def test_a_resumed_run_has_each_row_once_at_its_place_in_time(tmp_path: Path, torn: int) -> None:
    folder = tmp_path / paths.TENSORBOARD
    train(tmp_path, 100, 900)
    train(tmp_path, 700, 1050, resumed_at=600, every=50)  # every second row does not come again
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[: -torn or None])
    train(tmp_path, 900, 1200, resumed_at=800)
    metrics = [json.loads(line)["env_steps"] for line in (tmp_path / paths.METRICS).read_text().splitlines()]
    assert scalars(folder) == [(at, at / 8) for at in metrics]
    assert texts(folder, "video") == [(at, str(paths.video_path(tmp_path, at))) for at in (400, 800, 1200)]
    assert [('"gamma": 0.99' in text) for _, text in texts(folder, "config")] == [True]
    times = [event.wall_time for event in events(folder).Scalars("m")]
    assert [round(10 * (each - times[0])) for each in times] == [at - metrics[0] for at in metrics]


def test_event_files_of_the_user_survive_a_resume(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / paths.TENSORBOARD
    train(tmp_path, 100, 300)
    with SummaryWriter(str(folder)) as own:
        own.add_scalar("mine", 1.0, 0)
    before = set(folder.iterdir())
    train(tmp_path, 300, 500, resumed_at=200)
    (kept,) = before & set(folder.iterdir())  # the event file of the first part is replaced
    assert [event.value for event in events(kept).Scalars("mine")] == [1.0]
    assert len(scalars(folder)) == 5


FULL = """
import resource, sys
from pathlib import Path
from conftest import ROOT, feed, run_facts
from rltemplate.run.lines import LineFile
from rltemplate.run.logger import Logger
from rltemplate.run.sinks.console import ConsoleSink
from rltemplate.run.sinks.tensorboard import TensorBoardSink
run_dir = Path(sys.argv[1])
facts = run_facts(run_dir, config={"long": "x" * 5000})
logger = Logger([ConsoleSink(facts), TensorBoardSink(facts)], LineFile(run_dir / "metrics.jsonl"))
resource.setrlimit(resource.RLIMIT_FSIZE, (5500, 5500))  # of any one file: the kernel refuses the rest
for step in range(1, 31):
    logger.log(step, {"m": step / 3})
logger.close("finished")
"""


def test_a_full_disk_costs_that_sink_alone_until_the_run_is_resumed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 0
    assert done.stderr.count("TensorBoardSink is switched off") == 1
    assert "Traceback" not in done.stderr
    assert (tmp_path / paths.METRICS).read_text().count("\n") == 30
    assert len(scalars(tmp_path / paths.TENSORBOARD)) < 30
    again = TensorBoardSink(run_facts(tmp_path, resumed_at=30))
    again.write({"env_steps": 31, "wall_time_s": 9.0, "m": 1.0})
    assert [step for step, _ in scalars(tmp_path / paths.TENSORBOARD)] == list(range(1, 32))
