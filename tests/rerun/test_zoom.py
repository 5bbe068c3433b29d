"""Two recorded runs, run again up to where they part, in processes of their own.

One of them was made with code that flips a bit of an action in its third iteration, so the cause is known.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import NAME, SHRUNK, Configure, RecordedRun, git, job_in, program, run, run_train

from runlab.analysis.compare import compare_runs
from runlab.determinism import switches
from runlab.errors import ConfigError
from runlab.rerun import replay, zoom
from runlab.rerun.commands import compare
from runlab.rerun.recorded_code import Code
from runlab.rerun.ulp import compare_arrays
from runlab.rerun.zoom import zoom_in
from runlab.rerun.zoom_report import Zoom, report
from runlab.run.job import JOB_VARIABLE
from runlab.run.record import RunRecord

WORDS = ["env=Pendulum", *SHRUNK["ppo"], "total_env_steps=128", "checkpoint_every=32", "logger=none"]
WORDS += ["algo.normalize_obs=false"]  # or the first iteration would have two rollouts
WORDS += ["eval_every=0", "video_every=0", "device=cpu"]
# An action with another last bit, at the place where it is handed out.
SEEN = "        if not (self._begun and (whole or self.stepwise or event == RESET)):\n"
FLIP = """\
        self.decisions = getattr(self, "decisions", 0) + (event == "policy_step")
        self.decisions *= event != "targets"
        if event == "policy_step" and (self.decisions, self._iteration) == (4, 2):
            values.action.numpy().view("uint32").flat[0] ^= 1
"""
LOGGED = "        if config.target_kl is not None:\n            further"
CHANGES = {
    "runlab/run/trace.py": (SEEN, FLIP + SEEN),
    f"{NAME}/algos/ppo.py": (LOGGED, f"        further['extra/one'] = explained\n{LOGGED}"),
}


@pytest.mark.long
def test_a_flipped_bit_is_found_with_the_code_of_each_run(fork: Path, tmp_path: Path) -> None:
    """The present code is that of `a`. The run `b` also logs a metric of its own."""
    project, a, b = (tmp_path / name for name in ("project", "a", "b"))
    git(fork, "clone", "-q", str(fork), str(project))
    run_train(project, tmp_path, *WORDS, f"run_dir={a}", status=0)
    for name, (old, new) in CHANGES.items():
        text = (project / name).read_text()
        assert text.count(old) == 1
        (project / name).write_text(text.replace(old, new))
    run_train(project, tmp_path, *WORDS, f"run_dir={b}", status=0)
    git(project, "checkout", "-q", ".")
    (tmp_path / "tmp").mkdir()
    words = [f"a={a}", f"b={b}", "zoom=true", "json=true"]
    command = [*program(project, "compare"), *words]
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
    assert git(project, "worktree", "list").count("\n") == 1
    assert {path.name.partition("_")[0] for path in (tmp_path / "tmp").iterdir()} <= {"torchinductor"}
    assert git(project, "status", "--porcelain") == ""


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


@pytest.mark.parametrize(("gpus", "device"), [([], "cpu"), ([{"name": "a GPU"}], "cuda")])
def test_a_device_that_was_chosen_for_the_run_is_taken_again(
    tmp_path: Path, gpus: list[dict[str, str]], device: str
) -> None:
    """Whatever this machine has."""
    children = Mock()
    code = Code(RunRecord(id="run", status="", machine={"gpus": gpus}), "c" * 40, tmp_path, (), tmp_path)
    code.run("rerun.replay", [], {"device": "auto"}, tmp_path, tmp_path / "log", children)
    (_, environment, _), _ = children.run.call_args
    assert json.loads(environment[JOB_VARIABLE])["config"] == {"device": device}


def test_long_lists_are_cut_in_the_text() -> None:
    same, other = (compare_arrays(np.zeros(2, np.float32), np.full(2, x, np.float32)) for x in (0, 1))
    items = {f"equal/{i}": same for i in range(500)} | {f"changed/{i}": other for i in range(500)}
    lines = report(Zoom("1" * 40, "2" * 40, None, 3, "start", items=items, first="changed/0")).splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) < 250
    assert any(line.startswith("  equal  equal/0, ") and line.endswith(" and 488 more") for line in lines)
    assert "  and 488 more items differ; json=true lists them all" in lines


def test_recorded_code_of_another_version_is_named(recorded_run: RecordedRun, tmp_path: Path) -> None:
    b, project = other_trace(recorded_run, tmp_path / "copy"), tmp_path / "project"
    git(tmp_path, "clone", "-q", str(recorded_run.project), str(project))
    file = project / "runlab" / "rerun" / "replay.py"
    other = re.sub(r"(?m)^FORM = \d+$", "FORM = 0", file.read_text())
    file.write_text(other.replace("    index: int = 0\n", ""))  # a field that the request has
    git(project, "commit", "-qam", "another form")
    (head,) = git(project, "rev-parse", "HEAD").split()
    record = RunRecord.read(b)
    replace(record, git=replace(record.git, commit=head, dirty=True)).write(b)
    with pytest.raises(ConfigError, match=f"commit {head[:12]}: this code is of another version"):
        zoom_in(compare_runs(b, recorded_run.run_dir), project=project)


def test_a_damaged_checkpoint_is_named(
    recorded_run: RecordedRun, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "apply", lambda _: {})  # of the whole process
    path = Path(shutil.copytree(recorded_run.run_dir, tmp_path / "copy")) / "checkpoints" / "step_64.pt"
    path.write_bytes(path.read_bytes()[:-100])
    request = replay.Request(folder=str(tmp_path), iteration=3, checkpoint=str(path))
    with pytest.raises(ConfigError, match=r"step_64\.pt is damaged"):
        replay.replay(job_in(tmp_path, configure), request)


def test_runs_begin_again_at_the_last_checkpoint_of_both_before_they_part(recorded_run: RecordedRun) -> None:
    whole = recorded_run.run_dir
    assert [zoom._common_start([whole, whole], steps) for steps in (95, 31)] == [64, None]
    arguments = compare.Args(a=str(whole), b=str(whole), zoom=True)
    assert compare.main(arguments) == 0  # identical, so there is nothing to zoom in on
