"""A copy of the project with an algorithm of its own: the tests apply to it as they are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, git

TOY = ROOT / "tests" / "toy"
REGISTERED = '''

@dataclass(slots=True, kw_only=True)
class ToyConfig(AlgoConfig):
    """Values of the toy."""

    learning_rate: float = positive()
    num_steps: int = count()


ALGORITHMS["toy"] = Entry(ToyConfig, "rltemplate.algos.toy:Toy")
'''
GENERIC = [  # with a test for every algorithm
    f"tests/{name}.py"
    for name in (
        "algos/test_algorithms",
        "determinism/test_checks",
        "config/test_config",
        "launch/test_interruptions",
        "launch/test_resume",
        "run/test_trace",
        "test_train",
    )
]


@pytest.fixture(scope="module")
def with_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which somebody has added an algorithm, in the way that README tells."""
    copy = tmp_path_factory.mktemp("clone")
    for name in git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")[:-1]:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    shutil.copy(TOY / "toy.py", copy / "rltemplate" / "algos" / "toy.py")
    shutil.copy(TOY / "toy.yaml", copy / "conf" / "algo" / "toy.yaml")
    with (copy / "rltemplate" / "config" / "algorithms.py").open("a") as file:
        file.write(REGISTERED)
    git(copy, "init", "-q", "-b", "main")
    git(copy, "add", "-A")
    git(copy, "commit", "-q", "-m", "a fork with an algorithm of its own")
    return copy


def outcome_of(folder: Path, file: str, which: str) -> subprocess.CompletedProcess[str]:
    """Run tests of the clone."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [*command, "-k", which, file], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", GENERIC)
def test_tests_apply_to_a_new_algorithm_unasked(with_toy: Path, file: str) -> None:
    done = outcome_of(with_toy, file, "toy")
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout.splitlines()[-1]


@pytest.mark.long
def test_a_mistake_in_the_new_algorithm_is_found(with_toy: Path) -> None:
    code = with_toy / "rltemplate" / "algos" / "toy.py"
    right = code.read_text()
    try:
        hidden = "self.__dict__.setdefault('hidden', []).append(0) or len(self.hidden)"
        code.write_text(right.replace("*data, rate)", f"*data, rate * ({hidden}))"))
        done = outcome_of(with_toy, "tests/launch/test_resume.py", "toy and changes_no_bit")
    finally:
        code.write_text(right)
    assert done.returncode == 1, done.stdout[-8000:]
    assert re.match(r"[2-9] failed", done.stdout.splitlines()[-1])


@pytest.mark.long
def test_the_new_algorithm_learns(with_toy: Path, tmp_path: Path) -> None:
    """Or it would not show that one can be added."""
    words = ["algo=toy", "env=CartPole", "algo.num_steps=200", "total_env_steps=60000", "video_every=0"]
    command = [sys.executable, str(with_toy / "scripts" / "train.py"), *words, "logger=none", "run_dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    returns = [row["eval/return"] for row in map(json.loads, lines) if "eval/return" in row]
    assert returns[-1] > 100  # a random policy comes to 22
