"""Two runs, run again up to where they part: the numbers there, and the operation that made the difference.

The runs are real ones. In one of them a single bit is flipped on request, or a matrix product is computed by
other kernels, so that what must be found is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, SHRUNK, git, program, run_train, small

from rltemplate.analysis.compare import compare_runs
from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.rerun import recorded_code, zoom
from rltemplate.rerun.recorded_code import Code
from rltemplate.rerun.ulp import LAST_BITS
from rltemplate.rerun.zoom import (
    Finding,
    Operation,
    Rerun,
    Zoom,
    how_made,
    made_by_other_code,
    zoom_in,
)
from rltemplate.run.git import checkout
from rltemplate.types import ConfigError

QUIET = ["logger=none", "eval_every=0", "video_every=0"]
EVERY = {"sac": 24}  # environment steps of an iteration; others 32
SETTINGS = {
    algo: small(
        *(algo, f"total_env_steps={4 * EVERY.get(algo, 32)}", f"checkpoint_every={EVERY.get(algo, 32)}"),
        *QUIET,
        env="Pendulum",
    )
    for algo in ALGORITHMS
}

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Make a run of an algorithm, or give the one back that was made with the same words before."""
    made: dict[Any, Path] = {}

    def make(algo: str, *words: str, **environment: str) -> Path:
        key = (algo, words, *environment.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            done = run_train(fork, folder, *SETTINGS[algo], *words, "run_dir=it", **environment)
            assert done.returncode == 0, done.stderr
            made[key] = folder / "it"
        return made[key]

    return make


def zoomed(a: Path, b: Path, **options: Any) -> Zoom:
    return zoom_in(compare_runs(a, b), **options)


def summary(found: Zoom) -> tuple[int, str | None, int, str | None]:
    return found.iteration, found.event, found.index, found.first


def of_first(found: Zoom) -> tuple[int, int | None, str]:
    """Of the first item: elements that differ, by how many units, and of which kind the difference is."""
    item = next(item for item in found.items if item.name == found.first)
    assert item.difference is not None
    return item.difference.differing, item.difference.max_ulp, item.difference.kind


def copy_of(run_dir: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run_dir, folder / "copy"))


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [*program(ROOT, "compare"), *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


def edit_digest(run_dir: Path, iteration: int, item: str) -> None:
    """Change one digit of one item in the line of an iteration."""
    path = run_dir / "trace.jsonl"
    lines = path.read_text().splitlines()
    names: list[str] = []
    for i, line in enumerate(lines):
        values = json.loads(line)
        if line.startswith('["items","iteration"'):
            names = values[2]
        if line.startswith(f'["iteration",{iteration},'):
            at = 16 * names.index(item)
            digits = values[3]
            values[3] = f"{digits[:at]}{'1' if digits[at] == '0' else '0'}{digits[at + 1 :]}"
            lines[i] = json.dumps(values, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")


# --- Faults of one bit -----------------------------------------------------------------------------------


def test_a_flipped_bit_of_an_action_is_found_to_the_bit(run: Run, tmp_path: Path) -> None:
    """Both traces have every step, so one pass from the checkpoint before suffices."""
    a, b = run("ppo", "trace=step"), run("ppo", "trace=step", RLTEMPLATE_FAULT="action@2:3")
    done = command(tmp_path, f"a={a}", f"b={b}", "zoom=true", "keep=kept", "--json")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"] == "diverged"
    found = document["zoom"]
    alone = {"run": "it", "problem": None, "commit": None, "remark": None}
    assert (found["a"], found["b"], found["code"]) == (alone, alone, [])
    assert (found["iteration"], found["event"], found["index"]) == (2, "step", 3)
    assert (found["first"], found["from_env_steps"]) == ("action", 64)
    items = {item["name"]: item["difference"] for item in found["items"]}
    assert [items[name]["kind"] for name in ("obs", "policy", "noise")] == ["equal"] * 3
    assert items["action"]["kind"] == LAST_BITS
    assert (items["action"]["differing"], items["action"]["max_ulp"], items["action"]["size"]) == (1, 1, 2)
    first = items["action"]["first"]
    values = [float.fromhex(first[side]) for side in ("hex_a", "hex_b")]
    assert abs(np.float32(values[0]) - np.float32(values[1])) == np.spacing(np.float32(min(map(abs, values))))
    assert np.float32(first["a"]) == np.float32(values[0])
    assert [int(first[side], 16) for side in ("bits_a", "bits_b")] == [
        int(np.float32(value).view(np.uint32)) for value in values
    ]
    # It was put in between two operations, and the next one that has it asks how probable it was.
    assert found["finding"]["kind"] == "outside"
    assert found["finding"]["agreeing"] > 20
    assert found["finding"]["operation"]["name"] == "aten.sub.Tensor"
    source = found["finding"]["operation"]["source"]
    assert re.match(r"rltemplate/learning/networks\.py:\d+ in log_prob: z = \(action - mean\)", source[0])
    assert re.match(r"rltemplate/algos/ppo\.py:\d+ in _one_decision: log_prob", source[1])
    # What was asked for is kept, the progress is told, and nothing else is left.
    assert np.load(tmp_path / "kept" / "b" / "tensors.npz")["4"].shape == (2, 1)
    assert [line.split(" again")[0] for line in done.stderr.splitlines()] == ["zoom: a", "zoom: b"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_run_that_had_company_is_not_run_again_alone(run: Run, tmp_path: Path) -> None:
    a, b = run("ppo", "trace=step"), run("ppo", "trace=step", RLTEMPLATE_FAULT="action@2:3")
    for name, original in (("a", a), ("b", b)):
        shutil.copytree(original, tmp_path / name)
        path = tmp_path / name / "record.json"
        record = json.loads(path.read_text())
        path.write_text(
            json.dumps({**record, "together": {"id": "x", "seeds": [1, 2], "run_ids": [], "place": 0}})
        )
    done = command(tmp_path, f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}", "zoom=true")
    assert done.returncode == 2
    assert "neither run can be run again here" in done.stderr
    assert "was trained together with other seeds" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_flipped_bit_of_an_action_is_found_whatever_learns(run: Run, algo: str) -> None:
    found = zoomed(run(algo), run(algo, RLTEMPLATE_FAULT="action@2:3"))
    assert summary(found) == (2, "step", 3, "action")
    assert of_first(found) == (1, 1, LAST_BITS)


@pytest.mark.slow
def test_lines_of_whole_iterations_lead_to_the_same_place_from_anywhere(run: Run) -> None:
    a, b = run("ppo"), run("ppo", RLTEMPLATE_FAULT="action@2:3")
    found = zoomed(a, b)
    assert summary(found) == (2, "step", 3, "action")
    assert of_first(found) == (1, 1, LAST_BITS)
    assert (found.from_env_steps, found.a.problem, found.b.problem) == (64, None, None)
    from_start = zoomed(a, b, from_start=True)
    assert from_start.from_env_steps is None
    assert replace(from_start, from_env_steps=64) == found
    text = zoom.report(found)
    assert text.startswith("zoom: iteration 2, step 3: action, 1 of 2 elements (50 %), last bits, 1 ULP")
    first = next(item for item in found.items if item.name == "action").difference
    assert first is not None
    assert first.first is not None
    assert {first.first.hex_a, first.first.bits_b} <= set(text.split())
    assert "both runs were run again from the checkpoint after 64 environment steps" in text


@pytest.mark.slow
def test_a_flipped_bit_of_a_gradient_comes_from_no_operation(run: Run) -> None:
    a, b = run("ppo", "trace=step"), run("ppo", "trace=step", RLTEMPLATE_FAULT="gradient@1:2")
    found = zoomed(a, b)
    assert summary(found) == (1, "update", 2, "gradient")
    assert of_first(found) == (1, 1, LAST_BITS)
    assert found.finding is not None
    assert found.finding.kind == zoom.OUTSIDE
    assert found.finding.operation is not None
    assert " in clip_by_norm: " in found.finding.operation.source[0]
    # The backward pass of this update is among the operations that agree.
    assert found.finding.agreeing > 150


@pytest.mark.slow
def test_a_flipped_bit_of_sac_is_found_from_a_checkpoint_and_from_the_beginning(run: Run) -> None:
    a, b = run("sac"), run("sac", RLTEMPLATE_FAULT="critic/target@2:5")
    found = zoomed(a, b)
    assert summary(found) == (2, "update", 5, "critic/target")
    assert of_first(found) == (1, 1, LAST_BITS)
    assert found.from_env_steps == 48
    assert replace(zoomed(a, b, from_start=True), from_env_steps=48) == found


# --- Differences that have a cause -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL has no other branch")
def test_other_kernels_are_traced_to_the_product_that_they_computed(run: Run) -> None:
    found = zoomed(run("ppo"), run("ppo", MKL_CBWR="COMPATIBLE"))
    assert found.finding is not None
    assert found.finding.kind == zoom.COMPUTED
    operation = found.finding.operation
    assert operation is not None
    assert operation.name in ("aten.addmm.default", "aten.mm.default")
    assert operation.arguments_a == operation.arguments_b
    assert re.match(r"rltemplate/determinism/kernels\.py:\d+ in forward: ", operation.source[0])
    assert any(line.startswith("rltemplate/algos/ppo.py:") for line in operation.source)
    assert of_first(found)[2] == LAST_BITS
    assert f"made by {operation.name}: equal inputs, other results" in zoom.report(found)


@pytest.mark.slow
def test_another_number_in_the_configuration_is_found_in_the_operation_that_uses_it(run: Run) -> None:
    found = zoomed(run("ppo"), run("ppo", "algo.gamma=0.75"))
    assert summary(found) == (0, "targets", 0, "scaled_reward")
    assert found.finding is not None
    assert found.finding.kind == zoom.ARGUMENTS
    assert found.finding.operation is not None
    arguments = found.finding.operation.arguments_a
    assert arguments is not None
    assert found.finding.operation.arguments_b == arguments.replace("0.95", "0.75")
    # The operation runs before the event begins in which its result is traced.
    assert found.finding.logged_from == "step 15"
    assert "_scaled_reward" in found.finding.operation.source[0]


@pytest.mark.slow
def test_other_seeds_and_shapes_and_lengths(run: Run) -> None:
    seeds = zoomed(run("ppo"), run("ppo", "seed=2"))
    assert summary(seeds) == (0, "init", 0, "init/actor.0.weight")
    assert seeds.finding is not None
    assert seeds.finding.kind == zoom.UNSEEN
    assert of_first(seeds)[2] == "different"
    shapes = zoomed(run("ppo"), run("ppo", "+env.kwargs.g=9.0"))
    assert shapes.iteration == 0
    assert shapes.event == "step"
    assert shapes.finding is not None
    assert shapes.finding.kind == zoom.OUTSIDE  # a simulator
    lengths = zoomed(run("ppo"), run("ppo", "algo.target_kl=1e-9"))
    assert (lengths.event, lengths.items, lengths.finding) == (None, [], None)
    assert "so it was a condition that differed" in " ".join(zoom.report(lengths).split())


# --- Runs that do not repeat, and what is gone -----------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_does_not_repeat_is_said_to_and_the_other_one_shown(
    run: Run, fork: Path, tmp_path: Path
) -> None:
    a, b = run("ppo"), copy_of(run("ppo", RLTEMPLATE_FAULT="action@2:3"), tmp_path)
    edit_digest(b, 1, "reward")
    found = zoomed(a, b, project=fork)
    assert found.a == Rerun("it")
    assert found.b == Rerun("copy", "it first differs from its own record in iteration 1, reward")
    assert (found.iteration, found.event, found.first, found.finding) == (1, "iteration", "reward", None)
    assert [(item.name, item.shape, len(item.values)) for item in found.items] == [("reward", [16, 2], 6)]
    text = " ".join(zoom.report(found).split())
    assert "b cannot be run again here: it first differs from its own record in iteration 1, reward" in text
    assert "so these are the values of a alone" in text
    # Neither of them: there is nothing to show.
    other = copy_of(a, tmp_path / "other")
    edit_digest(other, 1, "action")
    done = command(tmp_path, f"a={other}", f"b={b}", "zoom=true")
    assert (done.returncode, done.stdout) == (2, "")
    errors = [line for line in done.stderr.splitlines() if not line.startswith("zoom: ")]
    assert len(errors) == 3
    assert errors[0].startswith("error: neither run can be run again here: a: it first differs")
    assert errors[1].startswith("b: it first differs from its own record in iteration 1, reward")
    # They were made in another repository, so that the present code need not be theirs.
    assert (
        "is not in this repository; `git fetch origin 'refs/runs/copy:refs/runs/copy'` brings it" in errors[1]
    )
    assert errors[1].endswith("so the present code was run")
    assert errors[2].startswith(f"instead: make diff a={other} b={b} code=full shows what was changed")


@pytest.mark.slow
def test_a_run_that_this_machine_refuses_is_no_traceback(run: Run, tmp_path: Path) -> None:
    a, b = run("ppo"), copy_of(run("ppo", RLTEMPLATE_FAULT="action@0:3"), tmp_path)
    record = json.loads((b / "record.json").read_text())
    record["environment"]["RLTEMPLATE_FAULT"] = "no such thing"
    (b / "record.json").write_text(json.dumps(record))
    found = zoomed(a, b)
    assert (
        found.b.problem == "RLTEMPLATE_FAULT=no such thing: expected ITEM@ITERATION or ITEM@ITERATION:INDEX"
    )
    assert found.first is not None


def test_checkpoints_that_are_gone_are_named_before_anything_is_run(run: Run, tmp_path: Path) -> None:
    a, b = run("ppo", "trace=step"), run("ppo", "trace=step", RLTEMPLATE_FAULT="action@2:3")
    gone = copy_of(b, tmp_path)
    shutil.rmtree(gone / "checkpoints")
    done = command(tmp_path, f"a={a}", f"b={gone}", "zoom=true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: b: the checkpoints of copy are gone; put them back, or run both from the beginning with "
        "zoom=start\n"
    )
    # The other way round it is the other run.
    with pytest.raises(ConfigError, match=r"^a: the checkpoints of copy are gone"):
        zoomed(gone, a)


@pytest.mark.slow
def test_checkpoints_are_not_needed_from_the_beginning_nor_before_the_first(run: Run, tmp_path: Path) -> None:
    a, late = run("ppo"), copy_of(run("ppo", RLTEMPLATE_FAULT="action@2:3"), tmp_path / "late")
    early = copy_of(run("ppo", RLTEMPLATE_FAULT="action@0:3"), tmp_path / "early")
    for run_dir in (early, late):
        shutil.rmtree(run_dir / "checkpoints")
    assert summary(zoomed(a, late, from_start=True)) == (2, "step", 3, "action")
    assert summary(zoomed(a, early)) == (0, "step", 3, "action")
    # One that has been removed in the course of the run: there is another way.
    (late / "checkpoints").mkdir()
    found = zoomed(a, late)
    assert (summary(found), found.from_env_steps) == ((2, "step", 3, "action"), None)
    assert found.notes == ["There is no checkpoint from before the difference that both runs have."]


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_is_one_line(run: Run, tmp_path: Path) -> None:
    a, fault = run("sac"), {"RLTEMPLATE_FAULT": "critic/target@2:5"}
    for name, pattern, expected in [
        ("damaged", "step_48.pt", r"step_48\.pt is damaged: .*; zoom=start needs no checkpoint"),
        ("chunk", "experience_0_*.pt", r"experience_0_.*\.pt is gone; zoom=start needs no"),
    ]:
        b = copy_of(run("sac", **fault), tmp_path / name)
        (path,) = (b / "checkpoints").glob(pattern)
        if name == "damaged":
            path.write_bytes(path.read_bytes()[:-100])
        else:
            path.unlink()
        done = command(tmp_path, f"a={a}", f"b={b}", "zoom=true")
        assert (done.returncode, done.stdout) == (2, "")
        (error,) = (line for line in done.stderr.splitlines() if not line.startswith("zoom: "))
        assert re.search(expected, error), error


# --- Runs of other code ----------------------------------------------------------------------------------

GOOD = "delta = reward + gamma * (1.0 - terminated) * next_value - value"
BROKEN = "delta = reward + gamma * next_value - value"
PPO = "rltemplate/algos/ppo.py"


class OtherCode(NamedTuple):
    """A repository whose code is none of that with which the two runs in it were made."""

    project: Path
    good: Path
    broken: Path

    def compare(self, folder: Path, *words: str) -> subprocess.Popen[str]:
        """Start to compare both, with a folder for temporary files below `folder`."""
        (folder / "tmp").mkdir()
        line = program(self.project, "compare")
        return subprocess.Popen(
            [*line, f"a={self.good}", f"b={self.broken}", *words],
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def assert_tidy(self, folder: Path) -> None:
        """Nothing is left of what was laid out."""
        assert git(self.project, "worktree", "list").count("\n") == 1
        assert not (self.project / ".git" / "worktrees").exists()
        # torch leaves a folder for what it compiles.
        assert [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torch")] == []


@pytest.fixture(scope="module")
def clone(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("clone") / "project"
    git(fork, "clone", "-q", str(fork), str(project))
    return project


@pytest.fixture(scope="module")
def other_code(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> OtherCode:
    folder = tmp_path_factory.mktemp("runs")
    words = ["env=CartPole", *SHRUNK["ppo"], "total_env_steps=96", "trace=step", "device=cpu", *QUIET]
    source = (clone / PPO).read_text()
    assert source.count(GOOD) == 1
    for name, text in (("good", GOOD), ("broken", BROKEN)):
        # A comment on top moves all lines of one of them.
        (clone / PPO).write_text(("# moved\n" if name == "broken" else "") + source.replace(GOOD, text))
        done = run_train(clone, folder, *words, f"run_dir={name}")
        assert done.returncode == 0, done.stderr
    (clone / PPO).write_text(source + 'raise ImportError("the code of neither run")\n')
    return OtherCode(clone, folder / "good", folder / "broken")


def test_each_run_is_run_again_with_its_own_code(other_code: OtherCode, tmp_path: Path) -> None:
    process = other_code.compare(tmp_path, "zoom=true", "--json")
    output, said = process.communicate()
    assert process.returncode == 1, said
    document = json.loads(output)
    found = document["zoom"]
    commits = [json.loads((run / "record.json").read_text())["git"]["commit"] for run in other_code[1:]]
    assert [found[side] for side in "ab"] == [
        {"run": name, "problem": None, "commit": commit, "remark": None}
        for name, commit in zip(("good", "broken"), commits, strict=True)
    ]
    assert (found["event"], found["first"], found["code"]) == ("targets", "advantage", [PPO])
    (difference,) = (item["difference"] for item in found["items"] if item["name"] == "advantage")
    values = [float.fromhex(difference["first"][side]) for side in ("hex_a", "hex_b")]
    assert values[0] != values[1]
    assert [np.float32(difference["first"][side]) for side in "ab"] == values
    # The lines, of one file in two versions.
    assert found["finding"]["kind"] == "other code"
    operation = found["finding"]["operation"]
    number = (other_code.project / PPO).read_text().splitlines().index(f"    {GOOD}  # (T, N)") + 1
    assert operation["source"][0].startswith(f"{PPO}:{number} in compute_gae: {GOOD}")
    assert operation["source_b"][0].startswith(f"{PPO}:{number + 1} in compute_gae: {BROKEN}")
    assert found["code_shown_by"] == f"make diff a={other_code.good} b={other_code.broken} code=full"
    assert found["code_shown_by"] in document["look_at"][0]
    assert [line.split(" from ")[0] for line in said.splitlines()] == [
        f"zoom: {side} again with its own code, commit {commit[:12]},"
        for side, commit in zip("ab", commits, strict=True)
    ]
    other_code.assert_tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert git(other_code.project, "status", "--porcelain").split() == ["M", PPO]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["term", "int"]
)
def test_a_signal_leaves_nothing(other_code: OtherCode, tmp_path: Path, number: signal.Signals) -> None:
    process = other_code.compare(tmp_path, "zoom=true")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("zoom: a again with its own code")
    assert (other_code.project / ".git" / "worktrees").exists()
    process.send_signal(number)
    output, said = process.communicate()
    assert (process.returncode, output) == (128 + number, "")
    assert said.splitlines()[-1] == "interrupted, so there is no answer"
    other_code.assert_tidy(tmp_path)


def test_code_that_is_the_present_one_is_not_laid_out(
    run: Run, fork: Path, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git_facts = json.loads((run("ppo", "trace=step") / "record.json").read_text())["git"]

    def lay_out(*_: Any) -> Any:
        raise AssertionError("laid out")

    monkeypatch.setattr(checkout, "worktree", lay_out)
    present = recorded_code.find_code(fork, "it", git_facts)
    assert present == Code()
    with recorded_code.laid_out(fork, [present, present]) as trees:
        assert trees == [None, None]
    # It would have been for any other code.
    with pytest.raises(AssertionError, match="laid out"), recorded_code.laid_out(clone, [Code(head(clone))]):
        pass


def head(project: Path) -> str:
    return git(project, "rev-parse", "HEAD").strip()


def test_code_that_cannot_be_run_is_named_with_what_to_do(fork: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    git(fork, "clone", "-q", str(fork), str(project))
    replay = project / "rltemplate" / "rerun" / "replay.py"
    source = replay.read_text()
    assert source.count("\nFORM = 1\n") == 1

    def commit(text: str | None) -> dict[str, Any]:
        """The facts of a run whose code has this text there."""
        if text is None:
            replay.unlink()
        else:
            replay.write_text(text)
        git(project, "add", "-A")
        git(project, "commit", "-q", "--allow-empty", "-m", "code")
        return {"commit": head(project), "tree": None, "dirty": True, "problem": None}

    def found(facts: dict[str, Any]) -> Code:
        return recorded_code.find_code(project, "it", facts)

    other, none = commit(source.replace("FORM = 1", "FORM = 7")), commit(None)
    unnumbered = commit(source.replace("\nFORM = 1\n", "\n"))
    older = commit(source.replace("\nFORM = 1\n", "\n").replace("since: tuple[str, int] | None = None", ""))
    broken = commit("def (")
    documented, docs = commit(source), project / "docs" / "more.md"
    docs.parent.mkdir()
    docs.write_text("# More")
    assert found(documented) == Code()  # it cannot change what is computed
    (project / "rltemplate" / "rng.py").write_text("CHANGED = 1")
    assert found(documented) == Code(documented["commit"])
    assert found(unnumbered) == Code(unnumbered["commit"])
    for facts, said in [
        (other, "speaks form 7 of the hand-over in rltemplate/rerun/replay.py, and this one 1"),
        (none, "has no rltemplate/rerun/replay.py, which runs a part of it again"),
        (older, "speaks an older form of the hand-over in rltemplate/rerun/replay.py, and this one 1"),
        (broken, "speaks an older form of the hand-over in rltemplate/rerun/replay.py, and this one 1"),
        (
            {"commit": "d" * 40},
            "is not in this repository; `git fetch origin 'refs/runs/it:refs/runs/it'` brings it from the "
            "remote that it was pushed to",
        ),
    ]:
        assert found(facts) == Code(None, f"its code, commit {facts['commit'][:12]}, {said}")
    assert found({"commit": None, "problem": "no git"}) == Code(None, "its code was not recorded: no git")
    # A copy from another clone: that was made from a commit as it is, which is here.
    copied = {"commit": "d" * 40, "base_commit": unnumbered["commit"], "dirty": False}
    assert found(copied) == Code(unnumbered["commit"])


def test_what_stands_in_is_said_where_it_does_not_repeat() -> None:
    problem, remark = "it first differs from its own record in iteration 0, value", "its code is gone"
    found = Zoom(Rerun("x", problem, None, remark), Rerun("y"), None, 0, code=None, code_shown_by="make diff")
    text = " ".join(zoom.report(found).split())
    assert f"a cannot be run again here: {problem}; {remark} so these are the values of b alone" in text
    assert "instead: make diff shows what was changed" in text
    # With its own code there is nothing to be said about that.
    text = zoom.report(replace(found, a=Rerun("x", problem)))
    assert "instead" not in text
    assert "code" not in text


# --- What is asked for -----------------------------------------------------------------------------------


def test_runs_that_do_not_part_leave_nothing_to_zoom_in_on(run: Run, tmp_path: Path) -> None:
    a = run("ppo", "trace=step")
    done = command(tmp_path, f"a={a}", f"b={a}", "zoom=true")
    assert done.returncode == 0
    assert done.stdout.endswith("zoom: identical, so there is nothing to zoom in on\n")
    done = command(tmp_path, f"a={a}", f"b={a}", "zoom=start", "--json")
    assert (done.returncode, json.loads(done.stdout)["zoom"]) == (0, None)
    assert "zoom" not in json.loads(command(tmp_path, f"a={a}", f"b={a}", "--json").stdout)
    with pytest.raises(ConfigError, match="nothing to zoom in on"):
        zoomed(a, a)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["zoom=starts"], "error: zoom=starts: did you mean start? expected true, false or start\n"),
        (["zoom=1"], "error: zoom=1: expected true, false or start\n"),
        (["keep=there"], "error: keep=there: there is nothing to keep without zoom=true\n"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, words: list[str], expected: str) -> None:
    done = command(tmp_path, "a=x", "b=y", *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_what_is_kept_overwrites_nothing(run: Run, tmp_path: Path) -> None:
    a, b = run("ppo", "trace=step"), run("ppo", "trace=step", RLTEMPLATE_FAULT="action@2:3")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; expected a new folder"):
        zoomed(a, b, keep=tmp_path)
    with pytest.raises(ConfigError, match="cannot be made"):
        zoomed(a, b, keep=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("module", ["rltemplate.rerun.zoom", "rltemplate.rerun.replay"])
def test_starting_processes_needs_no_torch(module: str) -> None:
    script = f"import sys, {module}; print('torch' in sys.modules, {module!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False True\n"


def test_a_signal_ends_what_was_run_again_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    a, b = run("ppo", "trace=step"), run("ppo", "trace=step", RLTEMPLATE_FAULT="action@2:3")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = [*program(ROOT, "compare"), f"a={a}", f"b={b}", "zoom=true"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(scratch.glob("zoom-*/a/output.txt")) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert said.splitlines()[-1] == "interrupted, so there is no answer"
    assert list(scratch.iterdir()) == []
    assert children_with(str(scratch)) == ""


def children_with(text: str) -> str:
    """The command lines of all processes that have a variable with this text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or somebody else's
            if text.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
    return "\n".join(found)


# --- Two logs of operations ------------------------------------------------------------------------------


def op(name: str, inputs: str, outputs: str, arguments: str = "t: f32[2]") -> dict[str, Any]:
    """An operation as `replay` logs it, with one letter per digest."""
    return {
        "operation": f"aten.{name}",
        "arguments": arguments,
        "inputs": list(inputs),
        "outputs": list(outputs),
        "source": [f"rltemplate/x.py:1 in f: {name}"],
        "forward_source": [],
    }


def made(a: list[dict[str, Any]], b: list[dict[str, Any]], *limits: int) -> tuple[Any, ...]:
    found: Finding = how_made(a, b, limits or (len(a), len(b)), "step 1")
    name = None if found.operation is None else found.operation.name.removeprefix("aten.")
    return found.kind, name, found.agreeing


BEFORE = [op("t.default", "w", "v"), op("tanh.default", "x", "y")]


def test_the_first_operation_with_equal_inputs_and_other_results_is_the_cause() -> None:
    a = [*BEFORE, op("addmm.default", "vy", "p"), op("exp.default", "p", "q"), op("log.default", "y", "l")]
    b = [*BEFORE, op("addmm.default", "vy", "P"), op("exp.default", "P", "Q"), op("log.default", "y", "L")]
    assert made(a, b) == ("computed", "addmm.default", 2)
    # Not if it ran after the item was there.
    assert made(a, b, 2, 2) == ("outside", "exp.default", 2)
    assert made(a, a) == ("outside", None, 5)


def test_other_arguments_and_draws_are_told_apart() -> None:
    def pair(name: str, *arguments: str) -> tuple[Any, ...]:
        a, b = ([*BEFORE, op(name, "y", out, text)] for out, text in zip("zZ", arguments, strict=True))
        return made(a, b)

    assert pair("mul.Tensor", "t, 0.9", "t, 0.8") == ("arguments", "mul.Tensor", 2)
    assert pair("mul.Tensor", "t, 0.9", "t, 0.9") == ("computed", "mul.Tensor", 2)
    assert pair("randn.generator", "[2], g", "[2], g") == ("drawn", "randn.generator", 2)
    assert pair("normal_.default", "[2], g", "[3], g") == ("arguments", "normal_.default", 2)


def test_a_difference_that_was_there_before_is_not_blamed_on_who_saw_it() -> None:
    a = [*BEFORE, op("select.int", "m", "n"), op("add.Tensor", "n", "o")]
    b = [*BEFORE, op("select.int", "M", "N"), op("add.Tensor", "N", "O")]
    assert made(a, b) == ("outside", "add.Tensor", 2)


def test_memory_that_was_never_written_is_no_difference() -> None:
    a = [op("empty.memory_format", "", "g"), op("copy_.default", "gx", "x"), *BEFORE]
    b = [op("empty.memory_format", "", "G"), op("copy_.default", "Gx", "x"), *BEFORE]
    assert made(a, b) == ("outside", None, 4)
    assert made([op("zeros.default", "", "g")], [op("zeros.default", "", "G")])[0] == "computed"


def by_other_code(a: list[dict[str, Any]], b: list[dict[str, Any]], *limits: int) -> tuple[Any, ...]:
    """What a did, what b did, and how many operations before are in both; or nothing."""
    found = made_by_other_code(a, b, limits or (len(a), len(b)), "step 1")
    if found is None:
        return ()
    assert found.operation is not None
    names = [found.operation.name, found.other_name]
    if found.operation.arguments_a is None:
        names = [None, found.operation.name]
    return (*(name and name.removeprefix("aten.").partition(".")[0] for name in names), found.agreeing)


def test_other_code_is_found_where_it_first_makes_other_numbers() -> None:
    end = op("add.Tensor", "vr", "d")
    a = [*BEFORE, op("mul.Tensor", "vm", "u"), op("add.Tensor", "ur", "e")]
    b = [*BEFORE, end]
    assert by_other_code(a, b) == ("mul", "add", 2)
    assert by_other_code(b, a) == ("add", "mul", 2)
    # The same, behind lines that were only written in another way: k is another number on the way to v.
    other_way = [op("neg.default", "w", "k"), op("t.default", "k", "v"), op("tanh.default", "x", "y")]
    assert by_other_code([*other_way, *a[2:]], b) == ("mul", "add", 2)
    # Not if that comes to nothing at all, nor behind the item.
    assert by_other_code([*other_way, end], b) == ()
    assert by_other_code([*BEFORE, end, op("mul.Tensor", "dm", "u")], b, 3, 3) == ()


@pytest.mark.parametrize("taking", ["unbind.int", "select.int"])
def test_a_mask_that_was_dropped_is_found_where_it_was_applied(taking: str) -> None:
    """Its rows are ones and zeros, which both runs have; they stand in other places."""

    def log(made: str, mask: str, rows: str) -> list[dict[str, Any]]:
        parts = [op(taking, mask, rows, f"t: {mask}")]
        if taking == "select.int":
            parts = [op(taking, mask, row, f"t, {place}") for place, row in enumerate(rows)]
        results = ["z" if row == "z" else str(place) for place, row in enumerate(rows)]
        sums = [op("mul.Tensor", f"{row}y", to) for row, to in zip(rows, results, strict=True)]
        end = op("add.Tensor", "".join(results), made)
        return [*BEFORE, op("zeros.default", "", "z"), op("mul.Tensor", "vm", mask), *parts, *sums, end]

    with_mask, without = log("r", "k", "ozo"), log("R", "K", "ooo")
    assert by_other_code(with_mask, without) == ("mul", "mul", 3)
    # Not if the rows stand where they stood.
    assert by_other_code(log("r", "k", "ozo"), log("r", "k", "ozo")) == ()


def test_other_code_need_not_have_anything_in_its_place() -> None:
    longer = [*BEFORE, op("sub.Tensor", "vy", "n")]
    assert by_other_code(longer, BEFORE) == ("sub", None, 2)
    assert by_other_code(BEFORE, longer) == (None, "sub", 2)
    for logs, words in [
        ((longer, BEFORE), "a went on with aten.sub.Tensor, and b with nothing like it"),
        ((BEFORE, longer), "b went on with aten.sub.Tensor, and a with nothing like it"),
    ]:
        finding = made_by_other_code(*logs, [len(log) for log in logs], "step 1")
        found = Zoom(Rerun("x"), Rerun("y"), None, 0, finding=finding)
        assert words in " ".join(zoom.report(found).split())


def test_numbers_that_differed_before_are_not_blamed_on_code() -> None:
    a, b = ([*BEFORE, op("add.Tensor", f"y{m}", out)] for m, out in ("mo", "MO"))
    assert by_other_code(a, b) == ()
    # Nor is memory that nobody has written.
    a, b = ([op("empty.memory_format", "", m), *BEFORE] for m in "gG")
    assert by_other_code(a, b) == ()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (zoom.COMPUTED, "made by aten.mul: equal inputs, other results"),
        (zoom.ARGUMENTS, "made by aten.mul: called with other arguments"),
        (zoom.DRAWN, "drawn by aten.mul: its random stream was in another state"),
        (zoom.OTHER_OPERATIONS, "one went on with aten.mul, the other with aten.add"),
        (zoom.OTHER_CODE, "made by other code: a went on with aten.mul, b with aten.add"),
        (zoom.OUTSIDE, "made by no operation of torch that was logged"),
        (zoom.UNSEEN, "made before operations can be logged"),
        (zoom.BETWEEN, "changed between two iterations"),
    ],
)
def test_each_kind_of_finding_has_its_words(kind: str, words: str) -> None:
    found = Finding(kind, 3, Operation("aten.mul", "x", "y", [], []), "aten.add", "step 1")
    findings = [found] if kind == zoom.OTHER_CODE else [found, replace(found, operation=None)]
    for finding in findings:
        text = " ".join(zoom.report(Zoom(Rerun("x"), Rerun("y"), None, 0, finding=finding)).split())
        assert words.replace("aten.mul", "aten.mul" if finding.operation else "") in text


def test_lines_of_both_are_shown_where_they_differ() -> None:
    a, b = (
        op("mul.Tensor", "vm", "u"),
        {**op("add.Tensor", "vr", "d"), "source": ["rltemplate/y.py:2 in g: d"]},
    )
    finding = made_by_other_code([*BEFORE, a], [*BEFORE, b], (3, 3), "step 1")
    text = zoom.report(Zoom(Rerun("x"), Rerun("y"), None, 0, finding=finding))
    assert "    in  a  rltemplate/x.py:1 in f: mul.Tensor\n        b  rltemplate/y.py:2 in g: d" in text
    same = how_made(
        [*BEFORE, op("exp.default", "y", "q")], [*BEFORE, op("exp.default", "y", "Q")], (3, 3), "x"
    )
    text = zoom.report(Zoom(Rerun("x"), Rerun("y"), None, 0, finding=same))
    assert text.count("    in  rltemplate/x.py:1 in f: exp.default") == text.count("x.py") == 1


def test_other_operations_are_reported_where_they_begin() -> None:
    other = [*BEFORE, op("mm.default", "vy", "p"), op("add.Tensor", "p", "q")]
    a = [*BEFORE, op("addmm.default", "vy", "q")]
    found = how_made(a, other, (3, 4), "step 1")
    assert (found.kind, found.agreeing, found.other_name) == ("other operations", 2, "aten.mm.default")
    assert found.operation is not None
    assert found.operation.name == "aten.addmm.default"
    # One goes on where the other has the item already; afterwards they may do what they want.
    assert made(BEFORE, other, 2, 4) == ("other operations", "mm.default", 2)
    assert made(other, BEFORE, 4, 2) == ("other operations", "mm.default", 2)
    assert made(a, other, 2, 2) == ("outside", None, 2)
    # A cause before that is still the cause.
    changed = [BEFORE[0], op("tanh.default", "x", "Y"), *other[2:]]
    assert made(a, changed) == ("computed", "tanh.default", 1)
