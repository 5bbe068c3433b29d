"""The sinks of a run that was cut off and goes on: what they show is that of a run without a break.

A run of `ROWS` is killed somewhere, `metrics.jsonl` is cut to a checkpoint, and the rest comes once more.
TensorBoard's files are read by each of its three readers, W&B's by its own `wandb sync` and by a reader of
the tests.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_sinks import (
    KEY,
    Notes,
    Server,
    Stored,
    _no_key_of_the_person_who_tests,  # noqa: F401 - holds for this module too
    await_note,
    helpers_of,
    in_terminal,
    lines_of,
)

from rltemplate.run import paths
from rltemplate.run.lines import LineFile
from rltemplate.run.logger import Logger
from rltemplate.run.sinks import registry
from rltemplate.run.sinks.registry import (
    ConsoleSink,
    TensorBoardSink,
    rows_so_far,
    videos_so_far,
)
from rltemplate.run.sinks.wandb import WandbSink
from rltemplate.run.sinks.wandb_files import Part, parts_of, upload_command

ROOT = Path(__file__).parents[3]
Row = dict[str, float]


def row(at: int) -> Row:
    extra = {"eval/return": at / 7} if at % 400 == 0 else {}
    return {"env_steps": at, "wall_time_s": at / 10, "loss/policy": at / 3, **extra}


ROWS = [row(at) for at in range(100, 1300, 100)]
VIDEO_STEPS = [400, 800, 1200]


def rows_in(first: int, last: int) -> list[Row]:
    return [row for row in ROWS if first <= row["env_steps"] <= last]


def have(run_dir: Path, until: int) -> None:
    """What a run has on disk after `until` steps, beside its sinks."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / paths.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows_in(0, until)))
    (run_dir / paths.VIDEOS).mkdir(exist_ok=True)
    for at in VIDEO_STEPS:
        if at <= until:
            paths.video_path(run_dir, at).write_bytes(b"frames of %d" % at)


def give(sink: Any, run_dir: Path, first: int, last: int) -> None:
    """Train from `first` to `last`: rows to disk and to the sink, videos too."""
    for row in rows_in(first, last):
        at = int(row["env_steps"])
        have(run_dir, at)
        sink.write(row)
        if at in VIDEO_STEPS:
            sink.video(paths.video_path(run_dir, at), at)


def test_rows_and_videos_of_a_run_are_found(tmp_path: Path) -> None:
    assert (rows_so_far(tmp_path), videos_so_far(tmp_path)) == ([], {})
    have(tmp_path, 800)
    (tmp_path / paths.VIDEOS / ".step_900.mp4.0a1b.part").write_bytes(b"not yet")
    (tmp_path / paths.VIDEOS / "mine.mp4").write_bytes(b"not ours")
    with (tmp_path / paths.METRICS).open("a") as file:
        file.write('{"env_steps": 900, "wall_time_s": 90.0, "loss/policy": null}\n{"env_steps": 1000, "wa')
    rows = rows_so_far(tmp_path)
    assert rows[:-1] == rows_in(0, 800)
    assert rows[-1]["env_steps"] == 900
    assert rows[-1]["loss/policy"] != rows[-1]["loss/policy"]  # not a number
    assert list(videos_so_far(tmp_path)) == [400, 800]


# ---- console


def test_a_plain_log_says_where_it_goes_on_and_tells_time_from_the_new_part(tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w+") as stream:
        console = ConsoleSink(10_000, "ppo", stream, resumed_at=5000)
        # The old part took 500 s for 5000 steps; now it is 100 steps a second.
        console.write({"env_steps": 6000, "wall_time_s": 510.0, "time/steps_per_second": 100.0})
        console.write({"env_steps": 7000, "wall_time_s": 520.0, "time/steps_per_second": 100.0})
        stream.seek(0)
        title, begin, first, second = stream.read().splitlines()
    assert (title, begin) == ("ppo", "goes on after 5000 of 10000 steps")
    assert "left 0:00:40" in first
    assert "left 0:00:30" in second


def test_a_bar_begins_where_the_run_goes_on() -> None:
    lines = lines_of(in_terminal("resume"))
    assert any(" 10% " in line for line in lines)
    assert "goes on after 100 of 1000 steps" in lines
    assert not any(" 10% " in line for line in lines_of(in_terminal("close")))


# ---- TensorBoard

Shown = dict[str, list[tuple[int, Any]]]


def accumulator(folder: Path) -> Shown:
    """Of scalars alone, because this one never purges texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def multiplexer(folder: Path) -> Shown:
    """As `tensorboard --load_fast=false` reads."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    reader = EventMultiplexer(tensor_size_guidance={"scalars": 0, "text": 0})
    reader.AddRunsFromDirectory(str(folder))
    reader.Reload()
    return provided(MultiplexerDataProvider(reader, str(folder)))


def data_server(folder: Path) -> Shown:
    """As `tensorboard` reads unless told otherwise."""
    from tensorboard.data import server_ingester
    from tensorboard.util.grpc_util import ChannelCredsType

    ingester = server_ingester.SubprocessServerDataIngester(
        server_ingester.get_server_binary(),
        str(folder),
        reload_interval=0,
        channel_creds_type=ChannelCredsType.LOCAL,
        samples_per_plugin={"scalars": 0, "text": 0},
    )
    ingester.start()
    end = time.monotonic() + 20
    while time.monotonic() < end:  # it answers before it has read, and says nothing when it has
        if (shown := provided(ingester.data_provider)) and shown == provided(ingester.data_provider):
            time.sleep(0.3)
            if shown == provided(ingester.data_provider):
                break
    return shown


def provided(provider: Any) -> Shown:
    from tensorboard import context
    from tensorboard.data.provider import RunTagFilter

    shown: Shown = {}
    known: dict[str, Any] = {"ctx": context.RequestContext(), "experiment_id": ""}
    for plugin, listed, read in (
        ("scalars", provider.list_scalars, provider.read_scalars),
        ("text", provider.list_tensors, provider.read_tensors),
    ):
        for run, tags in listed(**known, plugin_name=plugin).items():
            wanted = RunTagFilter([run], list(tags))
            got = read(**known, plugin_name=plugin, downsample=10**6, run_tag_filter=wanted)
            for tag, data in got[run].items():
                shown[tag] = [
                    (d.step, d.value if plugin == "scalars" else d.numpy.flatten()[0]) for d in data
                ]
    return shown


READERS: list[Callable[[Path], Shown]] = [accumulator, multiplexer, data_server]
every_reader = pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
CONFIG = {"algo": {"gamma": 0.99}}


def event_sink(run_dir: Path, notes: Notes, resumed_at: int | None = None) -> TensorBoardSink:
    return TensorBoardSink(run_dir / paths.TENSORBOARD, CONFIG, resumed_at, run_dir=run_dir, notify=notes)


def event_files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / paths.TENSORBOARD).iterdir())


def without_break(tmp_path: Path, reader: Callable[[Path], Shown], run_dir: Path) -> Shown:
    """What `reader` shows of the same run that nothing interrupted."""
    other = tmp_path / f"without a break, for {reader.__name__}"
    give(event_sink(other, Notes()), other, 0, 1200)
    shown = reader(other / paths.TENSORBOARD)
    assert [step for step, _ in shown["loss/policy"]] == [row["env_steps"] for row in ROWS]
    if reader is accumulator:
        return shown
    assert [step for step, _ in shown["video/text_summary"]] == VIDEO_STEPS
    assert len(shown["config/text_summary"]) == 1
    texts = [(step, bytes(paths.video_path(run_dir, step))) for step in VIDEO_STEPS]
    return {**shown, "video/text_summary": texts}  # which differ in where the run lies


def comparable(shown: Shown) -> dict[str, list[tuple[int, str]]]:
    """Numbers as what single precision leaves of them, texts as such."""
    return {
        tag: [(at, value.decode() if isinstance(value, bytes) else f"{value:.7g}") for at, value in data]
        for tag, data in shown.items()
    }


def three_parts(run_dir: Path, make: Callable[[Path, Notes, int | None], TensorBoardSink]) -> Notes:
    """A run that is killed in the middle of a write, goes on, is killed, and goes on with a wrong clock."""
    notes = Notes()
    give(make(run_dir, notes, None), run_dir, 0, 900)
    file = event_files(run_dir)[-1]
    file.write_bytes(file.read_bytes()[:-7])  # the video of 800 is far in front of that
    have(run_dir, 600)
    give(make(run_dir, notes, 600), run_dir, 700, 1000)
    have(run_dir, 800)
    with pytest.MonkeyPatch.context() as patch:
        wrong = SimpleNamespace(time=lambda: 1e9, time_ns=lambda: 10**18, monotonic=time.monotonic)
        patch.setattr(registry, "time", wrong)
        give(make(run_dir, notes, 800), run_dir, 900, 1200)
    return notes


@every_reader
def test_tensorboard_shows_each_row_once(tmp_path: Path, reader: Callable[[Path], Shown]) -> None:
    run_dir = tmp_path / "run"
    notes = three_parts(run_dir, event_sink)
    assert len(event_files(run_dir)) == 3
    assert notes == []
    shown = reader(run_dir / paths.TENSORBOARD)
    assert comparable(shown) == comparable(without_break(tmp_path, reader, run_dir))


@pytest.mark.parametrize("reader", READERS[:2], ids=["accumulator", "multiplexer"])
def test_that_check_sees_rows_that_nobody_purged(tmp_path: Path, reader: Callable[[Path], Shown]) -> None:
    run_dir = tmp_path / "run"
    three_parts(run_dir, lambda run_dir, *_: TensorBoardSink(run_dir / paths.TENSORBOARD, CONFIG))
    shown = reader(run_dir / paths.TENSORBOARD)
    steps = [step for step, _ in shown["loss/policy"]]
    assert len(steps) > len(set(steps))


@every_reader
def test_a_row_that_does_not_come_again_is_forgotten(tmp_path: Path, reader: Callable[[Path], Shown]) -> None:
    """The last row of an interruption lies between those that are due."""
    run_dir = tmp_path / "run"
    sink = event_sink(run_dir, Notes())
    give(sink, run_dir, 0, 900)
    sink.write(row(900) | {"env_steps": 950})
    have(run_dir, 900)
    kept = reader(run_dir / paths.TENSORBOARD)
    assert (950, pytest.approx(300.0)) in kept["loss/policy"]
    give(event_sink(run_dir, Notes(), 900), run_dir, 1000, 1200)
    shown = reader(run_dir / paths.TENSORBOARD)
    assert comparable(shown) == comparable(without_break(tmp_path, reader, run_dir))


@every_reader
@pytest.mark.parametrize("what", ["the end of the file", "the folder", "the first of two files"])
def test_what_was_lost_between_two_parts_is_written_again(
    tmp_path: Path, reader: Callable[[Path], Shown], what: str
) -> None:
    run_dir, notes = tmp_path / "run", Notes()
    give(event_sink(run_dir, notes), run_dir, 0, 500)
    give(event_sink(run_dir, notes, 500), run_dir, 600, 900)
    first, second = event_files(run_dir)
    if what == "the folder":
        shutil.rmtree(run_dir / paths.TENSORBOARD)
    elif what == "the first of two files":
        first.unlink()
    else:  # as a power failure leaves it: the size is there, the data is not
        data = second.read_bytes()
        second.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    assert notes == []
    give(event_sink(run_dir, notes, 900), run_dir, 1000, 1200)
    assert len(notes) == 1
    assert "were missing and are written again" in notes[0]
    shown = reader(run_dir / paths.TENSORBOARD)
    assert comparable(shown) == comparable(without_break(tmp_path, reader, run_dir))


@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize("at_row", [800, 900], ids=["before a video", "after a row"])
def test_what_is_deleted_in_mid_run_is_written_anew(tmp_path: Path, what: str, at_row: int) -> None:
    run_dir, notes = tmp_path / "run", Notes()
    give(event_sink(run_dir, notes), run_dir, 0, 500)
    sink = event_sink(run_dir, notes, 500)
    give(sink, run_dir, 600, at_row - 100)
    have(run_dir, at_row)
    sink.write(row(at_row))
    if what == "folder":
        shutil.rmtree(run_dir / paths.TENSORBOARD)
    else:
        event_files(run_dir)[-1].unlink()
    if at_row in VIDEO_STEPS:
        sink.video(paths.video_path(run_dir, at_row), at_row)
    give(sink, run_dir, at_row + 100, 1200)
    assert len(notes) == 1
    assert "was deleted and is written anew" in notes[0]
    for reader in READERS[:2]:
        shown = reader(run_dir / paths.TENSORBOARD)
        assert comparable(shown) == comparable(without_break(tmp_path, reader, run_dir))


def test_what_is_written_anew_keeps_its_place_in_time(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    have(tmp_path, 900)
    sink = event_sink(tmp_path, Notes(), 900)
    sink.write(row(1000))
    sink.close("finished", {})
    reader = EventAccumulator(str(tmp_path / paths.TENSORBOARD))
    reader.Reload()
    times = [event.wall_time for event in reader.Scalars("loss/policy")]
    assert [round(later - times[0], 1) for later in times] == [10.0 * i for i in range(10)]


FULL = """
import resource, sys
from pathlib import Path
from rltemplate.run.lines import LineFile
from rltemplate.run.logger import Logger
from rltemplate.run.sinks.registry import ConsoleSink, TensorBoardSink
run_dir = Path(sys.argv[1])
logger = Logger(
    [ConsoleSink(10), TensorBoardSink(run_dir / "tensorboard", {"long": "x" * 5000}, run_dir=run_dir)],
    LineFile(run_dir / "metrics.jsonl"),
)
resource.setrlimit(resource.RLIMIT_FSIZE, (5500, 5500))  # of any one file: the kernel refuses the rest
for step in range(1, 11):
    logger.log(step, {"m": step / 3})
logger.close("finished")
"""


def test_a_file_that_takes_no_more_costs_no_row(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=100
    )
    assert done.returncode == 0
    assert "switched off" not in done.stderr
    assert [int(row["env_steps"]) for row in rows_so_far(tmp_path)] == list(range(1, 11))
    before = [step for step, _ in accumulator(tmp_path / paths.TENSORBOARD).get("m", [])]
    assert before == list(range(1, 11))
    assert len(list((tmp_path / paths.TENSORBOARD).iterdir())) > 1
    sink = event_sink(tmp_path, Notes(), 10)
    sink.write({"env_steps": 11, "wall_time_s": 1.0, "m": 11 / 3})
    for reader in READERS[:2]:
        shown = reader(tmp_path / paths.TENSORBOARD)
        assert [step for step, _ in shown["m"]] == list(range(1, 12))


@pytest.mark.parametrize("trouble", ["replaced by a file", "permission taken"])
def test_a_folder_that_is_spoilt_in_mid_run_costs_that_sink_alone(tmp_path: Path, trouble: str) -> None:
    if trouble == "permission taken" and os.geteuid() == 0:
        pytest.skip("nothing is forbidden to root")
    folder = tmp_path / paths.TENSORBOARD
    with (tmp_path / "out.txt").open("w+") as stream:
        notes: list[str] = []
        tensorboard = TensorBoardSink(folder, run_dir=tmp_path, notify=notes.append)
        logger = Logger([ConsoleSink(10, "", stream), tensorboard], LineFile(tmp_path / paths.METRICS))
        logger.log(1)
        shutil.rmtree(folder)
        if trouble == "permission taken":
            folder.mkdir(mode=0o500)
        else:
            folder.write_text("in the way")
        logger.log(2)
        logger.log(3)
        logger.close("finished")
        stream.seek(0)
        said = stream.read()
    assert "switched off" not in said
    assert [note.endswith("its rows come later") for note in notes] == [True]
    assert len(rows_so_far(tmp_path)) == 3


# ---- W&B


def wandb_sink(run_dir: Path, notes: Notes, resumed_at: int | None = None) -> WandbSink:
    run_dir.mkdir(exist_ok=True)
    return WandbSink(
        run_dir, "run-1", project="test", config=CONFIG, notify=notes, resumed_at=resumed_at, job_type="train"
    )


def logs(run_dir: Path) -> list[Path]:
    return sorted((run_dir / paths.WANDB).glob("*run-2*/*.wandb"), key=lambda log: log.parent.name[-21:])


def logged(rows: Iterable[dict[str, Any]]) -> list[tuple[int, str, Any]]:
    """(env_steps, name, value) of all that was logged; of a video its digest."""
    return [
        (row["env_steps"], name, value)
        for row in rows
        for name, value in row.items()
        if name in ("loss/policy", "eval/return", "wall_time_s", "video.sha256")
    ]


def flat(line: str) -> dict[str, Any]:
    """A line of history that was uploaded, in the form in which the reader of logs gives it."""
    row: dict[str, Any] = json.loads(line)
    video = row.pop("video", {})
    return row | {f"video.{name}": value for name, value in video.items()}


def all_there_is(run_dir: Path) -> list[tuple[int, str, Any]]:
    import hashlib

    have(run_dir, 1200)
    videos = [
        (at, "video.sha256", hashlib.sha256(path.read_bytes()).hexdigest())
        for at, path in videos_so_far(run_dir).items()
    ]
    return sorted([*logged(ROWS), *videos], key=str)


def end_with_the_machine(sink: WandbSink, run_dir: Path, notes: Notes, torn: int) -> None:
    """Kill the client once all it got is in its log, of which the last `torn` bytes are lost."""
    await_note(sink, notes)
    time.sleep(2.5)  # the client writes its log once a second
    for helper in helpers_of(os.getpid()):
        for pid in [*children_of(helper), helper]:
            os.kill(pid, signal.SIGKILL)
    with (run_dir / paths.WANDB / "client.log").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the last of them is gone
    log = logs(run_dir)[-1]
    os.truncate(log, log.stat().st_size - torn)


def children_of(pid: int) -> list[int]:
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
    found = [[int(number) for number in line.split()] for line in table.splitlines()]
    return [child for child, parent in found if parent == pid]


def close_in_time(sink: WandbSink) -> None:
    start = time.monotonic()
    sink.close("finished", {"eval/return": 1.5})
    assert time.monotonic() - start < 10.0


def wait_until(done: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not done() and time.monotonic() < end:
        time.sleep(0.1)
    assert done()


def killed_and_resumed(run_dir: Path, resumed_at: int | None, torn: int = 9) -> Notes:
    """Offline, killed with the machine after 1000 steps, goes on after 600."""
    notes = Notes()
    sink = wandb_sink(run_dir, notes)
    give(sink, run_dir, 0, 1000)
    end_with_the_machine(sink, run_dir, notes, torn)
    have(run_dir, 600)
    notes.clear()
    sink = wandb_sink(run_dir, notes, resumed_at)
    give(sink, run_dir, 700, 1200)
    close_in_time(sink)
    return notes


def test_offline_parts_hold_each_row_and_video_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    notes = killed_and_resumed(run_dir, 600)
    parts = [Stored(log.parent) for log in logs(run_dir)]
    assert len(parts) == 2
    assert sorted((x for part in parts for x in logged(part.rows)), key=str) == all_there_is(run_dir)
    assert all(part.rows for part in parts)
    # W&B's own step is env_steps, but for videos, which lie one step behind their row.
    steps = [(row["_step"], row["env_steps"], "video.path" in row) for part in parts for row in part.rows]
    assert all(step == at + video for step, at, video in steps)
    assert steps == sorted(steps)
    assert notes[0].startswith("W&B: goes on with run run-1: offline")
    assert notes[-1] == f"W&B: stored offline, upload with: wandb sync {parts[0].folder} {parts[1].folder}"


@pytest.mark.slow
def test_that_check_sees_rows_that_were_logged_twice(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    killed_and_resumed(run_dir, None, torn=0)
    got = [x for log in logs(run_dir) for x in logged(Stored(log.parent).rows)]
    assert len(got) > len(set(got)) == len(all_there_is(run_dir))


@pytest.mark.slow
def test_an_offline_part_makes_up_for_what_earlier_ones_lack(tmp_path: Path) -> None:
    """W&B's folder is deleted between two parts, and the client was off in the first."""
    run_dir, notes = tmp_path / "run", Notes()
    have(run_dir, 900)
    sink = wandb_sink(run_dir, notes, 900)
    give(sink, run_dir, 1000, 1200)
    close_in_time(sink)
    (part,) = [Stored(log.parent) for log in logs(run_dir)]
    assert sorted(logged(part.rows), key=str) == all_there_is(run_dir)


@pytest.mark.slow
def test_the_command_in_the_last_line_uploads_all_parts_as_one_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    notes = killed_and_resumed(run_dir, 600)
    server = Server()
    command = notes[-1].removeprefix("W&B: stored offline, upload with: ")
    bin_dir = str(Path(sys.executable).parent)
    env = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
    env["PATH"] = bin_dir + os.pathsep + env["PATH"]
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = [flat(line) for line in server.api.streams["wandb-history.jsonl"]]
    assert sorted(logged(got), key=str) == all_there_is(run_dir)
    assert all(part.uploaded for part in parts_of(run_dir / paths.WANDB, "run-1"))

    # The torn end was cut off: with it, the second part would not be uploaded.
    first, second = logs(run_dir)
    first.write_bytes(first.read_bytes()[:-9])
    for log in (first, second):
        Path(f"{log}.synced").unlink()
    server.api.streams.clear()
    server.api.config.clear()
    subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True)
    assert len(server.api.streams["wandb-history.jsonl"]) < len(got)
    server.die()


def test_the_command_names_parts_in_the_order_in_which_they_were_made() -> None:
    first = Part(Path("/r/wandb/offline-run-20261121_100000-a/run-a.wandb"), started=100.0)
    second = Part(Path("/r/wandb/offline-run-20261121_110000-a/run-a.wandb"), started=200.0)
    online = Part(Path("/r s/wandb/run-20261121_120000-a/run-a.wandb"), started=300.0)
    assert upload_command([first, second]) == f"wandb sync {first.log.parent} {second.log.parent}"
    # Each by itself where the clock went back, because one call would go by the clock.
    assert upload_command([second, first]) == (
        f"wandb sync {second.log.parent} && wandb sync {first.log.parent}"
    )
    assert upload_command([first, online]) == (
        f"wandb sync --include-online {first.log.parent} '{online.log.parent}'"
    )


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 3, 99], ids=["nothing", "three lines", "everything"])
def test_an_online_part_begins_where_the_server_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """The first part is killed with its machine, and the server got all but the last lines of it."""
    server = Server()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    run_dir, notes = tmp_path / "run", Notes()
    sink = wandb_sink(run_dir, notes)
    give(sink, run_dir, 0, 1000)
    close_in_time(sink)  # for the imitation has no patience
    assert notes[-1].startswith("W&B: all uploaded")
    history = server.api.streams["wandb-history.jsonl"]
    del history[max(0, len(history) - lost) :]
    summary = json.loads(server.api.streams["wandb-summary.json"][-1])
    if history:
        tail = json.loads(history[-1])
        summary |= {"_step": tail["_step"], "env_steps": tail["env_steps"]}
        server.api.streams["wandb-summary.json"] = [json.dumps(summary)]
    else:
        server.api.streams.clear()
    have(run_dir, 600)
    notes.clear()
    sink = wandb_sink(run_dir, notes, 600)
    give(sink, run_dir, 700, 1200)
    await_note(sink, notes)
    close_in_time(sink)
    url = f"{server.url}/me/test/runs/run-1"
    assert notes == [f"W&B: goes on with run run-1: {url}", f"W&B: all uploaded, {url}"]
    got = [flat(line) for line in server.api.streams["wandb-history.jsonl"]]
    assert sorted(logged(got), key=str) == all_there_is(run_dir)
    parts = parts_of(run_dir / paths.WANDB, "run-1")
    assert len(parts) == 2
    assert all(part.uploaded for part in parts)  # nothing is left for `wandb sync`
    server.die()


@pytest.mark.slow
def test_a_part_that_cannot_go_online_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, notes = tmp_path / "run", Notes()
    sink = wandb_sink(run_dir, notes)
    give(sink, run_dir, 0, 600)
    close_in_time(sink)
    server = Server(status=401)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    notes.clear()
    sink = wandb_sink(run_dir, notes, 600)
    give(sink, run_dir, 700, 1200)
    close_in_time(sink)
    server.die()
    parts = [Stored(log.parent) for log in logs(run_dir)]
    assert len(parts) == 2
    assert sorted((x for part in parts for x in logged(part.rows)), key=str) == all_there_is(run_dir)
    assert "offline, because" in notes[0]
    assert notes[1] == "W&B: goes on with run run-1: offline"
    assert notes[-1].endswith(f"wandb sync {parts[0].folder} {parts[1].folder}")


@pytest.mark.slow
def test_a_part_waits_for_the_client_of_the_part_before(tmp_path: Path) -> None:
    run_dir, notes = tmp_path / "run", Notes()
    (run_dir / paths.WANDB).mkdir(parents=True)
    have(run_dir, 600)
    with (run_dir / paths.WANDB / "client.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_SH)  # as an earlier client does while it lives
        sink = wandb_sink(run_dir, notes, 600)
        give(sink, run_dir, 700, 1200)
        time.sleep(3.0)
        assert logs(run_dir) == []
    wait_until(lambda: logs(run_dir) != [])
    await_note(sink, notes)
    close_in_time(sink)
    (part,) = [Stored(log.parent) for log in logs(run_dir)]
    assert sorted(logged(part.rows), key=str) == all_there_is(run_dir)


@pytest.mark.slow
def test_a_row_behind_a_video_is_not_lost(tmp_path: Path) -> None:
    """W&B's step behind a row is the video's; a row that wants it gets the next."""
    run_dir, notes = tmp_path / "run", Notes()
    have(run_dir, 400)
    (run_dir / paths.METRICS).unlink()
    sink = wandb_sink(run_dir, notes)
    for at in (399, 400, 401, 402, 500):
        sink.write({"env_steps": at, "wall_time_s": 0.0, "m": at})
        if at == 400:
            sink.video(paths.video_path(run_dir, 400), 400)
    close_in_time(sink)
    (part,) = [Stored(log.parent) for log in logs(run_dir)]
    assert [(row["env_steps"], row["_step"]) for row in part.rows] == [
        (399, 399),
        (400, 400),
        (400, 401),
        (401, 402),
        (402, 403),
        (500, 500),
    ]


@pytest.mark.slow
def test_damaged_logs_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    run_dir, notes = tmp_path / "run", Notes()
    sink = wandb_sink(run_dir, notes)
    for i in range(1, 1500):  # more than one block of 32 KiB
        sink.write({"env_steps": i, "wall_time_s": 0.0, "m": i / 3})
    close_in_time(sink)
    (log,) = logs(run_dir)
    data, folder = log.read_bytes(), run_dir / paths.WANDB
    assert len(data) > 65536

    def last_row(damaged: bytes) -> int:
        log.write_bytes(damaged)
        parts = parts_of(folder, "run-1")
        if parts:
            # What is left is what was counted, and reading it again changes nothing.
            left = log.read_bytes()
            assert max(row["env_steps"] for row in Stored(log.parent).rows) == parts[0].last_row
            assert parts_of(folder, "run-1") == parts
            assert log.read_bytes() == left
        return parts[0].last_row if parts else -1

    assert last_row(data) == 1499
    assert log.read_bytes() == data
    previous = 1499
    for size in (len(data) - 1, 65536 + 3, 65536, 50_000, 32768, 32760, 20_000):
        found = last_row(data[:size])
        assert 0 < found <= previous
        assert last_row(data[:size] + bytes(3000)) == found
        previous = found
    for size in (0, 3, 7, 12):
        assert last_row(data[:size]) == -1
    flipped = bytearray(data)
    flipped[40_000] ^= 1
    assert 0 < last_row(bytes(flipped)) < 1499
    # A later version of the format is left as it is.
    newer = data[:6] + b"\x07" + data[7:]
    assert last_row(newer) == -1
    assert log.read_bytes() == newer
