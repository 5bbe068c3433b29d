"""Several commands that share one search: through its folder, and through a real PostgreSQL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, differences, plain, record, until

from runlab.run import paths
from runlab.run.read import raw_config

RUN = ["env=CartPole", "env.num_envs=2", "algo.num_steps=64", "algo.update_epochs=1", "total_env_steps=6400"]
RUN += [
    "log_every=640",
    "checkpoint_every=640",
    "eval_every=3200",
    "eval_episodes=1",
    "video_every=0",
    "logger=none",
]
RUN += plain(RUN)
WORDS = ["sweep=ppo-rates", "workers=1", "prune=false", *RUN]
PASSWORD = "swordfish7Qz"


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """The address of a PostgreSQL that listens on loopback."""
    programs = Path(shutil.which("initdb") or "/usr/lib/postgresql/15/bin/initdb").resolve().parent
    if not (programs / "postgres").exists():
        pytest.skip("postgresql not installed: apt install postgresql")
    pytest.importorskip("psycopg")
    # It refuses root, and pytest's folders are closed to others.
    folder, user = Path(tempfile.mkdtemp(dir="/tmp")), "nobody" if os.getuid() == 0 else None
    if user:
        shutil.chown(folder, user)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options: dict[str, Any] = {"cwd": folder, "user": user, "stdout": subprocess.DEVNULL}
    password, data = folder / "password", folder / "data"
    password.write_text(PASSWORD)
    password.chmod(0o644)
    make = ["-D", str(data), "--username=lab", "--auth=scram-sha-256", f"--pwfile={password}", "--no-sync"]
    subprocess.run([programs / "initdb", *make], check=True, **options)
    run = ["-D", str(data), "-p", str(port), "-k", str(folder), "-h", "127.0.0.1"]
    server = subprocess.Popen([programs / "postgres", *run], stderr=(folder / "log").open("w"), **options)
    try:
        until(lambda: "ready to accept" in (folder / "log").read_text())
        yield f"postgresql://lab:{PASSWORD}@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
        shutil.rmtree(folder)


def trials_of(runs_dir: Path) -> list[dict[str, Any]]:
    """The ended trials of the only search in a folder, none of which may have another's values."""
    (file,) = runs_dir.glob(f"sweeps/*/{paths.SEARCH}")
    trials: list[dict[str, Any]] = json.loads(file.read_text())["trials"]
    assert len({str(each["params"]) for each in trials}) == len(trials)
    return trials


def runs_of(*runs_dirs: Path) -> list[Path]:
    return [path for each in runs_dirs for path in each.glob("ppo-CartPole/*")]


def at_work(runs_dir: Path) -> bool:
    """True once a run has a checkpoint, and before it has ended."""
    return any(runs_dir.glob("ppo-CartPole/*/checkpoints/*.json"))


def alone(start: Start, tmp_path: Path, run_dir: Path) -> Path:
    """The same run, never stopped."""
    algo = raw_config(run_dir)["algo"]
    keys = ("learning_rate", "ent_coef", "num_minibatches")
    start("train", *RUN, *(f"algo.{key}={algo[key]}" for key in keys), "run_dir=alone", status=0)
    return tmp_path / "alone"


@pytest.mark.long
def test_commands_share_a_search_through_its_folder(start: Start, tmp_path: Path) -> None:
    both = [start("search", *WORDS, "trials=5") for _ in range(2)]
    for each in both:
        each.end(0)
    assert len(trials_of(tmp_path / "runs")) == len(runs_of(tmp_path / "runs")) == 5
    assert all("return" in each.said and "best of 5 trials" in each.said for each in both)


@pytest.mark.long
def test_a_killed_search_goes_on_without_a_trial_lost_or_doubled(start: Start, tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    first = start("search", *WORDS, "trials=2")
    first.until(lambda: at_work(runs_dir))
    (run_dir,) = runs_of(runs_dir)
    first.process.kill()
    until(lambda: record(run_dir)["status"] == "interrupted")  # with its command
    assert "resumed" in start("search", *WORDS, "trials=2", status=0).said
    assert len(trials_of(runs_dir)) == len(runs_of(runs_dir)) == 2
    assert len(record(run_dir)["resumed"]) == 1
    assert differences(run_dir, alone(start, tmp_path, run_dir)) == []


@pytest.mark.long
def test_commands_share_a_search_in_a_database(start: Start, tmp_path: Path, database: str) -> None:
    """Each with runs of its own, as on two machines. One is killed and goes on, and the other one waits."""
    words = [*WORDS, "trials=6", f"storage={database}"]
    one, two = (start("search", *words, f"runs_dir={name}") for name in ("one", "two"))
    one.until(lambda: at_work(tmp_path / "one"))
    (run_dir,) = runs_of(tmp_path / "one")
    one.process.kill()
    until(lambda: record(run_dir)["status"] == "interrupted")
    again = start("search", *words, "runs_dir=one", status=0)
    two.end(0)
    assert "resumed" in again.said
    assert "Warning" not in again.said + two.said
    assert len(trials_of(tmp_path / "one")) == len(runs_of(tmp_path / "one", tmp_path / "two")) == 6
    assert trials_of(tmp_path / "one") == trials_of(tmp_path / "two")
    assert len(record(run_dir)["resumed"]) == 1
    # The password is in no record, log or commit.
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]
    assert not any(PASSWORD in each.said for each in (one, two, again))
    assert differences(run_dir, alone(start, tmp_path, run_dir)) == []


@pytest.mark.long
def test_the_trial_of_a_dead_machine_begins_anew(start: Start, tmp_path: Path, database: str) -> None:
    """Its runs cannot be reached from another one, which waits for signs of life before it takes it up."""
    words = [*WORDS, "trials=1", f"storage={database}", "note=dead", "seed=7"]
    one = start("search", *words, "runs_dir=one")
    one.until(lambda: at_work(tmp_path / "one"))
    one.process.kill()
    said = start("search", *words, "runs_dir=two", status=0).said
    assert "waiting for trials of other commands: 0\n" in said
    (dead,), (anew,) = runs_of(tmp_path / "one"), runs_of(tmp_path / "two")
    assert raw_config(dead)["algo"] == raw_config(anew)["algo"]
    assert [each["number"] for each in trials_of(tmp_path / "two")] == [1]
