"""A copy of the project with an algorithm of its own: the tests apply to it as they are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, copy_project, git, rows, run_train

TOY = ROOT / "tests" / "toy"
REGISTERED = '''

@dataclass(slots=True, kw_only=True)
class ToyConfig(AlgoConfig):
    """Values of the toy."""

    learning_rate: float = positive()
    num_steps: int = count()


ALGORITHMS["toy"] = Entry(ToyConfig, "rltemplate.algos.toy:Toy")
'''
# With a test for every algorithm.
GENERIC = "algos/test_algorithms determinism/test_checks config/test_config launch/test_interruptions"
GENERIC += " launch/test_resume run/test_trace test_train"


@pytest.fixture(scope="module")
def with_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which somebody has added an algorithm, in the way that README tells."""
    copy = tmp_path_factory.mktemp("clone") / "copy"
    copy_project(copy)
    shutil.copy(TOY / "toy.py", copy / "rltemplate" / "algos" / "toy.py")
    shutil.copy(TOY / "toy.yaml", copy / "conf" / "algo" / "toy.yaml")
    with (copy / "rltemplate" / "config" / "algorithms.py").open("a") as file:
        file.write(REGISTERED)
    git(copy, "add", "-A")
    git(copy, "commit", "-q", "-m", "a fork with an algorithm of its own")
    return copy


def outcome_of(folder: Path, file: str, which: str) -> str:
    """The output of tests of the clone."""
    words = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", which, f"tests/{file}.py"]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True).stdout


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", GENERIC.split())
def test_tests_apply_to_a_new_algorithm_unasked(with_toy: Path, file: str) -> None:
    told = outcome_of(with_toy, file, "toy")
    assert re.match(r"[0-9]+ passed", told.splitlines()[-1]), told[-8000:]


@pytest.mark.long
def test_a_mistake_in_the_new_algorithm_is_found(with_toy: Path) -> None:
    code = with_toy / "rltemplate" / "algos" / "toy.py"
    right = code.read_text()
    hidden = "self.__dict__.setdefault('hidden', []).append(0) or len(self.hidden)"
    code.write_text(right.replace("*data, rate)", f"*data, rate * ({hidden}))"))
    told = outcome_of(with_toy, "launch/test_resume", "toy and changes_no_bit")
    code.write_text(right)
    assert re.match(r"[2-9] failed", told.splitlines()[-1]), told[-8000:]


@pytest.mark.long
def test_the_new_algorithm_learns(with_toy: Path, tmp_path: Path) -> None:
    words = ["algo=toy", "env=CartPole", "algo.num_steps=200", "total_env_steps=60000", "video_every=0"]
    done = run_train(with_toy, tmp_path, *words, "logger=none", "run_dir=run")
    assert done.returncode == 0, done.stderr
    returns = [row["eval/return"] for row in rows(tmp_path / "run") if "eval/return" in row]
    assert returns[-1] > 100  # a random policy comes to 22
