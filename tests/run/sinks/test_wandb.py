"""W&B, tried offline and with servers that answer, refuse, hang or die; what is on disk is then uploaded."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, feed, run_facts

from rltemplate.config.schema import WandbConfig
from rltemplate.run import paths
from rltemplate.run.sinks.wandb import WandbSink

KEY = "0123456789" * 4  # the form of a key, so that the client takes it
SETTINGS: dict[str, Any] = {"mode": "auto", "project": "test", "entity": None, "group": None, "tags": ["a"]}


@pytest.fixture(autouse=True)
def _no_key_of_the_person_who_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def folders(run_dir: Path) -> list[Path]:
    return sorted((run_dir / paths.WANDB).glob("*run-2*"), key=lambda folder: folder.name[-21:])


def logged(rows: Iterable[dict[str, Any]]) -> list[tuple[int, bool]]:
    """(env_steps, has a video) of each row, whose metric must be right."""
    assert all(row["m"] == row["env_steps"] / 8 for row in rows)
    return [(row["env_steps"], "video" in row or "video.path" in row) for row in rows]


EVERYTHING = [(at, at % 400 == 0) for at in range(100, 1300, 100)]


class Run:
    """A run with a W&B sink that is trained from step to step."""

    def __init__(self, run_dir: Path, resumed_at: int | None = None) -> None:
        self.notes, self.waited = list[str](), 0.0
        facts = run_facts(run_dir, resumed_at=resumed_at, notify=self.notes.append)
        self.sink = WandbSink(facts, WandbConfig(enabled=True, **SETTINGS))

    def train(self, first: int, last: int) -> Run:
        start = time.monotonic()
        feed(self.sink, first, last)
        self.waited += time.monotonic() - start
        return self

    def close(self) -> Run:
        start = time.monotonic()
        self.sink.close("finished", {"eval/return": 12.5})
        self.waited += time.monotonic() - start
        return self


def test_an_offline_run_is_stored_with_its_videos(tmp_path: Path) -> None:
    run = Run(tmp_path).train(100, 1200).close()  # no key anywhere: offline, without asking
    (folder,) = folders(tmp_path)
    videos = sorted(path.read_bytes() for path in folder.rglob("*.mp4"))
    assert videos == [b"frames of 1200", b"frames of 400", b"frames of 800"]
    assert "no API key" in run.notes[0]
    assert run.notes[1:] == [f"W&B: stored offline, upload with: wandb sync {folder}"]


class Api(http.server.BaseHTTPRequestHandler):
    """As much of W&B's server as its client needs to start, upload, finish and resume; or just `status`."""

    protocol_version = "HTTP/1.1"
    status: int
    asked: list[dict[str, Any]]
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

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer({})

    do_GET = do_PUT

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.endswith("/file_stream"):
            for name, part in (json.loads(body).get("files") or {}).items():
                self.streams.setdefault(name, [])[part["offset"] :] = part["content"]
        if self.path != "/graphql" or self.status != 200:
            self.answer({})
            return
        question = json.loads(body)
        self.asked.append(question)
        name, given = question.get("operationName"), question.get("variables", {})
        project = {"id": "p", "name": given.get("project"), "entity": {"id": "e", "name": "me"}}
        history = self.streams.get("wandb-history.jsonl", [])
        if name == "UpsertBucket":
            inserted = not self.config
            self.config[:] = [given["config"]] if given.get("config") else self.config
            bucket = {"id": "b", "name": given.get("name"), "project": project}
            bucket["historyLineCount"] = len(history)
            self.answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": inserted}}})
        elif name == "RunResumeStatus":
            known: dict[str, Any] = {"id": "b", "name": "run-1", "displayName": "run-1", "eventsTail": "[]"}
            known |= {"historyLineCount": len(history), "historyTail": json.dumps(history[-1:])}
            known |= {"eventsLineCount": 0, "logLineCount": 0, "tags": [], "notes": None}
            known |= {"summaryMetrics": self.streams.get("wandb-summary.json", ["{}"])[-1]}
            known |= {"wandbConfig": json.dumps({"t": 1}), "config": "".join(self.config)}
            self.answer({"data": {"model": {**project, "bucket": known if self.config else None}}})
        elif name == "CreateRunFiles":
            urls = [{"name": f, "uploadUrl": f"http://{self.headers['Host']}/{f}"} for f in given["files"]]
            self.answer({"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": urls}}})
        else:
            self.answer({"data": {"model": {"bucket": None}, "entity": None}})


class Server(http.server.ThreadingHTTPServer):
    """Serves on this machine until it is told to `die` or to `hang`."""

    daemon_threads = True

    def __init__(self, status: int = 200) -> None:
        self.connections: list[socket.socket] = []
        memory: dict[str, Any] = {"asked": [], "streams": {}, "config": []}
        self.api: Any = type("Handler", (Api,), {"status": status, **memory})
        super().__init__(("127.0.0.1", 0), self.api)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

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

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.api.streams["wandb-history.jsonl"]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Server]:
    """Starts a server, to which the client then goes with a key."""

    def start(status: int = 200) -> Server:
        server = Server(status)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        return server

    return start


def upload(run: Run, serve: Callable[..., Server]) -> list[tuple[int, bool]]:
    """What a good server has after the command that the run showed."""
    server, command = serve(), run.notes[-1].removeprefix("W&B: stored offline, upload with: ")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run_dir = run.sink.facts.run_dir
    subprocess.run(command, shell=True, check=True, cwd=run_dir, env={**os.environ, "PATH": path})
    server.die()
    return logged(server.rows())


@pytest.mark.long
def test_a_server_gets_everything_once_also_of_a_resumed_run(
    tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """The first part trains on for 400 steps behind the last checkpoint; its last rows do not arrive."""
    server = serve()
    run = Run(tmp_path).train(100, 1000).close()
    url = f"{server.url}/me/test/runs/run-1"
    assert run.notes == [f"W&B: {url}", f"W&B: all uploaded, {url}"]
    assert logged(server.rows()) == EVERYTHING[:10]
    upserts = [q["variables"] for q in server.api.asked if q["operationName"] == "UpsertBucket"]
    given = {name: value for each in upserts for name, value in each.items() if value is not None}
    assert (given["groupName"], given["commit"]) == ("sweep-7", run.sink.facts.git["commit"])
    assert json.loads(given["config"])["algo"]["value"] == {"gamma": 0.99}
    history = server.api.streams["wandb-history.jsonl"]
    del history[-3:]
    server.api.streams["wandb-summary.json"] = history[-1:]
    run = Run(tmp_path, resumed_at=600).train(700, 1200).close()
    assert run.notes == [f"W&B: resumed, {url}", f"W&B: all uploaded, {url}"]
    assert logged(server.rows()) == EVERYTHING
    server.die()


def bad_url(kind: str) -> tuple[str, Any]:
    """The address of a server that is `kind`, and what must stay alive meanwhile."""
    if kind.isdigit():
        server = Server(int(kind))
        return server.url, server
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if kind == "refuses":
        listener.close()
    else:
        listener.listen(100)  # accepts, and never answers
    return url, listener


@pytest.mark.long
@pytest.mark.parametrize("kind", ["refuses", "never answers", "401"])
def test_a_bad_server_costs_ten_seconds_at_most_and_no_row(
    tmp_path: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    url, alive = bad_url(kind)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", url)
    run = Run(tmp_path).train(100, 1200).close()
    assert run.waited < 10.0
    assert run.notes[0].startswith("W&B: offline, because ")
    del alive
    assert upload(run, serve) == EVERYTHING


@pytest.mark.long
@pytest.mark.parametrize("fate", ["die", "hang", "stopped client"])
def test_a_server_or_client_lost_in_mid_run_costs_ten_seconds_at_most(
    tmp_path: Path, serve: Callable[..., Server], fate: str
) -> None:
    server = serve()
    run = Run(tmp_path).train(100, 600)
    if fate == "stopped client":
        ps = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True)
        commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in map(int, ps.stdout.split())}
        alive = {pid: path.read_text(errors="replace") for pid, path in commands.items() if path.exists()}
        pid = next(pid for pid, command in alive.items() if "wandb-core" in command)
        os.kill(pid, signal.SIGSTOP)
    else:
        getattr(server, fate)()
    run.train(700, 1200).close()
    assert run.waited < 10.0
    (folder,) = folders(tmp_path)
    assert run.notes[-1] == f"W&B: stored offline, upload with: wandb sync --include-online {folder}"
    if fate == "stopped client":
        os.kill(pid, signal.SIGKILL)
    else:
        assert upload(run, serve) == EVERYTHING


KILLED = """
import os, signal, sys
from pathlib import Path
from conftest import feed, run_facts
from rltemplate.config.schema import WandbConfig
from rltemplate.run.sinks.wandb import WandbSink
known = {"entity": None, "group": None, "tags": []}
settings = WandbConfig(enabled=True, mode="auto", project="test", **known)
feed(WandbSink(run_facts(Path(sys.argv[1])), settings), 100, 1000)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_killed_and_resumed_offline_run_is_uploaded_by_the_command_that_is_shown(
    tmp_path: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")  # an earlier test may have given this process a key
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, env=env)
    run = Run(tmp_path, resumed_at=600).train(700, 1200).close()
    assert len(folders(tmp_path)) == 2
    monkeypatch.delenv("WANDB_MODE")
    assert upload(run, serve) == EVERYTHING
