"""The script and the wrapper of docs/own-loop.md, applied as the page has them, do what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import (
    ROOT,
    Started,
    copy_project,
    differences,
    git,
    newest_state,
    program,
    record,
    rows,
    run,
    run_train,
)

from runlab.analysis.compare import DIVERGED, IDENTICAL, compare_runs, report
from runlab.run.manifest import list_checkpoints

PAGE = (ROOT / "docs" / "own-loop.md").read_text()
BLOCKS = dict(re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
SCRIPT, WRAPPER, CONFIG, VALUES = BLOCKS
TOTAL = 8192  # steps of a run
WORDS = [f"total_env_steps={TOTAL}", "checkpoint_every=1024", "eval_every=4096", "eval_episodes=2"]
WORDS += ["log_every=1024", "video_every=0", "logger=none"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the four files of the page."""
    copy = tmp_path_factory.mktemp("own") / "project"
    copy_project(copy)
    for file, text in BLOCKS.items():
        (copy / file).write_text(text)
    git(copy, "add", "-A")
    git(copy, "commit", "-q", "-m", "a loop of our own")
    return copy


@pytest.fixture(scope="module")
def seeds(project: Path) -> list[Path]:
    """Two seeds, as a sweep trains them."""
    run_train(project, project, "algo=solo", "seed=1,2", *WORDS, status=0)
    runs = sorted(project.glob("runs/solo-CartPole/*"), key=lambda each: record(each)["overrides"])
    assert len(runs) == 2
    return runs


def test_the_page_counts_its_lines() -> None:
    script, wrapper = (len(BLOCKS[file].splitlines()) for file in (SCRIPT, WRAPPER))
    assert f"script has {script} lines and its wrapper {wrapper}" in " ".join(PAGE.split())


@pytest.mark.long
def test_the_script_runs_by_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BLOCKS[SCRIPT])
    output = run(tmp_path, sys.executable, "-P", "script.py", status=0, PYTHONPATH="").stdout
    returns = [float(value) for value in re.findall(r"return ([\d.]+)", output)]
    assert returns[-1] > 2 * returns[0]


@pytest.mark.long
def test_a_sweep_is_recorded_and_read(project: Path, seeds: list[Path]) -> None:
    for run_dir in seeds:
        facts = record(run_dir)
        assert (facts["status"], facts["env_steps"]) == ("finished", TOTAL)
        assert git(project, "show", f"{facts['git']['ref']}:{WRAPPER}") == BLOCKS[WRAPPER]
        assert {SCRIPT, WRAPPER, CONFIG} <= {*facts["used"]["files"]}
        assert {"eval/return", "loss/policy"} <= {*rows(run_dir)[-1]}
    table = run(project, *program(project, "stats"), "runs=runs/solo-CartPole/*", status=0).stdout
    assert re.search(r"solo\b.*\b2\b", table)
    comparison = compare_runs(*seeds)
    assert comparison.verdict == DIVERGED
    text = report(comparison)
    assert "first  start/agent/critic.0.bias" in text
    assert "The seeds differ" in text
    evaluated = run(project, *program(project, "evaluate"), f"run={seeds[0]}", "episodes=2", status=0)
    assert "2 episodes" in evaluated.stdout
    again = run(project, *program(project, "reproduce"), f"run={seeds[0]}", status=0)
    assert "identical" in again.stdout


@pytest.mark.long
def test_the_tests_of_every_algorithm_pass_with_it(project: Path) -> None:
    names = [
        "algos/test_algorithms",
        "run/test_trace",
        "determinism/test_checks",
        "test_engine",
        "test_evaluation",
    ]
    words = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", "solo"]
    command = [sys.executable, "-m", "pytest", *words, *(f"tests/{name}.py" for name in names)]
    run(project, *command, PYTHONPATH=str(project), PYTEST_ADDOPTS="", status=0)


@pytest.mark.long
def test_a_killed_run_resumes_exactly(project: Path, seeds: list[Path], tmp_path: Path) -> None:
    killed = killed_and_resumed(project, tmp_path)
    assert differences(seeds[0], killed) == []
    assert compare_runs(seeds[0], killed).verdict == IDENTICAL


@pytest.mark.long
def test_another_line_of_the_script_is_named(project: Path, seeds: list[Path], tmp_path: Path) -> None:
    script = project / SCRIPT
    script.write_text(BLOCKS[SCRIPT].replace("0.5 * value_loss", "0.6 * value_loss"))
    try:
        run_train(project, tmp_path, "algo=solo", "seed=1", *WORDS, "run_dir=edited", status=0)
    finally:
        git(project, "checkout", "-q", SCRIPT)
    words = f"a={seeds[0]}", f"b={tmp_path / 'edited'}"
    output = run(project, *program(project, "compare"), *words, status=1).stdout
    assert "diverged in iteration 0 " in output
    assert re.search(rf"^  code\n    {SCRIPT}  ", output, re.MULTILINE)


@pytest.mark.long
def test_invariant_is_refused_in_a_line(project: Path, tmp_path: Path) -> None:
    words = ["algo=solo", "determinism=invariant", *WORDS]
    output = run_train(project, tmp_path, *words, status=2).stderr
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "algo=solo shows no networks (forward_passes)" in line
    assert "Traceback" not in output
    assert [*tmp_path.iterdir()] == []


@pytest.mark.long
@pytest.mark.parametrize("forgets", ["state_dict", "load_state_dict"])
def test_a_forgotten_optimiser_is_seen(
    project: Path, seeds: list[Path], tmp_path: Path, forgets: str
) -> None:
    """A resumed run without Adam's moments goes another way, from the first iteration on."""
    text, straight = BLOCKS[WRAPPER], seeds[0]
    text = text.replace('        self.optimizer.load_state_dict(state["optimizer"])\n', "")
    if forgets == "state_dict":
        text = text.replace(', "optimizer": self.optimizer.state_dict()', "")
    (project / WRAPPER).write_text(text)
    try:
        if forgets == "state_dict":
            straight = tmp_path / "straight"
            run_train(project, tmp_path, "algo=solo", "seed=1", *WORDS, "run_dir=straight", status=0)
        resumed = killed_and_resumed(project, tmp_path)
    finally:
        git(project, "checkout", "-q", WRAPPER)
    iteration = record(resumed)["resumed"][0]["env_steps"] // (8 * 32)
    text = report(compare_runs(straight, resumed))
    assert re.match(rf"diverged in iteration {iteration} \(.*\): loss/policy\n", text)
    assert ("\n  only a start/optimizer/state/0/exp_avg, " in text) == (forgets == "load_state_dict")


def killed_and_resumed(project: Path, folder: Path) -> Path:
    """A run of seed 1 that was killed after a checkpoint, and then resumed to its end."""
    run_dir = folder / "killed"
    words = ["train", "algo=solo", "seed=1", *WORDS, f"run_dir={run_dir}"]
    started = Started(project, folder, folder / "begun.log", *words)
    started.until(lambda: bool(list_checkpoints(run_dir)))
    started.kill()
    assert record(run_dir)["status"] == "running"
    assert newest_state(run_dir)["env_steps"] < TOTAL
    run(folder, *program(project, "resume"), f"run={run_dir}", status=0)
    assert len(record(run_dir)["resumed"]) == 1
    return run_dir
