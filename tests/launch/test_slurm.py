"""Sweeps on a real Slurm of two nodes, which are started for these tests on this machine."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Start, alive, differences, record, runs_of, small, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
SlurmctldPort={ports[0]}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdTimeout=10
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
GresTypes=gpu
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4000
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4000 Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Slurm:
    """A cluster of two nodes with a core each. The node `two` has what it takes for a GPU."""

    def __init__(self, folder: Path) -> None:
        self.conf, self._folder = folder / "slurm.conf", folder

    def ask(self, *words: str) -> str:
        """What a command of Slurm says."""
        return subprocess.check_output(words, env={**os.environ, "SLURM_CONF": str(self.conf)}, text=True)

    def start(self) -> None:
        munge = self._folder / "munge"
        munge.mkdir()
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o400)
        host = platform.node().partition(".")[0]
        self.conf.write_text(CONFIG.format(host=host, folder=self._folder, ports=free_ports(3)))
        (self._folder / "gres.conf").write_text("NodeName=two Name=gpu File=/dev/null\n")
        self.ask(
            *("munged", "--force", f"--socket={munge}/socket", f"--key-file={munge}/key"),
            *(f"--log-file={munge}/log", f"--pid-file={munge}/munged.pid", f"--seed-file={munge}/seed"),
        )
        self.ask("slurmctld", "-L", f"{self._folder}/slurmctld.log")
        for node in ("one", "two"):
            self.start_node(node)

    def start_node(self, node: str) -> None:
        self.ask("slurmd", "-N", node, "-L", f"{self._folder}/{node}.log")
        until(lambda: self.ask("sinfo", "--noheader", "--format=%t", f"--nodes={node}").strip() == "idle")

    def lose_node(self, node: str) -> None:
        """End all processes of a node, as a power failure does."""
        marks = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.conf}".encode()}
        pids = {int((self._folder / f"slurmd-{node}.pid").read_text())}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if marks <= {*path.read_bytes().split(b"\0")}:
                    status = dict(re.findall(r"(\w+):\s+(\S+)", (path.parent / "status").read_text()))
                    above = int(status["PPid"])
                    pids.add(int(path.parent.name))
                    pids |= {above} if "slurm" in Path(f"/proc/{above}/comm").read_text() else set()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none lives to report how another has ended
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        until(lambda: not any(map(alive, pids)))

    def jobs(self) -> dict[str, str]:
        """The node of each job that runs."""
        listed = self.ask("squeue", "--noheader", "--array", "--states=running", "--format=%i %N")
        return dict(line.split() for line in listed.splitlines())

    def stop(self) -> None:
        """End its jobs and all of its processes."""
        self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        pids = [pid for path in self._folder.rglob("*.pid") if alive(pid := int(path.read_text()))]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        until(lambda: not any(map(alive, pids)))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: apt install slurmctld slurmd slurm-client munge")
    if os.getuid() != 0:
        pytest.skip("slurmd starts jobs as root only")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def words(*more: str) -> list[str]:
    return [*small("ppo", "eval_every=0", "video_every=0", "logger=none", "recipe=null"), *more]


LAUNCHER = ("hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1")


def rows_written(tmp_path: Path) -> int:
    return sum(path.read_text().count("\n") for path in tmp_path.glob("runs/*/*/metrics.jsonl"))


@pytest.mark.long
def test_a_sweep_has_the_results_of_runs_without_slurm(slurm: Slurm, start: Start, tmp_path: Path) -> None:
    overrides = words("total_env_steps=160", "log_every=32", "checkpoint_every=64")
    out = start("train", *overrides, *LAUNCHER, "seed=1,2,3", status=0, SLURM_CONF=str(slurm.conf)).said
    assert "#2: pending, Slurm's job " in out  # there are two cores
    assert not any(text in out for text in ("sacct", "accounting"))
    runs = runs_of(tmp_path)
    assert len(list(runs[0].parent.parent.glob("sweeps/*/submitit/*_0/*_log.out"))) == 1
    check_like_alone(start, tmp_path, overrides, set())
    assert differences(runs[0], runs[1]) != []


@pytest.mark.long
def test_a_job_that_slurm_takes_away_goes_on_exactly(slurm: Slurm, start: Start, tmp_path: Path) -> None:
    """Once for a job of its own choice, and once more because the time of this job is over."""
    overrides = words("total_env_steps=16000", "log_every=1600", "checkpoint_every=8000", "seed=1")
    sweep = start("train", *overrides, *LAUNCHER, "--multirun", SLURM_CONF=str(slurm.conf))
    sweep.until(lambda: rows_written(tmp_path) >= 2)
    job = slurm.ask("squeue", "--noheader", "--format=%A").strip()
    slurm.ask("scontrol", "requeue", job)
    sweep.until(lambda: f"#0: requeued, Slurm's job {job}" in sweep.said)
    before = rows_written(tmp_path)
    sweep.until(lambda: rows_written(tmp_path) > before + 1)
    slurm.ask("scancel", "--signal=USR2", job)  # what Slurm sends `signal_delay_s` before the time limit
    sweep.end(0)
    (run_dir,) = runs_of(tmp_path)
    first, second = (part["env_steps"] for part in record(run_dir)["resumed"])
    assert 0 < first < second < 16000
    start("train", *overrides, "run_dir=alone", status=0)
    assert differences(run_dir, tmp_path / "alone") == []


@pytest.mark.long
def test_a_job_of_a_drained_node_goes_on_exactly_on_the_other_one(
    slurm: Slurm, start: Start, tmp_path: Path
) -> None:
    overrides = words("total_env_steps=16000", "log_every=1600", "checkpoint_every=8000")
    sweep = start("train", *overrides, *LAUNCHER, "seed=1,2", SLURM_CONF=str(slurm.conf))
    sweep.until(lambda: rows_written(tmp_path) >= 4 and len(slurm.jobs()) == 2)
    (job,) = (name for name, node in slurm.jobs().items() if node == "two")
    try:
        slurm.ask("scontrol", "update", "NodeName=two", "State=DRAIN", "Reason=test")
        slurm.ask("scontrol", "requeue", job)
        number = int(job.partition("_")[2])
        sweep.until(lambda: f"#{number} seed={number + 1}: requeued, Slurm's job {job}" in sweep.said)
        sweep.until(lambda: slurm.jobs().get(job) == "one")
        sweep.end(0)
    finally:
        slurm.ask("scontrol", "update", "NodeName=two", "State=RESUME")
    check_like_alone(start, tmp_path, overrides, {number})


@pytest.mark.long
def test_a_job_of_a_lost_node_goes_on_exactly_on_the_other_one(
    slurm: Slurm, start: Start, tmp_path: Path
) -> None:
    overrides = words("total_env_steps=16000", "log_every=1600", "checkpoint_every=3200")
    sweep = start("train", *overrides, *LAUNCHER, "seed=1,2", SLURM_CONF=str(slurm.conf))
    sweep.until(lambda: rows_written(tmp_path) >= 8 and len(slurm.jobs()) == 2)
    (job,) = (name for name, node in slurm.jobs().items() if node == "two")
    slurm.lose_node("two")
    try:
        sweep.until(lambda: slurm.jobs().get(job) == "one")
        sweep.end(0)
    finally:
        slurm.start_node("two")
    check_like_alone(start, tmp_path, overrides, {int(job.partition("_")[2])})


def check_like_alone(start: Start, tmp_path: Path, overrides: list[str], resumed: set[int]) -> None:
    """The jobs are equal to runs without Slurm, and those that were taken away were resumed in the middle."""
    for number, run_dir in enumerate(runs_of(tmp_path)):
        start("train", *overrides, f"seed={number + 1}", f"run_dir=alone-{number}", status=0)
        assert differences(run_dir, tmp_path / f"alone-{number}") == []
        parts = [part["env_steps"] for part in record(run_dir)["resumed"]]
        assert len(parts) == (number in resumed)
        assert all(0 < steps < 16000 for steps in parts)


@pytest.mark.long
def test_a_job_that_asks_for_a_gpu_gets_a_node_that_has_one(
    slurm: Slurm, start: Start, tmp_path: Path
) -> None:
    """Slurm takes /dev/null for it, and says which one a job may use."""
    overrides = words("total_env_steps=64", "log_every=32", "checkpoint_every=0", "seed=1,2")
    sweep = start(
        "train", *overrides, *LAUNCHER, "hydra.launcher.gpus_per_node=1", SLURM_CONF=str(slurm.conf)
    )
    nodes: set[str] = set()
    while sweep.process.poll() is None:
        nodes |= {*slurm.jobs().values()}
    sweep.end(0)
    assert nodes == {"two"}
    assert [record(run_dir)["environment"]["CUDA_VISIBLE_DEVICES"] for run_dir in runs_of(tmp_path)] == [
        "0",
        "0",
    ]
