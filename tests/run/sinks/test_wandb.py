"""W&B, tried offline and with servers that answer, refuse, hang or die; what is on disk is then uploaded."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import wandb
from conftest import ROOT, alive, run, until
from fed import feed, run_facts

from runlab.config.schema import WandbConfig
from runlab.run import paths
from runlab.run.sinks.wandb import WandbSink

KEY = "0123456789" * 4  # the form of a key, so that the client takes it
SETTINGS: dict[str, Any] = {
    "mode": "auto",
    "project": "test",
    "entity": None,
    "group": None,
    "tags": ["a"],
    "artifact": True,  # which changes nothing without a checkpoint
}


@pytest.fixture(autouse=True)
def _no_key_of_the_person_who_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


EVERYTHING = [(at, at % 400 == 0) for at in range(100, 1300, 100)]


class Run:
    """A run with a W&B sink that is trained from step to step."""

    def __init__(self, run_dir: Path, resumed_at: int | None = None) -> None:
        self.notes, self.waited = list[str](), 0.0
        facts = run_facts(run_dir, resumed_at=resumed_at, notify=self.notes.append)
        self.sink = WandbSink(facts, WandbConfig(enabled=True, **SETTINGS))

    def train(self, first: int, last: int, close: bool = False) -> Run:
        start = time.monotonic()
        feed(self.sink, first, last)
        if close:
            self.sink.close("finished", {"eval/return": 12.5})
        self.waited += time.monotonic() - start
        return self


def test_an_offline_run_is_stored_with_its_videos(tmp_path: Path) -> None:
    run = Run(tmp_path).train(100, 1200, close=True)  # no key anywhere: offline, without asking
    (folder,) = (tmp_path / paths.WANDB).glob("*run-2*")
    videos = sorted(path.read_bytes() for path in folder.rglob("*.mp4"))
    assert videos == sorted(path.read_bytes() for path in (tmp_path / paths.VIDEOS).iterdir())
    assert len({*videos}) == 3
    assert "no API key" in run.notes[0]
    assert run.notes[1:] == [f"W&B: stored offline, upload with: wandb sync {folder}"]


@pytest.mark.long
def test_a_run_of_an_agent_takes_the_id_that_the_sweep_gave_and_uploads_its_policy(
    fork: Path, tmp_path: Path
) -> None:
    """The agent's own functions make the command of examples/wandb-sweep.yaml."""
    from wandb.sdk.launch.sweeps import utils

    sweep: dict[str, Any] = utils.load_sweep_config(str(ROOT / "examples" / "wandb-sweep.yaml")) or {}
    rules = sweep["parameters"]
    drawn = {
        key: rule.get("value", rule.get("min", rule.get("values", [0])[0])) for key, rule in rules.items()
    }
    drawn |= {"env": "CartPole", "debug": "fast", "logger.wandb.artifact": True, "compile": False}
    args = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in drawn.items()}})
    places = {
        "${env}": ["/usr/bin/env"],
        "python": [sys.executable],
        "${args_no_hyphens}": args["args_no_hyphens"],
    }
    command = [word for each in sweep["command"] for word in places.get(each, [each])]
    of_agent = {"WANDB_SWEEP_ID": "s7", "WANDB_RUN_ID": "given1", "WANDB_MODE": "offline"}
    run(tmp_path, *command, status=0, PYTHONPATH=str(fork), **of_agent)
    (stored,) = tmp_path.glob("runs/ppo-CartPole/*/wandb/*run-2*/run-given1.wandb")
    content = stored.read_bytes()
    for text in ("ppo-CartPole-s1-clip_coef0.1-lr1e-4-compile=false-fast", "policy-given1", "step_2048.pt"):
        assert text.encode() in content


class Api(http.server.BaseHTTPRequestHandler):
    """The part of W&B's server that its client needs to start, upload, finish and resume."""

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
        name, variables = question.get("operationName"), question.get("variables", {})
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "me"}}
        history = self.streams.get("wandb-history.jsonl", [])
        if name == "UpsertBucket":
            inserted = not self.config
            self.config[:] = [variables["config"]] if variables.get("config") else self.config
            bucket = {"id": "b", "name": variables.get("name"), "project": project}
            bucket["historyLineCount"] = len(history)
            self.answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": inserted}}})
        elif name == "RunResumeStatus":
            summary = self.streams.get("wandb-summary.json", ["{}"])[-1]
            facts: dict[str, Any] = {"id": "b", "name": "run-1", "displayName": "run-1", "eventsTail": "[]"}
            facts |= {"historyLineCount": len(history), "historyTail": json.dumps(history[-1:])}
            facts |= {"eventsLineCount": 0, "logLineCount": 0, "tags": [], "notes": None}
            facts |= {"summaryMetrics": summary, "wandbConfig": '{"t": 1}', "config": "".join(self.config)}
            self.answer({"data": {"model": {**project, "bucket": facts if self.config else None}}})
        elif name == "CreateRunFiles":
            host = f"http://{self.headers['Host']}"
            urls = [{"name": name, "uploadUrl": f"{host}/{name}"} for name in variables["files"]]
            self.answer({"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": urls}}})
        else:
            self.answer({"data": {"model": {"bucket": None}, "entity": None}})


class Server(http.server.ThreadingHTTPServer):
    """Serves on this machine until it is told to `refuse`, to `hang` or to `die`."""

    daemon_threads = True

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        memory: dict[str, Any] = {"asked": [], "streams": {}, "config": []}
        self.api: Any = type("Handler", (Api,), {"status": 200, **memory})
        super().__init__(("127.0.0.1", 0), self.api)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    def refuse(self) -> None:
        self.api.status = 401

    def hang(self) -> None:
        self.shutdown()  # new connections wait in the backlog; old ones are not read any more
        self.api.do_POST = self.api.do_PUT = lambda handler: threading.Event().wait(60)

    def die(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def rows(self) -> list[tuple[int, bool]]:
        """(env_steps, has a video) of each row that came in, whose metric must be right."""
        rows = [json.loads(line) for line in self.api.streams["wandb-history.jsonl"]]
        assert all(row["m"] == row["env_steps"] / 8 for row in rows)
        return [(row["env_steps"], "video" in row or "video.path" in row) for row in rows]


def serve(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server, to which the client goes from now on with a key."""
    server = Server()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    return server


def upload(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The rows that a good server has after the command that the run showed."""
    server, command = serve(monkeypatch), run.notes[-1].removeprefix("W&B: stored offline, upload with: ")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run_dir = run.sink.facts.run_dir
    subprocess.run(command, shell=True, check=True, cwd=run_dir, env={**os.environ, "PATH": path})
    server.die()
    return server.rows()


def test_a_long_id_of_an_environment_is_cut_to_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "setup", Mock())
    monkeypatch.setattr(wandb, "init", init := Mock())
    for env_id, tag in {"a" * 70 + ":Peg-v0": "Peg-v0", "b" * 70: "b" * 64, "c:Peg-v0": "c:Peg-v0"}.items():
        sink = Run(tmp_path).sink
        sink.facts.config["env"]["id"] = env_id
        sink.open()
        tags = init.call_args.kwargs["tags"]
        assert tags[1] == tag
        wandb.Settings(run_tags=tags)  # would raise for a tag that is too long


@pytest.mark.long
def test_a_server_gets_everything_once_also_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part trains on for 400 steps behind the last checkpoint; its last rows do not arrive."""
    server = serve(monkeypatch)
    run = Run(tmp_path).train(100, 1000, close=True)
    url = f"{server.url}/me/test/runs/run-1"
    assert run.notes == [f"W&B: {url}", f"W&B: all uploaded, {url}"]
    assert server.rows() == EVERYTHING[:10]
    upserts = [q["variables"] for q in server.api.asked if q["operationName"] == "UpsertBucket"]
    given = {name: value for each in upserts for name, value in each.items() if value is not None}
    assert (given["displayName"], given["groupName"]) == ("ppo-CartPole-s1-lr1e-3", "ppo-CartPole-lr1e-3")
    assert (given["jobType"], given["notes"]) == ("train", "why")
    assert given["tags"] == ["ppo", "CartPole-v1", "repeat", "sweep-7", "a"]
    assert given["commit"] == run.sink.facts.git.commit
    assert json.loads(given["config"])["algo"]["value"]["gamma"] == 0.99
    history = server.api.streams["wandb-history.jsonl"]
    del history[-3:]
    server.api.streams["wandb-summary.json"] = history[-1:]
    run = Run(tmp_path, resumed_at=600).train(700, 1200, close=True)
    assert run.notes == [f"W&B: resumed, {url}", f"W&B: all uploaded, {url}"]
    assert server.rows() == EVERYTHING
    server.die()


@pytest.mark.long
@pytest.mark.parametrize(("trouble", "at"), [("refuse", 0), ("hang", 0), ("hang", 600), ("die", 600)])
def test_a_server_in_trouble_costs_ten_seconds_at_most_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, at: int
) -> None:
    server = serve(monkeypatch)
    run = Run(tmp_path).train(100, at)
    getattr(server, trouble)()
    run.train(at + 100, 1200, close=True)
    assert run.waited < 10.0
    assert run.notes[0].startswith("W&B: offline, because " if at == 0 else f"W&B: {server.url}")
    assert upload(run, monkeypatch) == EVERYTHING


def services() -> list[int]:
    """Processes of W&B's service below this one."""
    found = [
        int(pid) for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()
    ]
    return [pid for pid in found if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.long
def test_a_service_process_that_hangs_is_ended_since_python_would_wait_for_it(tmp_path: Path) -> None:
    run = Run(tmp_path).train(100, 600)
    (service,) = services()
    os.kill(service, signal.SIGSTOP)
    run.train(700, 700, close=True)
    assert "WANDB_SERVICE" not in os.environ  # a later run of this process would go to the dead service
    assert run.waited < 10.0
    assert "stored offline" in run.notes[-1]
    until(lambda: not alive(service))


@pytest.mark.long
def test_a_resumed_offline_run_is_uploaded_by_the_command_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")  # an earlier test may have given this process a key
    Run(tmp_path).train(100, 1000, close=True)
    run = Run(tmp_path, resumed_at=600).train(700, 1200, close=True)
    monkeypatch.delenv("WANDB_MODE")
    assert upload(run, monkeypatch) == EVERYTHING
