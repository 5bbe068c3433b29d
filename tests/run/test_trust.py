"""Run folders of other people: what they may name, and where a run that resumes in one may write."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Configure, git, small, write_run

from runlab.config.loading import to_dict, to_yaml
from runlab.config.schema import Config
from runlab.errors import ConfigError
from runlab.run import paths, trust
from runlab.run.git.snapshot import commit_run, take_snapshot
from runlab.run.job import resume_job
from runlab.run.record import RunRecord

SHAPED = {"examples.shaping:Upright": {"gamma": 0.99}}  # no wrapper of Gymnasium


class Own:
    """A run of the repository `project` with a wrapper of the user's."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.config, self.project = config, folder / "project"
        self.project.mkdir()
        (self.project / "code.py").write_text("x = 1\n")
        git(self.project, "init", "-q", "-b", "main")
        git(self.project, "add", "-A")
        git(self.project, "commit", "-q", "-m", "code")
        self.run_dir = write_run(folder / "runs", 1)
        (self.run_dir / paths.CONFIG).write_text(to_yaml(config))
        made = commit_run(self.project, take_snapshot(self.project), self.run_dir.name, to_yaml(config))
        replace(RunRecord.read(self.run_dir), git=made).write(self.run_dir)


@pytest.fixture
def own(tmp_path: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> Own:
    config = configure(*small("ppo", env="Pendulum"), f"runs_dir={tmp_path / 'runs'}")
    made = Own(tmp_path, replace(config, env=replace(config.env, training_wrappers=SHAPED)))
    monkeypatch.setattr(trust, "PROJECT", made.project)
    return made


def test_a_run_of_this_clone_needs_no_trust(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resume_job(own.run_dir, [], total_env_steps=10**9) is not None
    trust.check_config(to_dict(own.config), own.run_dir)
    git(own.project, "gc", "-q", "--prune=now")
    git(own.project, "worktree", "add", "-q", "--detach", str(tmp_path / "linked"))
    monkeypatch.setattr(trust, "PROJECT", tmp_path / "linked")
    trust.check_config(to_dict(own.config), own.run_dir, resumed=True)


def test_a_fetched_run_needs_trust(own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ref has the same configuration, and yet was not made here."""
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(own.project), str(clone))
    git(clone, "fetch", "-q", "origin", "refs/runs/*:refs/runs/*")
    monkeypatch.setattr(trust, "PROJECT", clone)
    with pytest.raises(ConfigError, match=r"env.training_wrappers.examples.shaping:Upright=.*\n.*trust=true"):
        resume_job(own.run_dir, [])
    assert resume_job(own.run_dir, [], trust=True, total_env_steps=10**9) is not None
    assert resume_job(own.run_dir, [], typed=own.config, total_env_steps=10**9) is not None


def test_a_folder_that_names_the_commit_of_another_run_needs_trust(own: Own) -> None:
    other = replace(own.config.env, training_wrappers={"examples.shaping:Upright": {"gamma": 0.5}})
    with pytest.raises(ConfigError, match="trust=true"):
        trust.check_config(to_dict(replace(own.config, env=other)), own.run_dir)
    (own.run_dir / paths.RECORD).unlink()
    with pytest.raises(ConfigError, match="trust=true"):
        trust.check_config(to_dict(own.config), own.run_dir)


@pytest.mark.parametrize("name", ["received.xml", "./received.xml"])
def test_a_model_that_came_along_needs_trust(
    name: str, own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a few lines may have a field of heights of gigabytes."""
    monkeypatch.chdir(own.project)
    (own.project / "received.xml").write_text("<mujoco/>\n")
    env = replace(own.config.env, training_wrappers={}, kwargs={"xml_file": name})
    config = to_dict(replace(own.config, env=env))
    with pytest.raises(ConfigError, match=r"names env\.kwargs\.xml_file="):
        trust.check_config(config, tmp_path / "received")
    git(own.project, "add", "-A")
    git(own.project, "commit", "-q", "-m", "model")
    trust.check_config(config, tmp_path / "received")


@pytest.mark.parametrize("value", [2_000_000_000, [[1, 1e6]], {"speed": -100_001}])
def test_a_number_of_any_size_needs_trust(value: Any, own: Own, tmp_path: Path) -> None:
    """So many frames in a step of MuJoCo's would last for days, and no signal ends it."""
    for argument, refused in ((value, True), ([100_000, math.inf, 5e-324, True, None], False)):
        env = replace(own.config.env, training_wrappers={}, kwargs={"frame_skip": argument})
        config = to_dict(replace(own.config, env=env))
        expected = pytest.raises(ConfigError, match=r"names env\.kwargs\.frame_skip=.*\n.*up to 100,000")
        with expected if refused else contextlib.nullcontext():
            trust.check_config(config, tmp_path / "received")


@pytest.mark.parametrize("run_id", ["../../x", "-d", "", ".", "a b", "a\n"])
def test_an_id_that_is_none_begins_no_ref(run_id: str, own: Own) -> None:
    replace(RunRecord.read(own.run_dir), id=run_id).write(own.run_dir)
    with pytest.raises(ConfigError, match=r"is damaged, .*`\$\.id`"):
        resume_job(own.run_dir, [])


def test_a_resume_writes_where_the_user_says(configure: Configure, tmp_path: Path) -> None:
    """Not through a sink of the received configuration."""
    config = configure(*small("ppo"))
    changed = replace(config, logger=replace(config.logger, sinks={"csv": {"path": "/elsewhere"}}))
    with pytest.raises(ConfigError, match=r"logger\.sinks\.csv"):
        trust.check_config(to_dict(changed), tmp_path, resumed=True)
    trust.check_config(to_dict(changed), tmp_path)  # a film has no sinks


@pytest.mark.parametrize(
    "name",
    [
        *(paths.LOCK, paths.METRICS, paths.TRACE, paths.OLD_TRACE, paths.CONFIG, paths.CHECKPOINTS),
        *(paths.VIDEOS, paths.TENSORBOARD, paths.WANDB, "a/b/c", ".record.json.1.tmp"),
    ],
)
def test_a_link_that_leads_out_of_a_run_folder_is_refused(name: str, own: Own, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    path = own.run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    with pytest.raises(ConfigError, match=f"{name} is a link to {outside}"):
        resume_job(own.run_dir, [])
    assert outside.read_text() == "kept"


def test_with_trust_a_folder_of_a_run_may_be_a_link_and_a_file_may_not(own: Own, tmp_path: Path) -> None:
    """Such as checkpoints that the user keeps on a larger disk."""
    checkpoints = own.run_dir / paths.CHECKPOINTS
    (tmp_path / "larger disk").mkdir()
    checkpoints.symlink_to(tmp_path / "larger disk")
    with pytest.raises(ConfigError, match=r"checkpoints is a link to .*; trust=true writes there"):
        trust.check_folder(own.run_dir)
    trust.check_folder(own.run_dir, trust=True)
    (own.run_dir / paths.METRICS).unlink(missing_ok=True)
    (own.run_dir / paths.METRICS).symlink_to(tmp_path / "metrics")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is a link to"):
        trust.check_folder(own.run_dir, trust=True)


def test_links_of_wandb_are_no_harm_and_pipes_are(own: Own, tmp_path: Path) -> None:
    (own.run_dir / paths.WANDB / "run-1").mkdir(parents=True)
    (own.run_dir / paths.WANDB / "latest-run").symlink_to("run-1")
    (own.run_dir / paths.WANDB / "loop").symlink_to("loop")
    logs = own.run_dir / paths.WANDB / "offline-run-20260101_000000-a" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "core-debug.log")  # which W&B's service has in its cache
    assert resume_job(own.run_dir, [], total_env_steps=10**9) is not None
    os.mkfifo(own.run_dir / paths.OLD_TRACE)
    with pytest.raises(ConfigError, match="is no file"):
        resume_job(own.run_dir, [])


def test_a_file_that_goes_while_a_folder_is_looked_at_is_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command of the same search replaces its files; what comes after it is looked at."""
    gone, pipe = tmp_path / ".search.json.7.tmp", tmp_path / "pipe"
    monkeypatch.setattr(Path, "rglob", lambda *_: iter([gone, pipe]))
    trust.check_folder(tmp_path)
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="pipe is no file"):
        trust.check_folder(tmp_path)
