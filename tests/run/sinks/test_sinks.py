"""The sinks, read back from where they wrote: a pseudo terminal, event files, W&B's offline files.

W&B is tried against servers on this machine that refuse, hang, reject, break and die.
"""

from __future__ import annotations

import errno
import fcntl
import http.server
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rltemplate.run.lines import LineFile
from rltemplate.run.logger import Logger
from rltemplate.run.sinks.registry import (
    ConsoleSink,
    Sink,
    TensorBoardSink,
    show_number,
    show_time,
)
from rltemplate.run.sinks.wandb import WandbSink

ROOT = Path(__file__).parents[3]
KEY = "0123456789" * 4  # the form of a key, so that the client takes it

# ---- console


@pytest.mark.parametrize(
    ("value", "shown"),
    [(143.25, "143.2"), (200.0, "200"), (39113.64, "39113.6"), (2.5e-7, "2.5e-07"), (float("nan"), "nan")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert show_number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(8.2, "0:00:08"), (3661, "1:01:01"), (90061, "1d 1:01:01"), (None, "-:--:--")]
)
def test_times_are_clocks(seconds: float | None, shown: str) -> None:
    assert show_time(seconds) == shown


def test_plain_lines_are_aligned_and_tell_the_time_left(tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w+") as stream:
        console = ConsoleSink(100_000, "ppo-CartPole", stream)
        row = {"loss/policy": -0.0123, "policy/entropy": 0.61, "time/steps_per_second": 9812.3}
        console.write({"env_steps": 1000, "wall_time_s": 1.0, **row})
        console.note("a note")
        later = {"episode/return": 143.2, "episode/length": 143.0, "eval/return": 200.0, **row}
        console.write({"env_steps": 21000, "wall_time_s": 3.0, **later})
        console.close("finished", {})
        stream.seek(0)
        title, first, note, second, ending = stream.read().splitlines()
    assert title == "ppo-CartPole"
    assert note == "a note"
    assert ending == "finished after 21000 steps in 0:00:03"
    # 79,000 steps are left, at 10,000 a second as between these two rows.
    assert second == (
        "step  21000/100000   21%  return    143.2  length      143  entropy     0.61"
        "  loss/policy  -0.0123    9,812 steps/s  left 0:00:08  eval 200"
    )
    assert "left 0:00:10" in first  # one row only: 99,000 steps at its 9,812 a second
    assert first.index("left") == second.index("left")
    assert "return        -" in first


CHILD = """
import os, pathlib, sys, time
from rltemplate.run.sinks.registry import ConsoleSink
title = "sac on InvertedDoublePendulum-v5, seed 123456"
run_dir = pathlib.Path.cwd() / "runs" / "sac-InvertedDoublePendulum" / "the-id"
console = ConsoleSink(
    1000, title, sys.stderr, 100 if sys.argv[1] == "resume" else None, run_dir=run_dir
)
for step in (250, 500):
    console.write({"env_steps": step, "wall_time_s": step / 100, "episode/return": step / 4,
                   "time/steps_per_second": 100.0, "loss/policy": 0.25, "loss/critic": 3.5,
                   "policy/entropy": 0.75, **({"eval/return": 77.0} if step == 250 else {})})
    console.note(f"note at {step}")
if sys.argv[1] == "close":
    console.close("finished", {"eval/return": 99.0})
elif sys.argv[1] == "crash":
    raise SystemExit(1)
elif sys.argv[1] == "die":
    os._exit(1)
"""


def in_terminal(ending: str, width: int = 100, term: str = "xterm-256color") -> str:
    """What a child process writes to a real pseudo terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    env = {**os.environ, "TERM": term, "PYTHONPATH": str(ROOT)}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        env.pop(name, None)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, ending], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    written = b""
    while select.select([ours], [], [], 60.0)[0]:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # Linux says so when the last writer has gone
            break
        if not data:
            break
        written += data
    os.close(ours)
    child.wait(10)
    return written.decode()


def lines_of(written: str) -> list[str]:
    """The text without escape sequences; a redrawn line counts each time."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain)]


SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_terminal_gets_a_bar_with_return_speed_and_time_left(width: int) -> None:
    written = in_terminal("close", width)
    lines = lines_of(written)
    bars = [line for line in lines if "50%" in line]
    assert bars
    assert re.search(r"seed 123456 ━.* 50% return +125( +100 steps/s)? left 0:00:05$", bars[-1])
    assert ("steps/s" in bars[-1]) is (width >= 72)
    assert max(map(len, lines)) <= width
    assert (bars[-1].startswith("sac on InvertedDoublePendulum-v5, seed 123456 ")) is (width >= 100)
    assert "note at 500" in lines
    assert "finished after 500 steps in 0:00:05" in lines
    assert any(re.search(r"eval/return +99\b", line) for line in lines)
    assert written.rfind(SHOW_CURSOR) > written.rfind(HIDE_CURSOR) >= 0


def test_a_terminal_shows_what_a_pipe_shows() -> None:
    bars = "\n".join(lines_of(in_terminal("crash", 80)))
    for label, value in {"eval": 77, "entropy": 0.75, "loss/policy": 0.25, "loss/critic": 3.5}.items():
        assert re.search(rf"\b{label} +{value}\b", bars), label


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_the_run_folder_is_shown_at_the_start_and_with_the_next_command_at_the_end(term: str) -> None:
    lines = lines_of(in_terminal("close", 200, term))
    folder = "runs/sac-InvertedDoublePendulum/the-id"
    shown = folder if term != "dumb" else str(Path.cwd() / folder)
    start = next(i for i, line in enumerate(lines) if line.endswith(f"seed 123456: {shown}"))
    assert not any("50%" in line for line in lines[:start])
    assert [line for line in lines if line][-2:] == [shown, "next: make evaluate run=the-id"]


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_the_next_command_fits_how_the_run_ended_and_where_it_lies(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "evaluate" if status == "finished" else "resume"
    for run_dir, named in {
        tmp_path / "runs" / "ppo-CartPole" / "an-id": "an-id",
        tmp_path / "elsewhere" / "ppo-CartPole" / "an-id": "elsewhere/ppo-CartPole/an-id",
        Path("/not here"): "'/not here'",
    }.items():
        stream = io.StringIO()
        ConsoleSink(10, "ppo", stream, run_dir=run_dir).close(status, {})
        assert stream.getvalue().splitlines()[-2:] == [str(run_dir), f"next: make {command} run={named}"]


def test_a_crash_gives_the_cursor_back() -> None:
    written = in_terminal("crash")
    assert written.rfind(SHOW_CURSOR) > written.rfind(HIDE_CURSOR) >= 0
    killed = in_terminal("die")  # nothing can help here; it shows that the check above can fail
    assert killed.rfind(SHOW_CURSOR) < killed.rfind(HIDE_CURSOR)


def test_no_escape_sequences_where_nothing_can_move_a_cursor() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = subprocess.run([sys.executable, "-c", CHILD, "close"], stderr=subprocess.PIPE, text=True, env=env)
    dumb = in_terminal("close", term="dumb")
    for written in (piped.stderr, dumb):
        assert "\x1b" not in written
        assert "step  500/1000   50%  return      125" in written
    assert "\x1b" in in_terminal("close")


# ---- TensorBoard


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    sink = TensorBoardSink(folder, {"algo": {"gamma": 0.99}})
    assert not folder.exists()  # opened by the first row
    for step in (10, 20):
        sink.write({"env_steps": step, "wall_time_s": 1.0, "loss/policy": step / 8})
    sink.video(tmp_path / "v.mp4", 20)
    sink.close("finished", {})
    got = events(folder)
    assert [(e.step, e.value) for e in got.Scalars("loss/policy")] == [(10, 1.25), (20, 2.5)]
    assert sorted(got.Tags()["scalars"]) == ["loss/policy", "wall_time_s"]
    text = got.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"gamma": 0.99' in text
    assert got.Tensors("video/text_summary")[0].tensor_proto.string_val[0].decode().endswith("v.mp4")
    # One flipped bit is noticed by the reader: what was asserted above was really checked.
    file = next(folder.iterdir())
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    assert "video/text_summary" not in events(folder).Tags()["tensors"]


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in (10, 20, 30):
        first.write({"env_steps": step, "wall_time_s": 0.0, "m": 1.0})
    first.close("failed", {})
    again = TensorBoardSink(tmp_path, purge_step=20)
    again.write({"env_steps": 30, "wall_time_s": 0.0, "m": 2.0})
    again.close("finished", {})
    assert [(e.step, e.value) for e in events(tmp_path).Scalars("m")] == [(10, 1.0), (20, 1.0), (30, 2.0)]


@pytest.mark.parametrize(("begins", "ends"), [(10, 40), (30, 60), (30, 90), (30, 100)])
def test_tensorboard_has_every_row_after_a_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: int, ends: int
) -> None:
    """From the first row, in the middle, until the last row, and until the run closes."""
    write, full = os.write, False

    def to_disk(fd: int, data: Any) -> int:
        if not full or fd < 3:
            return write(fd, data)
        if len(data) > 40:
            return write(fd, data[:20])  # a part of it still fits
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", to_disk)
    said: list[str] = []
    sink = TensorBoardSink(tmp_path / "tensorboard", run_dir=tmp_path, notify=said.append)
    logger = Logger([sink], LineFile(tmp_path / "metrics.jsonl"))
    for step in range(10, 100, 10):
        full = begins <= step < ends
        logger.log(step, {"m": step / 8})
    full = False
    logger.close("finished")
    seen = [(event.step, event.value) for event in events(tmp_path / "tensorboard").Scalars("m")]
    assert seen == [(step, step / 8) for step in range(10, 100, 10)]
    assert sum("its rows come later" in text for text in said) == 1
    assert sum("can be written again, no row is lost" in text for text in said) == 1


def test_a_folder_that_cannot_be_made_costs_only_that_sink(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with (tmp_path / "out.txt").open("w+") as stream:
        sinks: list[Sink] = [ConsoleSink(10, "", stream), TensorBoardSink(tmp_path / "tensorboard")]
        logger = Logger(sinks, LineFile(tmp_path / "metrics.jsonl"))
        logger.log(5)
        logger.log(10)
        logger.close("finished")
        stream.seek(0)
        said = stream.read()
    assert said.count("TensorBoardSink is switched off") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


# ---- W&B: reading back


def records(path: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: a 7 byte header, then LevelDB's log format in 32 KiB blocks."""
    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, last
            yield parts
            parts = b""


class Stored:
    """What a W&B run left on disk."""

    def __init__(self, folder: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.run: Any = None
        self.exit_code: int | None = None
        for data in records(next(folder.glob("*.wandb"))):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                self.rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
            elif kind == "summary":
                for i in record.summary.update:
                    self.summary[i.key or ".".join(i.nested_key)] = json.loads(i.value_json)
            elif kind == "run":
                self.run = record.run
                self.config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    def values(self, name: str) -> list[tuple[int, Any]]:
        return [(row["env_steps"], row[name]) for row in self.rows if name in row]


def stored(run_dir: Path) -> list[Stored]:
    return [Stored(folder) for folder in sorted((run_dir / "wandb").glob("*run-2*"))]


@pytest.fixture(autouse=True)
def _no_key_of_the_person_who_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))


class Notes(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


CONFIG = {"algo": {"gamma": 0.99}, "seed": 3}
GIT = {"commit": "0123456789abcdef0123456789abcdef01234567", "ref": "refs/runs/run-1"}


def wandb_sink(run_dir: Path, notes: Notes, run_id: str = "run-1", mode: str = "auto") -> WandbSink:
    return WandbSink(
        run_dir,
        run_id,
        project="test",
        name="a-name",
        group="sweep-7",
        tags=["ppo", "CartPole"],
        job_type="train",
        mode=mode,
        config=CONFIG,
        git=GIT,
        notify=notes,
    )


def write_rows(sink: WandbSink, count: int, start: int = 0) -> None:
    for i in range(start, start + count):
        sink.write({"env_steps": 100 * i, "wall_time_s": i / 10, "loss/policy": i / 3})


def all_rows(count: int) -> list[tuple[int, float]]:
    return [(100 * i, i / 3) for i in range(count)]


def test_offline_run_holds_metrics_configuration_commit_and_video(tmp_path: Path) -> None:
    notes = Notes()
    sink = wandb_sink(tmp_path, notes)  # no key anywhere: offline, without asking
    write_rows(sink, 700)  # more than one block of 32 KiB
    video = tmp_path / "step_300.mp4"
    video.write_bytes(b"frames" * 100)
    sink.video(video, 300)
    sink.close("finished", {"eval/return": 12.5})

    (run,) = stored(tmp_path)
    assert run.values("loss/policy") == all_rows(700)
    assert run.config["algo"] == {"gamma": 0.99}
    assert run.config["seed"] == 3
    assert run.config["git"] == GIT
    assert run.run.git.commit == GIT["commit"]
    assert (run.run.run_id, run.run.display_name, run.run.project) == ("run-1", "a-name", "test")
    assert (run.run.run_group, run.run.job_type, list(run.run.tags)) == (
        "sweep-7",
        "train",
        ["ppo", "CartPole"],
    )
    assert run.exit_code == 0
    assert run.summary["eval/return"] == 12.5
    ((at, shown),) = run.values("video.path")
    assert at == 300
    assert (run.folder / "files" / shown).read_bytes() == video.read_bytes()
    assert any("no API key" in note for note in notes)
    assert notes[-1] == f"W&B: stored offline, upload with: wandb sync {run.folder}"

    # The reader finds nothing that was not logged, and sees a changed value.
    assert run.values("loss/value") == []
    file = next(run.folder.glob("*.wandb"))
    data = file.read_bytes()
    value = json.dumps(100 / 3).encode()
    assert data.count(value) >= 1
    file.write_bytes(data.replace(value, value[:-1] + b"1"))
    assert Stored(run.folder).values("loss/policy") != all_rows(700)


# ---- W&B: servers


class Api(http.server.BaseHTTPRequestHandler):
    """As much of W&B's server as its client needs to start, upload, finish and resume; or just `status`."""

    protocol_version = "HTTP/1.1"
    status = 200
    asked: list[dict[str, Any]]
    uploaded: dict[str, bytes]
    streams: dict[str, list[str]]  # lines by file
    config: list[str]  # the last one, once a run was made

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        self.answer({})

    def do_PUT(self) -> None:
        self.uploaded[self.path.removeprefix("/up/")] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        body = self.body()
        if self.path.endswith("/file_stream"):
            for name, part in (json.loads(body).get("files") or {}).items():
                lines = self.streams.setdefault(name, [])
                lines[part["offset"] :] = part["content"]
        if self.path != "/graphql" or self.status != 200:
            self.answer({})
            return
        question = json.loads(body)
        self.asked.append(question)
        name, given = question.get("operationName"), question.get("variables", {})
        if name == "Viewer":
            self.answer({"data": {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}"}}})
        elif name == "UpsertBucket":
            inserted = not self.config
            self.config[:] = [given["config"]] if given.get("config") else self.config
            project = {"id": "p", "name": given.get("project"), "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": given.get("name"), "project": project}
            bucket["historyLineCount"] = len(self.streams.get("wandb-history.jsonl", []))
            self.answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": inserted}}})
        elif name == "RunResumeStatus":
            project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "me"}}
            self.answer(
                {"data": {"model": {**project, "bucket": self.run_so_far() if self.config else None}}}
            )
        elif name == "CreateRunFiles":
            host = self.headers["Host"]
            files = [{"name": f, "uploadUrl": f"http://{host}/up/{f}"} for f in given["files"]]
            self.answer({"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}})
        else:
            self.answer({"data": {"model": {"bucket": None}, "entity": None}})

    def run_so_far(self) -> dict[str, Any]:
        history = self.streams.get("wandb-history.jsonl", [])
        return {
            "id": "b",
            "name": "run-1",
            "displayName": "a-name",
            "config": self.config[0],
            "wandbConfig": json.dumps({"t": 1}),
            "summaryMetrics": self.streams.get("wandb-summary.json", ["{}"])[-1],
            "historyTail": json.dumps(history[-1:]),
            "eventsTail": "[]",
            "historyLineCount": len(history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "tags": [],
            "notes": None,
        }


class Server(http.server.ThreadingHTTPServer):
    """Serves on this machine until it is told to `die` or to `hang`."""

    daemon_threads = True

    def __init__(self, status: int = 200) -> None:
        self.connections: list[socket.socket] = []
        self.hanging = threading.Event()
        memory: dict[str, Any] = {"asked": [], "uploaded": {}, "streams": {}, "config": []}
        handler = type("Handler", (Api,), {"status": status, **memory})
        self.api: Any = handler
        super().__init__(("127.0.0.1", 0), handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().finish_request(request, client_address)

    def hang(self) -> None:
        self.shutdown()  # new connections wait in the backlog; old ones are not read any more
        self.api.do_POST = self.api.do_PUT = lambda handler: threading.Event().wait(60)

    def die(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@pytest.fixture
def with_key(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    return monkeypatch


def await_note(sink: WandbSink, notes: Notes, timeout_s: float = 40.0) -> None:
    """Wait until the sink has said where it writes; it says things when it is called."""
    end = time.monotonic() + timeout_s
    while not notes and time.monotonic() < end:
        time.sleep(0.05)
        sink.write({"env_steps": -1, "wall_time_s": 0.0})
    assert notes


def close_in_time(sink: WandbSink) -> float:
    start = time.monotonic()
    sink.close("finished", {})
    waited = time.monotonic() - start
    assert waited < 10.0
    return waited


def test_a_server_that_rejects_the_key_means_offline(tmp_path: Path, with_key: pytest.MonkeyPatch) -> None:
    server = Server(status=401)
    with_key.setenv("WANDB_BASE_URL", server.url)
    notes, start = Notes(), time.monotonic()
    sink = wandb_sink(tmp_path, notes)
    write_rows(sink, 50)
    assert time.monotonic() - start < 1.0  # nobody waits for a server before the end
    close_in_time(sink)
    server.die()
    (run,) = stored(tmp_path)  # and no empty folder of the attempt to go online
    assert run.values("loss/policy") == all_rows(50)
    assert "offline" in run.folder.name
    assert "401" in notes[0]


@pytest.mark.slow
def test_a_good_server_gets_everything(tmp_path: Path, with_key: pytest.MonkeyPatch) -> None:
    server = Server()
    with_key.setenv("WANDB_BASE_URL", server.url)
    notes = Notes()
    sink = wandb_sink(tmp_path, notes)
    write_rows(sink, 50)
    (tmp_path / "v.mp4").write_bytes(b"frames")
    sink.video(tmp_path / "v.mp4", 300)
    await_note(sink, notes)
    close_in_time(sink)
    url = f"{server.url}/me/test/runs/run-1"
    assert notes == [f"W&B: {url}", f"W&B: all uploaded, {url}"]
    history = [json.loads(line) for line in server.api.streams["wandb-history.jsonl"]]
    got = [(row["env_steps"], row["loss/policy"]) for row in history if "loss/policy" in row]
    assert got == all_rows(50)
    assert b"frames" in server.api.uploaded.values()
    given: dict[str, Any] = {}
    for question in server.api.asked:  # later ones hold only what changed
        if question["operationName"] == "UpsertBucket":
            given |= {k: v for k, v in question["variables"].items() if v is not None}
    assert (given["groupName"], given["tags"], given["commit"]) == (
        "sweep-7",
        ["ppo", "CartPole"],
        GIT["commit"],
    )
    assert json.loads(given["config"])["git"]["value"] == GIT
    server.die()


@pytest.mark.slow
def test_a_key_in_netrc_means_online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    host = server.url.removeprefix("http://")
    Path(os.environ["NETRC"]).write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    notes = Notes()
    sink = wandb_sink(tmp_path, notes)
    await_note(sink, notes)
    close_in_time(sink)
    server.die()
    assert notes[0] == f"W&B: {server.url}/me/test/runs/run-1"


def bad_url(kind: str) -> tuple[str, Any]:
    """The address of a server that is `kind`, and what must stay alive meanwhile."""
    if kind == "unknown name":
        return "http://no-such-host.invalid", None
    if kind == "error 500":
        server = Server(status=500)
        return server.url, server
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if kind == "refuses":
        listener.close()
        return url, None
    listener.listen(100)  # accepts, and never answers
    return url, listener


BAD = ["refuses", "never answers", "error 500", "unknown name"]


@pytest.mark.slow
@pytest.mark.parametrize("length_s", [0.0, 30.0], ids=["short run", "long run"])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_server_delays_no_run_and_loses_no_row(
    tmp_path: Path, with_key: pytest.MonkeyPatch, kind: str, length_s: float
) -> None:
    url, alive = bad_url(kind)
    with_key.setenv("WANDB_BASE_URL", url)
    notes = Notes()
    sink = wandb_sink(tmp_path, notes)
    start = time.monotonic()
    write_rows(sink, 300)
    assert time.monotonic() - start < 1.0
    if length_s:
        end = time.monotonic() + length_s
        while not notes and time.monotonic() < end:  # found out while training goes on
            time.sleep(0.1)
            sink.write({"env_steps": -1, "wall_time_s": 0.0})
        assert notes
    waited = close_in_time(sink)
    assert waited < (5.0 if length_s else 10.0)
    (run,) = stored(tmp_path)
    assert run.values("loss/policy") == all_rows(300)
    assert run.exit_code == 0
    assert "offline, because" in notes[0]
    assert notes[-1] == f"W&B: stored offline, upload with: wandb sync {run.folder}"
    del alive


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["die", "hang"])
def test_a_server_lost_in_mid_run_delays_the_end_within_the_budget(
    tmp_path: Path, with_key: pytest.MonkeyPatch, fate: str
) -> None:
    server = Server()
    with_key.setenv("WANDB_BASE_URL", server.url)
    notes = Notes()
    sink = wandb_sink(tmp_path, notes)
    write_rows(sink, 100)
    await_note(sink, notes)
    getattr(server, fate)()
    start = time.monotonic()
    write_rows(sink, 200, start=100)
    assert time.monotonic() - start < 1.0
    close_in_time(sink)
    (run,) = stored(tmp_path)
    assert run.values("loss/policy") == all_rows(300)
    assert f"wandb sync --include-online {run.folder}" in notes[-1]


def helpers_of(pid: int) -> list[int]:
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True).stdout
    found = [line.split(None, 2) for line in table.splitlines()]
    return [int(p) for p, parent, *args in found if int(parent) == pid and "wandb_sink" in " ".join(args)]


@pytest.mark.slow
def test_a_stalled_client_blocks_nothing(tmp_path: Path) -> None:
    notes = Notes()
    sink = wandb_sink(tmp_path, notes)
    await_note(sink, notes)
    (helper,) = helpers_of(os.getpid())
    os.kill(helper, signal.SIGSTOP)
    start = time.monotonic()
    write_rows(sink, 50_000)  # far more than pipe and queue hold
    assert time.monotonic() - start < 5.0
    close_in_time(sink)
    assert "rows were dropped" in notes[-1]
    assert helpers_of(os.getpid()) == []


@pytest.mark.slow
def test_a_client_that_dies_is_reported_once(tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w+") as stream:
        console = ConsoleSink(10, "", stream)
        notes = Notes()
        sink = wandb_sink(tmp_path, notes)
        logger = Logger([console, sink], LineFile(tmp_path / "metrics.jsonl"))
        await_note(sink, notes)
        (helper,) = helpers_of(os.getpid())
        os.kill(helper, signal.SIGKILL)
        for step in range(5):
            time.sleep(0.2)
            logger.log(step)
        logger.close("finished")
        stream.seek(0)
        said = stream.read()
    assert said.count("WandbSink is switched off") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 5


@pytest.mark.slow
def test_a_run_folder_deleted_in_mid_run_costs_only_what_lay_there(tmp_path: Path) -> None:
    run_dir, notes = tmp_path / "run", Notes()
    run_dir.mkdir()
    wandb = wandb_sink(run_dir, notes)
    logger = Logger([TensorBoardSink(run_dir / "tensorboard"), wandb], LineFile(run_dir / "metrics.jsonl"))
    logger.log(1)
    await_note(wandb, notes)
    shutil.rmtree(run_dir)
    start = time.monotonic()
    for step in range(2, 8):
        time.sleep(0.1)
        logger.log(step)
    logger.close("finished")
    assert time.monotonic() - start < 10.6
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["env_steps"] for row in rows] == list(range(1, 8))


def test_several_runs_in_one_process_are_several_runs_and_disabled_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = [wandb_sink(tmp_path / f"run-{i}", Notes(), run_id=f"run-{i}") for i in (1, 2)]
    for i, sink in enumerate(sinks):
        write_rows(sink, 10 * (i + 1))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    off = wandb_sink(tmp_path / "run-3", Notes())
    write_rows(off, 5)
    off.close("finished", {})
    assert not (tmp_path / "run-3").exists()
    for sink in sinks:
        close_in_time(sink)
    for i in (1, 2):
        (run,) = stored(tmp_path / f"run-{i}")
        assert run.run.run_id == f"run-{i}"
        assert run.values("loss/policy") == all_rows(10 * i)


RUN_AND_LEAVE = """
import os, sys, time
from pathlib import Path
from rltemplate.run.sinks.wandb import WandbSink
said = []
sink = WandbSink(Path(sys.argv[1]), "r", project="p", config={}, notify=said.append)
end = time.monotonic() + 40
while not said and sys.argv[2] == "kill" and time.monotonic() < end:
    time.sleep(0.05)
    sink.write({"env_steps": -1, "wall_time_s": 0.0})
for i in range(300):
    sink.write({"env_steps": 100 * i, "wall_time_s": 0.0, "loss/policy": i / 3})
if os.fork() == 0:  # as an environment worker does, it keeps our pipes open
    os.close(1); os.close(2)
    time.sleep(20)
    os._exit(0)
time.sleep(0.5)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), 9)
print(time.time())
"""


@pytest.mark.slow
def test_rows_survive_the_kill_of_training(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", RUN_AND_LEAVE, str(tmp_path), "kill"], cwd=ROOT)
    end = time.monotonic() + 15
    while time.monotonic() < end:
        (run,) = stored(tmp_path)
        if run.exit_code is not None:
            break
        time.sleep(0.2)
    assert run.values("loss/policy") == all_rows(300)
    assert run.exit_code == 1  # a run that nobody finished is a failed one


@pytest.mark.slow
def test_leaving_without_close_does_not_hold_the_interpreter(tmp_path: Path) -> None:
    url, alive = bad_url("never answers")
    env = {**os.environ, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}
    command = [sys.executable, "-c", RUN_AND_LEAVE, str(tmp_path), "leave"]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert time.time() - float(done.stdout) < 2.0
    del alive


def test_a_last_iteration_that_ends_late_is_no_more_than_all(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(2048)
    sink.write({"env_steps": 1024, "wall_time_s": 1.0})
    sink.write({"env_steps": 2250, "wall_time_s": 2.0})
    half, late = capsys.readouterr().err.splitlines()
    assert half.startswith("step 1024/2048   50%")
    assert late.startswith("step 2250/2048  100%")
