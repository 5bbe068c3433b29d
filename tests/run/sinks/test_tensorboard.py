"""TensorBoard's event files, read by its own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import full_disk
from fed import feed, run_facts

from runlab.run import paths
from runlab.run.files import LineFile
from runlab.run.logger import Logger
from runlab.run.sinks.tensorboard import TensorBoardSink


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    reader.Reload()
    return reader


def scalars(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars("m")]


def train(run_dir: Path, first: int, last: int, resumed_at: int | None = None, every: int = 100) -> None:
    """Steps `first` to `last` of a run, killed afterwards."""
    feed(TensorBoardSink(run_facts(run_dir, resumed_at=resumed_at)), first, last, every)


@pytest.mark.parametrize("torn", [0, 7, 10**6], ids=["whole", "torn end", "file lost"])
def test_a_resumed_run_has_each_row_once_at_its_place_in_time(tmp_path: Path, torn: int) -> None:
    folder = tmp_path / paths.TENSORBOARD
    train(tmp_path, 100, 900)
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[: -torn or None])
    (folder / "events.out.tfevents.1.of-the-user").touch()
    train(tmp_path, 700, 1200, resumed_at=600, every=50)
    metrics = [json.loads(line)["env_steps"] for line in (tmp_path / paths.METRICS).read_text().splitlines()]
    assert scalars(folder) == [(at, at / 8) for at in metrics]
    films = events(folder).Images("video")
    assert [(each.step, each.encoded_image_string[:4]) for each in films] == [
        (at, b"GIF8") for at in (400, 800, 1200)
    ]
    assert len({each.encoded_image_string for each in films}) == 3
    (text,) = events(folder).Tensors("config/text_summary")
    assert b'"gamma": 0.99' in text.tensor_proto.string_val[0]
    times = [event.wall_time for event in events(folder).Scalars("m")]
    assert [round(10 * (each - times[0])) for each in times] == [at - metrics[0] for at in metrics]
    assert len(list(folder.iterdir())) == 2  # the user's survives


def test_a_full_disk_costs_that_sink_alone_until_the_run_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = run_facts(tmp_path, config={"long": "x" * 5000})
    logger = Logger([TensorBoardSink(facts)], LineFile(tmp_path / paths.METRICS))
    with full_disk(6300):
        for step in range(1, 31):
            logger.log(step, {"m": step / 3})
        logger.close("finished")
    said = capsys.readouterr().err
    assert (said.count("TensorBoardSink is switched off"), "Traceback" in said) == (1, False)
    assert (tmp_path / paths.METRICS).read_text().count("\n") == 30
    assert len(scalars(tmp_path / paths.TENSORBOARD)) < 30
    again = TensorBoardSink(run_facts(tmp_path, resumed_at=30))
    again.write({"env_steps": 31, "wall_time_s": 9.0, "m": 1.0})
    assert [step for step, _ in scalars(tmp_path / paths.TENSORBOARD)] == list(range(1, 32))


def test_what_differs_between_runs_is_a_session_of_hparams(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    sink = TensorBoardSink(run_facts(tmp_path, overrides=["algo.learning_rate=1e-3", "debug=fast"]))
    feed(sink, 100, 200)
    sink.close("finished", {})
    found = events(tmp_path / paths.TENSORBOARD).PluginTagToContent("hparams")
    # Of the experiment as a whole nothing: that would hide keys of other runs.
    assert set(found) == {"_hparams_/session_start_info", "_hparams_/session_end_info"}
    started = HParamsPluginData.FromString(found["_hparams_/session_start_info"]).session_start_info
    assert {"algo.learning_rate", "debug", "seed", "algo", "env"} <= set(started.hparams)
    assert started.hparams["algo.learning_rate"].number_value == 1e-3
