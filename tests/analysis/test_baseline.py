"""A run with a baseline begins only if it changes one thing, and a refused one leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import RecordedRun, run_train, small

from rltemplate.analysis.baseline import check_baseline
from rltemplate.analysis.runs import load_run
from rltemplate.run import paths
from rltemplate.types import ConfigError

WORDS = small("ppo", "total_env_steps=192", "eval_every=0", "video_every=0", "logger=none")


class Place:
    """A copy of a project and of the folder of a run that was made with it, to be changed."""

    def __init__(self, recorded: RecordedRun, root: Path) -> None:
        self.run_dir = root / "runs" / "ppo-CartPole" / load_run(recorded.run_dir).id
        shutil.copytree(recorded.run_dir, self.run_dir)
        self.project = Path(shutil.copytree(recorded.project, root / "project"))
        self.against = f"against {self.run_dir.name}: "

    def edit_record(self, **facts: Any) -> None:
        record = self.run_dir / paths.RECORD
        record.write_text(json.dumps(json.loads(record.read_text()) | facts))

    def check(self, *changes: dict[str, Any]) -> list[str]:
        """Check a job for each of several changes to the baseline's configuration, given as words."""
        configs = []
        for change in changes:
            config = yaml.safe_load((self.run_dir / paths.CONFIG).read_text())
            config |= {"baseline": self.run_dir.name, "runs_dir": str(self.run_dir.parents[1])}
            config["algo"]["gamma"] = change.get("algo.gamma", config["algo"]["gamma"])
            configs.append(config | {k: v for k, v in change.items() if "." not in k})
        words = [[*WORDS, *(f"{key}={value}" for key, value in change.items())] for change in changes]
        return check_baseline(self.project, configs, words)


@pytest.fixture
def place(recorded_run: RecordedRun, tmp_path: Path) -> Place:
    return Place(recorded_run, tmp_path)


def test_one_change_is_said_in_a_line_and_two_are_refused(place: Place) -> None:
    for change, expected in (
        ({"algo.gamma": 0.9, "seed": 7}, "algo.gamma 0.98 -> 0.9"),
        ({"note": "why", "trace": "step"}, "same experiment"),
        ({"baseline": place.run_dir.name[-6:]}, "same experiment"),
    ):
        assert place.check(change) == [f"{place.against}{expected}"]
    assert place.check({"baseline": None, "algo.gamma": 0.9, "num_threads": 2}) == []
    two = "2 things differ: algo.gamma 0.98 -> 0.9; num_threads 1 -> 2"
    with pytest.raises(ConfigError, match=two):
        place.check({"algo.gamma": 0.9, "num_threads": 2})
    (warning,) = place.check({"algo.gamma": 0.9, "num_threads": 2, "baseline_check": "warn"})
    assert warning.startswith(f"warning: {place.against}{two}; what a")
    with pytest.raises(ConfigError, match=r"^baseline=nope: no such run under .*the newest is "):
        place.check({"baseline": "nope"})
    with pytest.raises(ConfigError, match="all jobs of a sweep have one"):
        place.check({}, {"baseline": "nope"})


def test_this_machine_and_its_packages_are_compared(place: Place) -> None:
    record = json.loads((place.run_dir / paths.RECORD).read_text())
    for section, fact, named in (
        ("versions", {"torch": "1.0"}, "versions (torch 1.0 -> "),
        ("machine", {"cpu": "abacus"}, "hardware (cpu abac"),
    ):
        place.edit_record(**record | {section: record[section] | fact})
        (line,) = place.check({})
        assert named in line
    place.edit_record(**record | {"status": "failed", "git": {"tree": "f" * 40, "commit": "e" * 40}})
    unknown, failed, line = place.check({"algo.gamma": 0.9})
    assert failed == f"note: baseline: {place.run_dir.name} ended failed"
    assert "this repository does not have both snapshots" in unknown
    assert line == f"{place.against}algo.gamma 0.98 -> 0.9"


def test_a_sweep_over_one_key_is_fine_and_over_two_is_not(place: Place) -> None:
    jobs = [{"algo.gamma": gamma, "seed": seed} for gamma in (0.9, 0.95) for seed in (1, 2)]
    assert place.check(*jobs) == [f"{place.against}algo.gamma 0.98 -> 0.9, algo.gamma 0.98 -> 0.95"]
    # With the baseline's own values among them, only the last job changes two things.
    grid = [{"algo.gamma": gamma, "total_env_steps": n} for gamma in (0.98, 0.9) for n in (192, 96)]
    with pytest.raises(ConfigError, match=r"2 things differ: total_env_steps .*; algo\.gamma "):
        place.check(*grid)


def test_two_changes_start_nothing(place: Place, tmp_path: Path) -> None:
    def contents() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}

    with (place.project / "rltemplate/learning/optim.py").open("a") as file:
        file.write("# another thought\n")
    before, name = contents(), place.run_dir.name
    done = run_train(place.project, tmp_path, *WORDS, "algo.gamma=0.9,0.95", "seed=1,2", f"baseline={name}")
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: baseline={name}: 2 things differ: algo.gamma 0.98 -> 0.9")
    assert first.endswith("; code (1 file)")
    assert second == "change one thing at a time, or start all the same with baseline_check=warn"
    assert contents() == before
