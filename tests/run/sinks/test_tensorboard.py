"""TensorBoard's event files, read by its own reader."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from conftest import feed, run_facts, until

from rltemplate.run import paths
from rltemplate.run.lines import LineFile
from rltemplate.run.logger import Logger
from rltemplate.run.sinks.tensorboard import TensorBoardSink
from rltemplate.run.video import film


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
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


@pytest.mark.parametrize(
    ("torn", "encoded"), [(0, 2), (7, 2), (10**6, 3)], ids=["whole", "torn end", "file lost"]
)
def test_a_resumed_run_has_each_row_once_at_its_place_in_time(
    tmp_path: Path, torn: int, encoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And encodes no video again that the lost part of the run did not leave anew."""
    folder = tmp_path / paths.TENSORBOARD
    train(tmp_path, 100, 900)
    made: list[Path] = []
    animate = film.animate

    def counted(path: Path, *rest: Any) -> None:
        made.append(path)
        animate(path, *rest)

    monkeypatch.setattr(film, "animate", counted)
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
    assert made == [paths.video_path(tmp_path, at) for at in (400, 800, 1200)][-encoded:]
    assert [('"gamma": 0.99' in text) for _, text in texts(folder, "config")] == [True]
    times = [event.wall_time for event in events(folder).Scalars("m")]
    assert [round(10 * (each - times[0])) for each in times] == [at - metrics[0] for at in metrics]
    assert len(list(folder.iterdir())) == 2  # the user's survives


def test_a_full_disk_costs_that_sink_alone_until_the_run_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = run_facts(tmp_path, config={**run_facts(tmp_path).config, "long": "x" * 5000})
    logger = Logger([TensorBoardSink(facts)], LineFile(tmp_path / paths.METRICS))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6300, limits[1]))  # the kernel refuses the rest of a file
        for step in range(1, 31):
            logger.log(step, {"m": step / 3})
        logger.close("finished")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err.count("TensorBoardSink is switched off") == 1
    assert (tmp_path / paths.METRICS).read_text().count("\n") == 30
    assert len(scalars(tmp_path / paths.TENSORBOARD)) < 30
    again = TensorBoardSink(run_facts(tmp_path, resumed_at=30))
    again.write({"env_steps": 31, "wall_time_s": 9.0, "m": 1.0})
    assert [step for step, _ in scalars(tmp_path / paths.TENSORBOARD)] == list(range(1, 32))


@pytest.mark.long
def test_tensorboard_serves_what_differs_between_runs_and_the_videos(tmp_path: Path) -> None:
    """A server on loopback is asked as its page would ask it."""
    rates = {"a": 1e-3, "b": 3e-4}
    for name, rate in rates.items():
        (tmp_path / name).mkdir()
        facts = run_facts(tmp_path / name, overrides=[f"algo.learning_rate={rate}", "debug=fast"])
        facts.config["algo"]["learning_rate"] = rate
        sink = TensorBoardSink(facts)
        feed(sink, 100, 400)
        sink.write({"env_steps": 500, "wall_time_s": 50.0, "eval/return": 1e4 * rate})
        sink.close("finished", {})
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(tmp_path),
        "--port",
        "0",
        "--host",
        "127.0.0.1",
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        address = next(match[0] for line in server.stderr if (match := re.search(r"http://\S+/", line)))

        def asked(path: str, question: Any = None) -> bytes:
            body = None if question is None else json.dumps(question).encode()
            request = urllib.request.Request(
                f"{address}data/plugin/{path}", body, {"Content-Type": "application/json"}
            )
            return bytes(urllib.request.urlopen(request).read())

        until(lambda: len(json.loads(asked("scalars/tags"))) == 2)
        column = {"hparam": "algo.learning_rate", "order": "ORDER_ASC"}
        metric = {"metric": {"group": "", "tag": "eval/return"}}
        question = {
            "experimentName": "",
            "allowedStatuses": ["STATUS_SUCCESS"],
            "startIndex": 0,
            "sliceSize": 9,
        }
        known = {
            each["name"]
            for each in json.loads(asked("hparams/experiment", {"experimentName": ""}))["hparamInfos"]
        }
        groups = json.loads(asked("hparams/session_groups", question | {"colParams": [column, metric]}))
        found = {
            each["hparams"]["algo.learning_rate"]: [
                v["value"] for v in each["metricValues"] if v["name"]["tag"] == "eval/return"
            ]
            for each in groups["sessionGroups"]
        }
        assert {"algo.learning_rate", "debug", "seed", "algo", "env"} <= known
        assert found == {1e-3: [10.0], 3e-4: [pytest.approx(3.0)]}
        (image, *_) = json.loads(asked("images/images?run=a%2Ftensorboard&tag=video&sample=0"))
        assert asked(f"images/individualImage?{image['query']}").startswith(b"GIF8")
    finally:
        server.terminate()
        server.wait()
