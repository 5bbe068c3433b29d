"""Two recorded runs, run again up to where they part, in processes of their own.

One of them was made with code that flips a bit of an action in its third iteration, so the cause is known.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import NAME, SHRUNK, RecordedRun, git, program, run, run_train

from runlab.analysis.compare import compare_runs
from runlab.errors import ConfigError
from runlab.rerun import zoom
from runlab.rerun.commands import compare
from runlab.rerun.ulp import compare_arrays
from runlab.rerun.zoom import zoom_in
from runlab.rerun.zoom_report import Zoom, report
from runlab.run.record import RunRecord

WORDS = ["env=Pendulum", *SHRUNK["ppo"], "total_env_steps=128", "checkpoint_every=32", "logger=none"]
WORDS += ["algo.normalize_obs=false"]  # or the first iteration would have two rollouts
QUIET = ["eval_every=0", "video_every=0", "device=cpu"]
ON_POLICY, TRACE = f"{NAME}/learning/on_policy.py", "runlab/run/trace.py"
SCALED = "keep = self.config.gamma * (1.0 - torch.maximum(rollout.terminated, rollout.truncated))"
PPO, LOGGED = f"{NAME}/algos/ppo.py", "        if config.target_kl is not None:\n            further"
# An action with another last bit, at the place where it is handed out.
SEEN = "        if not (self._begun and (whole or self.stepwise or event == RESET)):\n"
FLIP = """\
        self.decisions = getattr(self, "decisions", 0) + (event == "policy_step")
        self.decisions *= event != "targets"
        if event == "policy_step" and (self.decisions, self._iteration) == (4, 2):
            values.action.numpy().view("uint32").flat[0] ^= 1
"""


class Runs(NamedTuple):
    """A repository whose present code is that of `plain`, and runs that were made there when asked for."""

    project: Path
    folder: Path

    def make(self, name: str, *words: str) -> Path:
        run_dir = self.folder / name
        if not run_dir.exists():
            words = (*WORDS, *QUIET, *words, f"run_dir={run_dir}")
            run_train(self.project, self.folder, *words, status=0)
        return run_dir

    @property
    def plain(self) -> Path:
        return self.make("plain")

    @property
    def flipped(self) -> Path:
        """A run made with changed files, which are put back. It also logs a metric of its own."""
        changes = {
            TRACE: (SEEN, FLIP + SEEN),
            PPO: (LOGGED, f"        further['extra/one'] = explained\n{LOGGED}"),
        }
        before = {name: (self.project / name).read_text() for name in changes}
        for name, (old, new) in changes.items():
            assert before[name].count(old) == 1
            (self.project / name).write_text(before[name].replace(old, new))
        try:
            return self.make("flipped")
        finally:
            for name, text in before.items():
                (self.project / name).write_text(text)

    def zoom(self, a: Path, b: Path) -> Zoom:
        return zoom_in(compare_runs(a, b), self.project)


@pytest.fixture(scope="module")
def runs(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("zoom")
    git(fork, "clone", "-q", str(fork), str(folder / "project"))
    return Runs(folder / "project", folder)


@pytest.mark.long
def test_a_flipped_bit_is_found_with_the_code_of_each_run(runs: Runs, tmp_path: Path) -> None:
    a, b = runs.plain, runs.flipped
    (tmp_path / "tmp").mkdir()
    words = [f"a={a}", f"b={b}", "zoom=true", "--json"]
    command = [*program(runs.project, "compare"), *words]
    done = run(tmp_path, *command, status=1, TMPDIR=str(tmp_path / "tmp"))
    document = json.loads(done.stdout)
    zoomed = document["zoom"]
    assert document["verdict"] == "diverged"
    commits = [RunRecord.read(run_dir).git.commit or "" for run_dir in (a, b)]
    assert [zoomed["commit_a"], zoomed["commit_b"]] == commits
    assert (zoomed["iteration"], zoomed["event"], zoomed["index"]) == (2, "policy_step", 3)
    assert (zoomed["first"], zoomed["from_env_steps"]) == ("action", 64)
    items = zoomed["items"]
    assert [items[name]["differing"] for name in ("draw/action", "normalized_obs", "policy")] == [0] * 3
    action = items["action"]
    assert (action["differing"], action["max_ulp"], action["size"]) == (1, 1, 2)
    bits = [int(np.float32(float.fromhex(digits)).view(np.uint32)) for digits in action["hexes"]]
    assert bits[0] ^ bits[1] == 1
    # The progress is told, and nothing is left.
    assert f"zoom: b again with commit {commits[1][:12]} from step 64, for its steps" in done.stderr
    assert git(runs.project, "worktree", "list").count("\n") == 1
    assert {path.name.partition("_")[0] for path in (tmp_path / "tmp").iterdir()} <= {"torchinductor"}
    assert git(runs.project, "status", "--porcelain") == ""


@pytest.mark.long
def test_other_values_of_the_configuration_are_found_where_they_are_used(runs: Runs) -> None:
    zoomed = runs.zoom(runs.plain, runs.make("gamma", "algo.gamma=0.75"))
    finding = zoomed.finding
    assert finding is not None
    assert finding.a is not None
    assert finding.b is not None
    assert finding.kind == "arguments"
    assert finding.b.arguments == finding.a.arguments.replace("0.95", "0.75")
    number = (runs.project / ON_POLICY).read_text().splitlines().index(f"        {SCALED}") + 1
    for side in (finding.a, finding.b):
        assert side.source[0].startswith(f"{ON_POLICY}:{number} in scaled_reward: {SCALED}")
    # The operation runs before the event begins in which its result is traced.
    assert finding.logged_from == "collect"
    lengths = runs.zoom(runs.plain, runs.make("kl", "algo.target_kl=1e-9"))
    assert (lengths.event, lengths.items, lengths.finding) == (None, {}, None)
    assert "so it was a condition or a setting that differed" in " ".join(report(lengths).split())


def other_trace(recorded_run: RecordedRun, folder: Path) -> Path:
    """A copy of a recorded run whose trace has another digest in its fourth iteration."""
    copy = Path(shutil.copytree(recorded_run.run_dir, folder))
    text = (copy / "trace.jsonl").read_text()
    text = re.sub(r'(\["iteration",3,\d+,"\w+)\w{16}"', rf'\g<1>{"0" * 16}"', text)
    (copy / "trace.jsonl").write_text(text)
    return copy


@pytest.mark.long
def test_a_run_that_does_not_repeat_is_said_to(recorded_run: RecordedRun, tmp_path: Path) -> None:
    a, b = recorded_run.run_dir, other_trace(recorded_run, tmp_path / "copy")
    project = Path(shutil.copytree(recorded_run.project, tmp_path / "project"))
    with pytest.raises(ConfigError) as error:
        zoom_in(compare_runs(a, b), project)
    first, advice = str(error.value).splitlines()
    assert re.match(
        "b: cannot be run again here with commit .*: it first differs from its own record in", first
    )
    command = f"make diff a={a} b={b} code=full"
    assert advice.startswith(f"instead: {command} shows what was changed")


def test_long_lists_are_cut_in_the_text() -> None:
    same, other = (compare_arrays(np.zeros(2, np.float32), np.full(2, x, np.float32)) for x in (0, 1))
    items = {f"equal/{i}": same for i in range(500)} | {f"changed/{i}": other for i in range(500)}
    lines = report(Zoom("1" * 40, "2" * 40, None, 3, "start", items=items, first="changed/0")).splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) < 250
    assert any(line.startswith("  equal  equal/0, ") and line.endswith(" and 488 more") for line in lines)
    assert "  and 488 more items differ; --json lists them all" in lines


def test_recorded_code_of_another_version_is_named(recorded_run: RecordedRun, tmp_path: Path) -> None:
    b, project = other_trace(recorded_run, tmp_path / "copy"), tmp_path / "project"
    git(tmp_path, "clone", "-q", str(recorded_run.project), str(project))
    replay = project / "runlab" / "rerun" / "replay.py"
    replay.write_text(re.sub(r"(?m)^FORM = \d+$", "FORM = 0", replay.read_text()))
    git(project, "commit", "-qam", "another form")
    (head,) = git(project, "rev-parse", "HEAD").split()
    record = RunRecord.read(b)
    replace(record, git=replace(record.git, commit=head, dirty=True)).write(b)
    with pytest.raises(ConfigError, match=f"commit {head[:12]}: this code is of another version"):
        zoom_in(compare_runs(b, recorded_run.run_dir), project=project)


def test_a_damaged_checkpoint_is_named(recorded_run: RecordedRun, tmp_path: Path) -> None:
    whole, damaged = recorded_run.run_dir, other_trace(recorded_run, tmp_path / "copy")
    project = Path(shutil.copytree(recorded_run.project, tmp_path / "project"))
    path = damaged / "checkpoints" / "step_64.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"step_64\.pt is damaged"):
        zoom_in(compare_runs(damaged, whole), project)
    # Only what both have and what lies before the divergence.
    assert [zoom._common_start([damaged, whole], steps) for steps in (95, 31)] == [64, None]
    arguments = compare.Args(a=str(whole), b=str(whole), zoom=True)
    assert compare.main(arguments) == 0  # identical, so there is nothing to zoom in on
