"""A power failure loses no file that the next start needs: it was flushed, and so was its name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import power_failure
import pytest
import torch
import yaml
from conftest import Configure, RecordedRun, git

from runlab.config.loading import to_dict
from runlab.errors import ConfigError
from runlab.run import continuation, paths
from runlab.run.checkpoint import Checkpoints, newest_checkpoint
from runlab.run.files import LineFile
from runlab.run.git import snapshot
from runlab.run.job import new_job, resume_job
from runlab.run.read import raw_config
from runlab.run.record import DeterminismFacts, RunRecord
from runlab.run.training_run import TrainingRun
from runlab.run.video.recorder import VideoRecorder


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of which `after` gives what a power failure leaves."""
    monkeypatch.setattr(os, "fsync", os.fsync)
    power_failure.record(tmp_path / "flushed")
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def after(disk: Path) -> Path:
    return power_failure.left(disk.parent / "flushed", disk, disk.parent / "after")


def test_a_run_that_has_begun_is_whole(disk: Path, configure: Configure) -> None:
    """Its configuration too, which nothing else writes."""
    run_dir = disk / "runs" / "ppo-CartPole" / "id"
    job = new_job(configure("algo=ppo", f"run_dir={run_dir}", "logger=none"), [], [], snapshot="{}")
    algorithm: Any = SimpleNamespace(env_steps=20, close=lambda: None)
    with TrainingRun(job) as training:
        training.prepare()
        training.begin(algorithm, DeterminismFacts())
        rows = LineFile(run_dir / paths.METRICS)
        rows.write("a row")
        size = rows.sync()
        Checkpoints(run_dir, to_dict(job.config), keep=2).save(20, {"a": torch.zeros(3)}, None)
        (run_dir / "unflushed").write_text("as config.yaml once was")
        rows.write("a row behind the checkpoint")
        rows.close()  # also without a checkpoint
    left = after(disk) / run_dir.relative_to(disk)
    assert raw_config(left) == yaml.safe_load((run_dir / paths.CONFIG).read_text())
    assert (left / paths.CONFIG).read_bytes() == (run_dir / paths.CONFIG).read_bytes() != b""
    assert RunRecord.read(left) == RunRecord.read(run_dir)
    assert newest_checkpoint(left, pytest.fail) is not None
    assert (left / paths.METRICS).read_bytes() == (run_dir / paths.METRICS).read_bytes()
    assert size == len(b"a row\n")
    assert (left / "unflushed").read_bytes() == b""  # the inverse


def test_a_video_is_whole(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(_: VideoRecorder, job: Any) -> tuple[int, list[str]]:
        job.part.write_bytes(b"a film")
        return 0, []

    monkeypatch.setattr(VideoRecorder, "_draw", draw)
    assert VideoRecorder(lambda _: None, pytest.fail).record(disk / "videos" / "step_5.mp4", 1, [])
    assert (after(disk) / "videos" / "step_5.mp4").read_bytes() == b"a film"


def test_git_flushes_the_code_of_a_run(fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object or a ref that is empty after a power failure damages the user's repository."""
    traced, settings = tmp_path / "trace", tmp_path / "gitconfig"
    settings.write_text(f"[trace2]\n eventTarget = {traced}\n[safe]\n directory = *\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    record = snapshot.commit_run(fork, snapshot.take_snapshot(fork), "flushed", "a: 1")
    assert record.problem is None
    events = traced.read_text()
    assert [part in events for part in ('"update-ref"', '"fsync/hardware-flush"')] == [True, True]
    git(fork, "update-ref", "-d", "refs/runs/flushed")


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\0", b"algo: ppo", None], ids=["empty", "zeros", "cut", "gone"]
)
def test_a_lost_configuration_is_taken_from_the_newest_checkpoint(
    recorded_run: RecordedRun, tmp_path: Path, content: bytes | None
) -> None:
    run_dir = shutil.copytree(recorded_run.run_dir, tmp_path / "run", symlinks=True)
    (run_dir / paths.CONFIG).unlink()
    if content is not None:
        (run_dir / paths.CONFIG).write_bytes(content)
    assert raw_config(run_dir) == raw_config(recorded_run.run_dir)
    job = resume_job(run_dir, [], total_env_steps=384)
    assert job is not None
    part = continuation.find_continuation(job, snapshot.GitRecord()).part
    (note,) = [note for note in part.notes if paths.CONFIG in note]
    assert note.endswith("; the configuration in step_192.pt is taken")
    # Without a whole manifest there is nothing to take it from.
    shutil.rmtree(run_dir / paths.CHECKPOINTS)
    with pytest.raises(ConfigError, match=f"{paths.CONFIG} (is damaged|cannot be read)"):
        raw_config(run_dir)
