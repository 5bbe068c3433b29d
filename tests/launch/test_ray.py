"""Sweeps on a real Ray: of this machine, and a cluster of two nodes that is started for these tests.

Ray listens on all interfaces. So all of this happens in a network of its own, which has a loopback only.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import Start, alive, differences, environment, record, runs_of, small, until

from runlab.run import paths

PORT = 6399
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
VARIABLES = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
WORDS = [*small("ppo", "eval_every=0", "video_every=0", "logger=none", "recipe=null", "log_every=640")]
LONG = [*WORDS, "total_env_steps=12800", "checkpoint_every=3200"]


@pytest.fixture(scope="module", autouse=True)
def loopback() -> Iterator[None]:
    """A network of its own for this process and what it starts."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: .venv/bin/python -m pip install ray")
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the program ip, for a network of its own")
    libc, before = ctypes.CDLL(None, use_errno=True), os.open("/proc/self/ns/net", os.O_RDONLY)
    if libc.unshare(NEW_NETWORK) != 0:
        pytest.skip(f"no network of its own here: {os.strerror(ctypes.get_errno())}")
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
    finally:
        assert libc.setns(before, 0) == 0
        os.close(before)


class Ray:
    """A head and another node, with a core each."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short, for its sockets
        self._nodes = list[subprocess.Popen[bytes]]()

    def start(self) -> None:
        """The first start takes seconds."""
        common = ["--port", f"{PORT}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        self._start_node("--head", *common)
        self._start_node(f"--address=127.0.0.1:{PORT}")

    def _start_node(self, *words: str) -> None:
        number = len(self._nodes)
        log = self._folder / f"{number}.log"
        line = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        with log.open("wb") as out:
            node = subprocess.Popen(
                [*line, "--node-ip-address=127.0.0.1", f"--node-name=node-{number}", *words],
                env=environment(**VARIABLES),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._nodes.append(node)
        until(lambda: "Ray runtime started" in log.read_text() or node.poll() is not None)
        assert node.poll() is None, log.read_text()

    def kill_node(self, number: int) -> None:
        """What happens to a node that loses its power, but for its runs: all processes of Ray there end."""
        os.kill(self._nodes[number].pid, signal.SIGKILL)

    def stop(self) -> None:
        for node in reversed(self._nodes):
            node.terminate()
        for node in self._nodes:
            node.wait(timeout=60)
        until(lambda: not subprocess.run(["pgrep", "-f", f"{self._folder}"], capture_output=True).stdout)
        shutil.rmtree(self._folder)


@pytest.fixture
def ray() -> Iterator[Ray]:
    cluster = Ray()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


ON_CLUSTER = ("hydra/launcher=ray", f"hydra.launcher.address=127.0.0.1:{PORT}")


def num_rows(run_dir: Path) -> int:
    path = run_dir / paths.METRICS
    return path.read_text().count("\n") if path.exists() else 0


def process_of(run_dir: Path) -> int:
    """The process of a run that is in progress, which holds its lock; 0 while it writes its number there."""
    return int("".join((run_dir / paths.LOCK).read_text().split()[1:2]) or 0)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def check_like_alone(start: Start, tmp_path: Path, words: list[str], *seeds: int) -> None:
    """The runs of the sweep are those of the same command without a sweep."""
    for run_dir, seed in zip(runs_of(tmp_path), seeds, strict=True):
        start("train", *words, f"seed={seed}", f"run_dir=alone-{seed}", status=0)
        assert differences(run_dir, tmp_path / f"alone-{seed}") == []


@pytest.mark.long
def test_a_sweep_has_the_results_of_runs_without_ray(start: Start, tmp_path: Path) -> None:
    """In the folder of another checkout, whose code must not be taken."""
    (tmp_path / "runlab").mkdir()
    (tmp_path / "runlab" / "__init__.py").write_text("raise SystemExit('the code of another checkout')\n")
    words = [*WORDS, "total_env_steps=1280", "checkpoint_every=640"]
    start("train", *words, "hydra/launcher=ray", "seed=1,2,3", status=0, **VARIABLES)
    check_like_alone(start, tmp_path, words, 1, 2, 3)
    assert differences(*runs_of(tmp_path)[:2]) != []


@pytest.mark.long
def test_jobs_go_on_exactly_when_a_worker_and_a_node_are_lost(ray: Ray, start: Start, tmp_path: Path) -> None:
    sweep = start("train", *LONG, *ON_CLUSTER, "seed=1,2", **VARIABLES)
    sweep.until(lambda: len(runs_of(tmp_path)) == 2 and all(num_rows(each) > 5 for each in runs_of(tmp_path)))
    runs = runs_of(tmp_path)

    before = [process_of(each) for each in runs]
    os.kill(parent_of(before[0]), signal.SIGKILL)
    until(lambda: not alive(before[0]))  # or two processes would write one folder
    sweep.until(lambda: process_of(runs[0]) not in (0, before[0]))
    assert process_of(runs[1]) == before[1]

    processes = [process_of(each) for each in runs]
    ray.kill_node(1)
    until(lambda: not all(map(alive, processes)))
    sweep.end(0)
    check_like_alone(start, tmp_path, LONG, 1, 2)
    resumed = [[part["env_steps"] for part in record(each)["resumed"]] for each in runs]
    assert sum(map(len, resumed)) >= 2
    assert resumed[0]
    assert all(0 < steps < 12800 for each in resumed for steps in each)


@pytest.mark.long
def test_ctrl_c_saves_checkpoints_and_the_sweep_goes_on(ray: Ray, start: Start, tmp_path: Path) -> None:
    """Two jobs run, and one waits for a core."""
    words = [*LONG, *ON_CLUSTER, "seed=1,2,3"]
    sweep = start("train", *words, **VARIABLES)
    sweep.until(lambda: [num_rows(each) > 5 for each in runs_of(tmp_path)] == [True, True])
    sweep.process.send_signal(signal.SIGINT)
    sweep.end(130)
    first = [record(each) for each in runs_of(tmp_path)]
    assert [each["status"] for each in first] == ["interrupted", "interrupted"]
    assert "SIGINT: the run ends after this iteration" in "".join(
        path.read_text() for path in tmp_path.glob("runs/sweeps/*/job_*.log")
    )
    start("train", *words, "sweep=resume", status=0, **VARIABLES)
    check_like_alone(start, tmp_path, LONG, 1, 2, 3)
    resumed = [len(record(each)["resumed"]) for each in runs_of(tmp_path)]
    assert resumed == [1, 1, 0]


@pytest.mark.long
def test_a_job_that_no_node_can_take_keeps_no_sweep_from_its_end(
    ray: Ray, start: Start, tmp_path: Path
) -> None:
    sweep = start("train", *LONG, *ON_CLUSTER, "seed=1,2", "hydra.launcher.num_gpus=1", **VARIABLES)
    logs = "runs/sweeps/*/launcher.log"
    sweep.until(lambda: any("Connect" in path.read_text() for path in tmp_path.glob(logs)))
    time.sleep(5)  # the jobs are in Ray's queue by now
    sweep.process.send_signal(signal.SIGINT)
    sweep.end(130)
    assert runs_of(tmp_path) == []


@pytest.mark.long
def test_ctrl_c_ends_a_sweep_whose_head_of_ray_does_not_answer(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", PORT)):
        sweep = start("train", *LONG, *ON_CLUSTER, "seed=1,2", **VARIABLES)
        logs = "runs/sweeps/*/launcher.log"
        sweep.until(lambda: any("Connect" in path.read_text() for path in tmp_path.glob(logs)))
        sweep.process.send_signal(signal.SIGINT)
        sweep.end(130)
    assert any("no head of Ray answers" in path.read_text() for path in tmp_path.glob(logs))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("address=127.0.0.1:1", "address=127.0.0.1:1: no head of Ray answers: Connection refused"),
        ("address=head", "address=head: expected local, auto or HOST:PORT"),
        ("num_cpus=two", "num_cpus=two: Value 'two' of type 'str' could not be converted to Float"),
        ("num_cpus=nan", "num_cpus=nan: expected a number from 0, whole if above 1"),
        ("num_gpus=1.5", "num_gpus=1.5: expected a number from 0, whole if above 1"),
        ("max_retries=-2", "max_retries=-2: expected a number from -1, whole if above 1"),
    ],
)
def test_wrong_settings_are_refused(start: Start, tmp_path: Path, setting: str, message: str) -> None:
    refused = start("train", "seed=1,2", "hydra/launcher=ray", f"hydra.launcher.{setting}", status=2)
    assert f"error: hydra.launcher.{message}\n" in refused.said
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_more_than_this_machine_has_is_refused(start: Start, tmp_path: Path) -> None:
    words = ["seed=1,2", "hydra/launcher=ray", "hydra.launcher.num_gpus=99"]
    out = start("train", *words, status=1, **VARIABLES).said
    assert "the launcher has failed: hydra.launcher.num_gpus=99: this machine has " in out
