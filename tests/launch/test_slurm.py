"""Sweeps on a real Slurm of one node, which is started for these tests."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Start, alive, differences, record, small, until

from runlab.run import paths
from runlab.run.record import SweepRecord

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=8000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Slurm:
    """A node that is its own cluster."""

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
        self.conf.write_text(CONFIG.format(host=host, folder=self._folder, ports=free_ports(2)))
        self.ask(
            *("munged", "--force", f"--socket={munge}/socket", f"--key-file={munge}/key"),
            *(f"--log-file={munge}/log", f"--pid-file={munge}/munged.pid", f"--seed-file={munge}/seed"),
        )
        for name in ("slurmctld", "slurmd"):
            self.ask(name, "-L", f"{self._folder}/{name}.log")
        until(lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%t"))

    def stop(self) -> None:
        """End its jobs and all of its processes."""
        self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        pids = [int(path.read_text()) for path in self._folder.rglob("*.pid")]
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


def runs_of(tmp_path: Path) -> list[Path]:
    """The folders of the runs of the only sweep, by number."""
    (path,) = tmp_path.glob(f"runs/sweeps/*/{paths.SWEEP_INDEX}")
    run_dirs = [job.run(path.parent) for job in SweepRecord.read(path.parent).jobs]
    return [run_dir for run_dir in run_dirs if run_dir is not None]


def rows_written(tmp_path: Path) -> int:
    return sum(path.read_text().count("\n") for path in tmp_path.glob("runs/*/*/metrics.jsonl"))


@pytest.mark.long
def test_a_sweep_has_the_results_of_runs_without_slurm(slurm: Slurm, start: Start, tmp_path: Path) -> None:
    overrides = words("total_env_steps=160", "log_every=32", "checkpoint_every=64")
    out = start("train", *overrides, *LAUNCHER, "seed=1,2,3", status=0, SLURM_CONF=str(slurm.conf)).said
    assert "#2: pending, Slurm's job " in out  # the node has two cores
    assert not any(text in out for text in ("sacct", "accounting"))
    runs = runs_of(tmp_path)
    assert len(list(runs[0].parent.parent.glob("sweeps/*/submitit/*_0/*_log.out"))) == 1
    for seed in (1, 2):
        start("train", *overrides, f"seed={seed}", f"run_dir=alone-{seed}", status=0)
        assert differences(runs[seed - 1], tmp_path / f"alone-{seed}") == []
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
