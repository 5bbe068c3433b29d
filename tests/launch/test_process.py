"""One run has a folder and a process of its own; `debug=here` needs none."""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import NAME, SHRUNK, Configure, RecordedRun, environment, program, record

from runlab import lossy
from runlab.run import paths
from runlab.run.job import run_folder


def test_folders_are_named_after_what_the_user_chose(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["seed=1", "env=ALE/Pong-v5"]
    assert run_folder(configure(), "id", typed) == tmp_path / "runs" / "ppo-ALE-Pong-v5" / "id"
    assert run_folder(configure("runs_dir=/x", "env=Hopper"), "id", []) == Path("/x/ppo-Hopper/id")
    assert run_folder(configure("run_dir=a/b"), "id", []) == tmp_path / "a" / "b"


@pytest.mark.long
def test_debug_here_stops_at_breakpoints_and_computes_the_same(fork: Path, tmp_path: Path) -> None:
    """The debugger stops inside of the algorithm; without `debug=here` it loses the process before that."""
    small = [*SHRUNK["ppo"], "total_env_steps=64", "eval_every=0", "video_every=0", "logger=none"]
    place = f"{NAME}.algos.ppo"
    questions = f"import {place}\nb {place}.compute_gae\nc\np 6 * 7, gamma\nclear 1\nc\nq\n"

    def train(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "pdb", str(fork / "scripts" / "train.py"), *small, *words]
        variables = environment(PYTHONPATH=str(fork))
        return subprocess.run(
            line, cwd=tmp_path, env=variables, input=questions, capture_output=True, text=True
        )

    assert "(42, 0." in train("debug=here", "run_dir=here").stdout
    assert "(42, 0." not in train("run_dir=away").stdout
    traces = [(tmp_path / name / "trace.jsonl").read_bytes() for name in ("here", "away")]
    assert traces[0] == traces[1] != b""
    assert "debug=here: is for a single run" in train("debug=here", "seed=1,2").stderr
    assert "error: logger.sinks.nowhere: no such" in train("debug=here", "logger.sinks.nowhere=true").stderr


@pytest.fixture(params=["closed pipe", "full disk", "closed terminal"])
def lost(request: pytest.FixtureRequest) -> Iterator[int]:
    """A descriptor that takes nothing."""
    if request.param == "full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe() if request.param == "closed pipe" else pty.openpty()
        os.close(reader)
    yield writer
    os.close(writer)


def test_a_lossy_stream_takes_everything(lost: int, tmp_path: Path) -> None:
    text = "words " * 5000 + "\n"
    plain = io.TextIOWrapper(io.FileIO(lost, "w", closefd=False))
    with pytest.raises(OSError, match=r"Broken pipe|No space left|Input/output error"):
        plain.write(text)
    with lossy(plain) as stream:
        stream.write(text)
        stream.flush()
    with (tmp_path / "file").open("w") as file:
        file.write("before\n")
        file.flush()
        with lossy(file) as stream:
            stream.write(text)
    assert (tmp_path / "file").read_text() == f"before\n{text}"


CHATTY = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Chatty(CartPoleEnv):
    def step(self, action):
        print("words " * 100)
        return super().step(action)

gymnasium.register("Chatty-v0", Chatty)
"""


@pytest.mark.long
@pytest.mark.parametrize("lost", ["closed pipe", "closed terminal"], indirect=True)
def test_a_run_is_finished_though_its_console_is_lost(fork: Path, tmp_path: Path, lost: int) -> None:
    """It starts, too: there are notes about its values. Its environment prints, and knows no better."""
    (tmp_path / "chatty.py").write_text(CHATTY)
    words = [*SHRUNK["ppo"], "total_env_steps=64", "eval_every=0", "video_every=0", "env=chatty:Chatty-v0"]
    command = [*program(fork, "train"), *words, "compile=false", "run_dir=here", "logger=local"]
    variables = environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, env=variables, stdout=lost, stderr=lost)
    assert (done.returncode, record(tmp_path / "here")["status"]) == (0, "finished")
    refused = subprocess.run([*command, "seed=x"], cwd=tmp_path, env=variables, stdout=lost, stderr=lost)
    assert refused.returncode == 2


@pytest.mark.long
def test_a_command_has_succeeded_though_its_notes_are_lost_and_not_without_its_result(
    recorded_run: RecordedRun, tmp_path: Path
) -> None:
    project, run_dir = recorded_run
    shutil.copytree(run_dir, run_dir := tmp_path / "runs" / "ppo-CartPole" / run_dir.name)
    run = f"run={run_dir}"
    # Each with its result in a file, or None where it is what the command prints.
    page = tmp_path / "page.html"
    commands = {
        ("report", f"out={page}"): page,
        ("resume", run): run_dir / paths.RECORD,
        ("evaluate", run, "episodes=1", "json=true"): None,
        ("runs",): None,
    }

    def status(words: tuple[str, ...], stdout: int, stderr: int) -> int:
        command = [*program(project, words[0]), *words[1:]]
        return subprocess.run(command, cwd=tmp_path, stdout=stdout, stderr=stderr, check=False).returncode

    with open("/dev/full", "w") as full, open(os.devnull, "w") as void:  # noqa: PTH123
        for words, file in commands.items():
            assert status(words, full.fileno(), full.fileno()) == (0 if file else 1), words
            assert file.exists() if file else status(words, void.fileno(), full.fileno()) == 0, words
