"""Recorded runs made again from their refs alone: equal where they must be, and different where they are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import NAME, SHRUNK, Started, git, program, run, run_train

from runlab.analysis.compare import compare_runs
from runlab.errors import ConfigError
from runlab.rerun.recorded_code import recorded_code
from runlab.rerun.reproduce import DIVERGED, IDENTICAL, SHORTER, Reproduction, report, reproduce
from runlab.run import paths
from runlab.run.git import changes, origin, snapshot
from runlab.run.git.command import repository

pytestmark = pytest.mark.usefixtures("own_scratch")
WORDS = [*SHRUNK["ppo"], "total_env_steps=256", "eval_every=128", "eval_episodes=1", "logger=none"]
WORDS += ["algo.learning_rate_schedule=constant"]  # which does not depend on the total
ITERATIONS = 8
NO_METRICS = "no metrics were recorded, so only traces were compared"
# The run was made with another constant of the algorithm, and a module that the present code has not.
CHANGED = (f"{NAME}/algos/ppo.py", "+ 1e-8", "+ HERE")
NEW_MODULE = """\
try:
    from present_only import HERE
except ImportError:
    HERE = 1e-2
"""


@dataclass
class Place:
    """A clone of the project as a colleague has it: the code without changes, runs by their refs alone."""

    clone: Path
    run: str
    runs_dir: Path

    def again(self, run: str | None = None, **words: Any) -> Reproduction:
        """Make a run again, and see that nothing is left of it."""
        before, words = self.state(), {"trust": True, **words}
        try:
            return reproduce(run or self.run, project=self.clone, runs_dir=self.runs_dir, **words)
        finally:
            assert self.state() == before

    def refused(self, run: str, **words: Any) -> str:
        """The message about a run that cannot be made again; nothing is left of that either."""
        with pytest.raises(ConfigError) as error:
            self.again(run, **words)
        assert not self.runs_dir.exists() or not list(self.runs_dir.glob("reproductions/**/*.json"))
        text = str(error.value)
        assert text.count("\n") <= 1
        return text

    def state(self) -> tuple[object, ...]:
        """All that a reproduction must leave as it is."""
        words = (["for-each-ref"], ["worktree", "list"], ["status", "--porcelain", "--branch"])
        return *(git(self.clone, *each) for each in words), sorted((self.clone / ".git").glob("[!i]*"))

    def outcome(self) -> dict[str, Any]:
        """The end of the run, from its ref."""
        rerun: dict[str, Any] = json.loads(self.file(snapshot.OUTCOME))
        return rerun

    def file(self, path: str) -> str:
        """A file of the run's ref."""
        return git(self.clone, "show", f"refs/runs/{self.run}:{snapshot.RESERVED}{path}")

    def told(self, name: str, files: Mapping[str, Callable[[str], str]] | None = None, **changed: Any) -> str:
        """Another ref like the run's, with other files and other facts in its outcome; the id."""
        outcome = self.outcome() | {"id": name}
        for key, value in changed.items():
            outcome[key] = outcome[key] | value if isinstance(value, dict) else value
        files, record = files or {}, snapshot.GitRecord(**outcome["git"])
        if paths.CONFIG in files:
            config = files[paths.CONFIG](self.file(paths.CONFIG))
            record = snapshot.commit_run(self.clone, record, name, config)
            outcome["git"] = asdict(record)
        else:
            record.ref = f"{paths.REF_PREFIX}{name}"
            git(self.clone, "update-ref", record.ref, str(record.commit))
            record.commit = git(self.clone, "rev-parse", record.ref).strip()
        held = {}
        for path in (paths.TRACE, paths.METRICS):
            held[path] = self.runs_dir.parent / f"{name}-{path}"
            held[path].write_text(files.get(path, str)(self.file(path)))
        assert snapshot.commit_outcome(self.clone, record, json.dumps(outcome), held) is None
        return name


@pytest.fixture(scope="module")
def recorded(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of changed code, in a linked worktree that is gone: the repository and the run's folder."""
    folder = tmp_path_factory.mktemp("recorded")
    repo, linked = Path(shutil.copytree(fork, folder / "repo")), folder / "linked"
    git(repo, "worktree", "add", "-q", "--detach", str(linked))
    path, old, new = CHANGED
    text = (linked / path).read_text()
    assert old in text
    more = "import torch\nfrom runlab.here import HERE\n"
    (linked / path).write_text(text.replace(old, new).replace("import torch\n", more, 1))
    (linked / "runlab" / "here.py").write_text(NEW_MODULE)
    run_train(linked, folder, *WORDS, status=0)
    git(repo, "worktree", "remove", "--force", str(linked))
    (record,) = folder.glob(f"runs/*/*/{paths.RECORD}")
    return repo, record.parent


@pytest.fixture
def place(recorded: tuple[Path, Path], tmp_path: Path) -> Place:
    """A fresh clone with the run's ref, and without any run folder."""
    repo, run_dir = recorded
    git(tmp_path, "clone", "-q", str(repo), str(tmp_path / "clone"))
    git(tmp_path / "clone", "fetch", "-q", "origin", "refs/runs/*:refs/runs/*")
    return Place(tmp_path / "clone", run_dir.name, tmp_path / "runs")


@pytest.mark.long
def test_changed_and_new_files_are_made_again_from_the_ref_alone(place: Place, tmp_path: Path) -> None:
    """Nothing of the present code is found by it, which, without them, gives another run."""
    (place.clone / "present_only.py").write_text("HERE = 0.5\n")
    before = place.state()
    words = [f"run={place.run}", "json=true", "keep=kept", "trust=true"]
    done = run(tmp_path, *program(place.clone, "reproduce"), *words, status=0)
    first, *others = done.stderr.splitlines()
    commit = place.outcome()["git"]["commit"]
    assert first == f"runs the code of {place.run}, commit {commit[:12]}, with your rights"
    for line in others:  # on a slow machine
        assert re.fullmatch(r"iteration \d of 8, equal so far", line)
    rerun = json.loads(done.stdout)
    assert (rerun["verdict"], rerun["run"], rerun["kept"]) == (IDENTICAL, place.run, str(tmp_path / "kept"))
    assert rerun["headline"] == "identical: 8 iterations (256 environment steps)"
    assert (rerun["iterations"], rerun["digest"]) == (ITERATIONS, place.outcome()["trace"]["digest"])
    assert place.state() == before
    # The run that is kept is one like any other, and that of the present code another.
    run_train(place.clone, tmp_path, *WORDS, "run_dir=present", status=0)
    assert compare_runs(tmp_path / "kept", tmp_path / "present").verdict == DIVERGED


def test_a_trace_that_was_changed_is_named(place: Place) -> None:
    """The run that was made again is kept and can be looked at more closely. A closed stream ends nothing."""

    def edit(text: str) -> str:
        before, line, rest = text.partition('["iteration",2,')
        steps, quote, digits = rest.partition('"')
        return before + line + steps + quote + "0" * 16 + digits[16:]

    run = place.told("tampered", files={paths.TRACE: edit})
    (gone := io.StringIO()).close()
    with contextlib.redirect_stderr(gone):
        rerun = place.again(run)
    assert rerun.verdict == DIVERGED
    assert rerun.headline.startswith("diverged in iteration 2 (environment steps 65 to ")
    assert rerun.comparison.differences == []
    assert rerun.kept is not None
    folder = Path(rerun.kept)
    assert folder.parent == place.runs_dir / "reproductions" / run
    assert {paths.TRACE, paths.RECORD, paths.CONFIG, "rerun.log"} <= {path.name for path in folder.iterdir()}
    assert "closer: " not in report(rerun)  # of a run whose folder is not here
    local = replace(rerun.comparison, a=replace(rerun.comparison.a, run_dir=str(folder)))
    assert f"closer: make compare a={folder} b={folder} zoom=true" in report(replace(rerun, comparison=local))


@pytest.mark.long
def test_metrics_are_compared_as_well(place: Place) -> None:
    installed = place.outcome()["versions"]["torch"]
    elsewhere = installed.partition("+")[0] + "+elsewhere"
    versions = {"torch": elsewhere, "beside-it": "1.0", "rich": "0.0"}
    rows = {paths.METRICS: lambda text: text.replace('"eval/return": ', '"eval/return": 1', 1)}
    rerun = place.again(place.told("rows", rows, versions=versions), keep=place.clone.parent / "k")
    assert rerun.verdict == DIVERGED
    assert rerun.headline.startswith("diverged: traces are identical, and metrics are not: eval/return")
    assert rerun.kept == str(place.clone.parent / "k")
    # Other versions are noted where they may not matter.
    assert rerun.notes == [f"torch {elsewhere} -> {installed}", "beside-it 1.0 -> (absent)"]


@pytest.mark.long
def test_a_run_that_ended_early_is_made_again_so_far(place: Place, recorded: tuple[Path, Path]) -> None:
    """Its process is ended there, and the rest of the run is not looked at."""

    def three(text: str) -> str:
        return text[: text.index("\n", text.index('["iteration",2,')) + 1]

    digest = json.loads(three(place.file(paths.TRACE)).splitlines()[-1])[-1]
    trace, resumed = {"digest": digest, "iterations": 3}, resumed_with()
    run = place.told("early", {paths.TRACE: three}, status="interrupted", trace=trace, **resumed)
    rerun = place.again(run)
    assert rerun.verdict == IDENTICAL, report(rerun)
    assert rerun.headline.startswith("identical: 3 iterations (96 environment steps)")
    assert "was interrupted after 3 iterations; made again up to there" in rerun.notes
    assert "was interrupted and resumed (1); compared with one straight run" in rerun.notes
    assert NO_METRICS not in rerun.notes
    # What is to be reproduced may be the failure.
    rerun = place.again(place.told("crashed", status="failed", error="RuntimeError: a crash"))
    assert "failed with RuntimeError: a crash; this time it went on" in rerun.notes
    # It is no reproduction of a longer trace.
    again = {paths.TRACE: lambda text: text + text.splitlines()[-1].replace(",7,", ",8,") + "\n"}
    rerun = place.again(place.told("longer", again | {paths.METRICS: lambda _: ""}))
    assert (rerun.verdict, rerun.kept is None, NO_METRICS in rerun.notes) == (SHORTER, False, True)
    # A killed run has no end, and a line that breaks off.
    run_dir = Path(shutil.copytree(recorded[1], place.runs_dir / "ppo-CartPole" / place.run))
    edit_record(run_dir, status="running", trace=None, final_metrics={})
    text = (run_dir / paths.TRACE).read_text()
    (run_dir / paths.TRACE).write_text(text[: text.index('["iteration",5,') + 40])
    rerun = place.again()
    assert (rerun.verdict, rerun.status, rerun.iterations) == (IDENTICAL, "killed", 5), report(rerun)


@pytest.mark.long
def test_a_run_whose_total_was_raised_is_identical_but_for_the_rows_of_its_old_end(
    place: Place, recorded: tuple[Path, Path]
) -> None:
    """The recorded run has a row there that no straight run has, and the next one differs."""
    rows = [json.loads(line) for line in (recorded[1] / paths.METRICS).read_text().splitlines()]
    after = next(i for i, row in enumerate(rows) if row["env_steps"] > 100)
    rows[after]["episode/return"] = 1e9
    rows.insert(after, rows[after] | {"env_steps": 100})
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    more: dict[str, Any] = {"resumed": [{"env_steps": 100, "changed": {"total_env_steps": [100, 256]}}]}
    assert place.again(place.told("raised", {paths.METRICS: lambda _: text}, **more)).verdict == IDENTICAL
    # A row that both have may have an evaluation in the recorded run alone.
    both = [json.loads(line) for line in (recorded[1] / paths.METRICS).read_text().splitlines()]
    both[0]["eval/here"] = 1e9
    text = "".join(f"{json.dumps(row)}\n" for row in both)
    end = both[0]["env_steps"]
    there: dict[str, Any] = {"resumed": [{"env_steps": end, "changed": {"total_env_steps": [end, 256]}}]}
    assert place.again(place.told("evaluated", {paths.METRICS: lambda _: text}, **there)).verdict == IDENTICAL
    assert place.again(place.told("not-raised", {paths.METRICS: lambda _: text})).verdict == DIVERGED
    rows[-1]["eval/return"] = 1e9
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    assert place.again(place.told("wrong", {paths.METRICS: lambda _: text}, **more)).verdict == DIVERGED


def resumed_with(**changed: Any) -> dict[str, Any]:
    return {"resumed": [{"env_steps": 128, "interruption": "killed", "changed": changed}]}


def test_a_run_that_cannot_be_made_again_is_refused_in_a_line(place: Place) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"versions": {"numpy": "0.9.0"}}, "numpy 0.9.0 -> "),
        ({"schema": None}, "has schema None; this version reads schema 1"),
        (resumed_with(code=["a.py"]), "went on after 128 steps with another a.py"),
        ({"files": {paths.TRACE: lambda text: "nonsense\n"}}, "is no trace of this version"),
    ]
    if not torch.cuda.is_available():
        of_gpu = {paths.CONFIG: lambda text: text.replace("device: cpu", "device: cuda")}
        cases += [({"files": of_gpu}, "torch finds no CUDA device")]
    for number, (changed, says) in enumerate(cases):
        assert says in place.refused(place.told(f"odd-{number}", **changed))


def test_what_the_recorded_code_lacks_is_named_where_it_cannot_start(place: Place) -> None:
    """A submodule, of which a commit has the name only, and a file that the snapshot left out."""
    clone, outcome = place.clone, place.outcome()
    git(clone, "checkout", "-q", "--detach", outcome["git"]["commit"])
    (clone / "runlab" / "here.py").write_text("from lib import HERE\n")
    git(clone, "add", "-A")
    git(clone, "update-index", "--add", "--cacheinfo", f"160000,{outcome['git']['commit']},lib")
    git(clone, "commit", "-q", "-m", "a module of a submodule")
    commit = git(clone, "rev-parse", "HEAD").strip()
    git(clone, "checkout", "-q", "main")
    skipped = [{"path": "weights.bin", "reason": "larger than 10 MB", "bytes": 1, "digest": None}]
    name = place.told("lacking", git={"commit": commit, "skipped": skipped})
    first, second = place.refused(name).split("\n")
    assert "came to no iteration this time: ImportError: cannot import name 'HERE' from 'lib'" in first
    assert second == (
        "submodules are not checked out: lib; what needs them fails; not in the snapshot: weights.bin "
        "(larger than 10 MB); what needs that fails or differs"
    )


def test_a_name_that_leads_to_no_run_that_has_ended(place: Place) -> None:
    begun = place.outcome()["git"]["commit"]
    for name, commit, message in (
        ("begun", begun, "refs/runs/begun: does not say how a run ended"),
        (place.run[:-1] + "x", None, f"did you mean {place.run}?"),
        ("other", None, "`git fetch origin 'refs/runs/*:refs/runs/*'` brings"),
    ):
        if commit:
            git(place.clone, "update-ref", f"refs/runs/{name}", commit)
        assert message in place.refused(name)


def test_code_from_elsewhere_needs_trust(place: Place, recorded: tuple[Path, Path]) -> None:
    """A fetched ref, unless the branch has its code; a ref that was made here does not."""
    commit = place.outcome()["git"]["commit"]
    for project, own in ((recorded[0], True), (place.clone, False)):
        with repository(project) as repo:
            assert origin.made_here(repo, commit) == own
    assert not changes.in_history(place.clone, commit)
    message = place.refused(place.run, trust=False)
    assert f"commit {commit[:12]}, is not known to be of this clone" in message
    assert "add trust=true" in message
    git(place.clone, "checkout", "-q", "--detach", commit)
    git(place.clone, "commit", "-q", "--allow-empty", "-m", "later")
    assert changes.in_history(place.clone, commit)
    # A record says which variables its processes get, and some of these name programs.
    for name, value in (("CXX", "sh -c date"), ("OMP_TOOL_LIBRARIES", "evil"), ("MKL_THING", "/tmp/evil")):
        run = place.told(f"with-{name}", environment={name: value})
        assert f"was made with {name}={value}" in place.refused(run, trust=False)


def test_a_ref_must_hold_the_code_that_it_names(place: Place, recorded: tuple[Path, Path]) -> None:
    """And its own id, which becomes a part of paths."""
    commit, empty = place.outcome()["git"]["commit"], git(place.clone, "mktree").strip()
    without, on_top = (
        git(place.clone, "commit-tree", empty, *parent, "-m", "no code").strip()
        for parent in ([], ["-p", commit])
    )
    nowhere = {"git": place.outcome()["git"] | {"commit": "1" * 40, "dirty": False}}
    for name, top, facts in ("without", without, {}), ("on-top", on_top, {}), ("absent", commit, nowhere):
        git(place.clone, "update-ref", f"refs/runs/{name}", top)
        record = snapshot.GitRecord(ref=f"refs/runs/{name}", commit=top)
        outcome = json.dumps(place.outcome() | {"id": name, **facts})
        assert snapshot.commit_outcome(place.clone, record, outcome, {}) is None
        assert "does not hold the code that it names" in place.refused(name)
    assert "says that it is the run other" in place.refused(place.told("one", id="other"))
    assert "is damaged" in place.refused(place.told("two", id="../../../x"))
    run_dir = Path(shutil.copytree(recorded[1], place.runs_dir / "ppo-CartPole" / "three"))
    edit_record(run_dir, id="../../../x")
    assert "is damaged" in place.refused("three")


def edit_record(run_dir: Path, **changes: Any) -> None:
    """Other facts in the record of a run folder."""
    record = json.loads((run_dir / paths.RECORD).read_text())
    (run_dir / paths.RECORD).write_text(json.dumps(record | changes))


def test_a_folder_that_does_not_suffice(place: Place, recorded: tuple[Path, Path]) -> None:
    run_dir = Path(shutil.copytree(recorded[1], place.runs_dir / "ppo-CartPole" / place.run))
    facts = json.loads((run_dir / paths.RECORD).read_text())["git"]
    for changed, message in (
        ({"commit": "1" * 40}, "is not in this repository; `git fetch origin 'refs/runs/"),
        ({"commit": None, "problem": "no space left"}, "has no snapshot of its code, so it cannot be made"),
    ):
        edit_record(run_dir, git=facts | changed)
        assert message in place.refused(place.run)
    edit_record(run_dir, git=facts)
    config = run_dir / paths.CONFIG
    config.write_text(config.read_text().replace("wandb:", "wadb:"))
    assert f"{place.run}: config.yaml is damaged: it has no logger.wandb" in place.refused(place.run)
    (run_dir / paths.TRACE).unlink()
    assert "was made with trace=iteration" in place.refused(place.run)
    edit_record(run_dir, left_out={paths.TRACE: "33,000,000 bytes"})
    assert "(33,000,000 bytes); give the run's folder" in place.refused(place.run)


@pytest.mark.long
def test_a_signal_ends_the_child_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    before, scratch = place.state(), tmp_path / "scratch"
    words = ["reproduce", f"run={place.run}", "trust=true"]
    begun = Started(place.clone, tmp_path, tmp_path / "log", *words, TMPDIR=str(scratch))
    begun.until(lambda: any(scratch.glob("reproduce-*/rerun.log")))
    begun.process.send_signal(signal.SIGTERM)
    begun.end(128 + signal.SIGTERM)
    assert begun.said.splitlines()[1:] == ["interrupted, so there is no answer"]
    assert place.state() == before
    assert run(tmp_path, "pgrep", "-f", str(scratch)).stdout == ""


def test_what_a_killed_command_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q")
    git(repo, "commit", "-q", "--allow-empty", "-m", "code")
    commit = git(repo, "rev-parse", "HEAD").strip()
    code = partial(recorded_code, repo, Mock(git=snapshot.GitRecord(commit=commit)), {}, tmp_path, True)
    reader, writer = os.pipe()
    if not (other := os.fork()):
        with code():
            os.write(writer, b"begun")
            signal.pause()

    def trees() -> int:
        return git(repo, "worktree", "list").count("\n") - 1

    try:
        assert os.read(reader, 9) == b"begun"
        with code(), code():
            assert trees() == 3
        assert trees() == 1  # it is in use
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    with code():
        assert trees() == 1
    assert trees() == 0  # `own_scratch` looks for the folders
