"""The extensions of docs/examples.md and docs/extending.md, applied as the pages have them, work."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, SHRUNK, copy_project, git, rows, run, run_train

DOCS = ROOT / "docs"
SECTIONS = re.split(r"^## ", (DOCS / "examples.md").read_text(), flags=re.MULTILINE)[1:]
BLOCK = re.compile(
    r"^(?:`([\w./]+)`|[^\n]*)\n\n```(?:python|yaml|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
PARTS = "part"  # all blocks of docs/extending.md
TEXTS = {
    **dict(zip(("td3", "ppo", "sac"), SECTIONS, strict=True)),
    PARTS: (DOCS / "extending.md").read_text(),
}
# With a test for every algorithm, in two processes.
GENERIC = [
    ["launch/test_interruptions", "launch/test_resume"],
    [
        "algos/test_algorithms",
        "algos/test_probe_envs",
        "determinism/test_checks",
        "config/test_config",
        "run/test_trace",
        "test_train",
    ],
]
QUIET = ["logger=none", "video_every=0", "run_dir=run"]

Extended = Callable[[str], Path]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Extended:
    """A copy of the project with the extension that is about an algorithm, or with all parts."""
    folder = tmp_path_factory.mktemp("extended")

    def apply(name: str) -> Path:
        if not (copy := folder / name).exists():
            copy_project(copy)
            for file, text in BLOCK.findall(TEXTS[name]):
                path = copy / (file or "change.diff")
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
                if not file:
                    git(copy, "apply", "change.diff")
            git(copy, "add", "-A")
            git(copy, "commit", "-q", "-m", "an extension")
        return copy

    return apply


def outcome_of(folder: Path, which: str, *files: str) -> str:
    """The output of tests of an extended project, all of which pass."""
    words = ["-q", "-rp", "-p", "no:cacheprovider", "-m", "not slow", "-k", which]
    words += [f"tests/{file}.py" for file in files]
    command = [sys.executable, "-m", "pytest", *words]
    return run(folder, *command, PYTHONPATH=str(folder), PYTEST_ADDOPTS="", status=0).stdout


@pytest.mark.parametrize(("name", "number"), {"td3": 3, "ppo": 1, "sac": 1, PARTS: 10}.items())
def test_every_block_can_be_applied(extended: Extended, name: str, number: int) -> None:
    changed = git(extended(name), "diff", "--name-only", "HEAD~1", "--", ":!change.diff")
    assert len(changed.split()) == number


@pytest.mark.long
def test_environment_wrapper_network_metric_and_sink_work_in_a_run(
    extended: Extended, tmp_path: Path
) -> None:
    """The corridor pays 1 at its end; only in training, rewards are shaped, which costs a part of it."""
    words = ["env=Corridor", "total_env_steps=6144", "algo.num_steps=128", "algo.normalize_reward=false"]
    words += ["log_every=1024", "eval_every=6144", "num_threads=1", "compile=false", "logger.csv=true"]
    run_train(extended(PARTS), tmp_path, *words, *QUIET, status=0)
    run_dir = tmp_path / "run"
    last = rows(run_dir)[-1]
    assert last["eval/return"] == 1.0
    assert 0.5 < last["episode/return"] < 0.95
    assert last["policy/ratio_std"] > 0.0
    table = [line.split(",") for line in (run_dir / "metrics.csv").read_text().splitlines()[1:]]
    assert {name: float(value) for steps, name, value in table if "time" not in name and steps == "6144"} == {
        name: value for name, value in last.items() if name != "env_steps"
    }


@pytest.mark.long
def test_another_encoder_works_in_a_run(extended: Extended, tmp_path: Path) -> None:
    words = ["env=Catch", "algo.encoder=wide", "determinism=invariant", "total_env_steps=512"]
    run_train(extended(PARTS), tmp_path, *words, "eval_every=0", *QUIET, status=0)
    assert rows(tmp_path / "run")[-1]["policy/first_ratio_max_error"] == 0.0


@pytest.mark.long
@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_a_changed_algorithm_trains_and_resumes_exactly(
    extended: Extended, fork: Path, tmp_path: Path, algo: str
) -> None:
    """PPO learns the same beside its model, and SAC something else with longer returns."""
    words = [f"algo={algo}", "env=Pendulum", *SHRUNK[algo], "compile=false", "num_threads=1"]
    words += ["total_env_steps=192", "log_every=32", "eval_every=0", *QUIET]
    found = []
    for project in extended(algo), fork:
        folder = tmp_path / project.name
        folder.mkdir()
        run_train(project, folder, *words, status=0)
        found.append(rows(folder / "run"))
    new, old = found
    losses = [row.pop("loss/auxiliary") for row in new if "loss/auxiliary" in row]
    assert len(losses) == (len(new) if algo == "ppo" else 0)
    assert (new == old) == (algo == "ppo")
    told = outcome_of(extended(algo), f"changes_no_bit and {algo}", "launch/test_resume")
    assert re.match(r"\d+ passed", told.splitlines()[-1]), told[-8000:]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("files", GENERIC)
def test_tests_apply_to_a_new_algorithm_unasked(extended: Extended, files: list[str]) -> None:
    told = outcome_of(extended("td3"), "td3", *files)
    assert re.match(r"[0-9]+ passed", told.splitlines()[-1]), told[-8000:]
    assert {*re.findall(r"^PASSED tests/([\w/]+)\.py", told, re.MULTILINE)} == {*files}


@pytest.mark.long
def test_the_new_algorithm_learns(extended: Extended, tmp_path: Path) -> None:
    words = ["algo=td3", "env=Pendulum", "total_env_steps=6000", *QUIET]
    run_train(extended("td3"), tmp_path, *words, "algo.hidden_sizes=[64,64]", "compile=false", status=0)
    assert rows(tmp_path / "run")[-1]["eval/return"] > -500.0  # a random policy comes to -1200
