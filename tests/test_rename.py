"""Renaming a fork: tried on a copy of this repository, which has to work afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A fork runs these tests too, and was hardly given a name with this end.
OLD = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
NEW = f"{OLD}_renamed"
IDENTITY = {
    f"GIT_{who}_{what}": "t@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}
# What git hands to its hooks would lead the commands below to another repository.
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PYTHONPATH"))}


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**CLEAN, **IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def rename(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, sys.executable, "scripts/rename.py", *words)


def files_of(folder: Path) -> list[str]:
    """Of the repository, also those that are not committed yet."""
    listed = run(folder, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout
    return [name for name in listed.split("\0") if name and (folder / name).is_file()]


def commit_all(folder: Path) -> None:
    run(folder, "git", "init", "-q")
    run(folder, "git", "add", "-A")
    done = run(folder, "git", "commit", "-q", "-m", "start")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A copy of this repository with everything committed."""
    names = files_of(ROOT)
    if not names:
        pytest.skip("not a git checkout")
    folder = tmp_path / "fork"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    commit_all(folder)
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The least that can be renamed, for the refusals."""
    folder = tmp_path / "small"
    (folder / "scripts").mkdir(parents=True)
    (folder / "tiny").mkdir()
    shutil.copy(ROOT / "scripts" / "rename.py", folder / "scripts")
    (folder / "scripts" / "train.py").write_text("import tiny\nprint(tiny.NAME)\n")
    (folder / "tiny" / "__init__.py").write_text('NAME = "tiny"\n')
    (folder / "pyproject.toml").write_text('[project]\nname = "tiny"\n')
    (folder / "LICENSE").write_text("Copyright the tiny authors\n")
    commit_all(folder)
    return folder


def test_a_renamed_fork_works(fork: Path) -> None:
    done = rename(fork, f"name={NEW}")
    assert done.returncode == 0, done.stderr
    assert not (fork / OLD).exists()
    left = [
        name
        for name in files_of(fork)
        if OLD in (fork / name).read_text("utf-8", errors="replace").lower().replace(NEW, "")
    ]
    assert set(left) <= {"LICENSE"}
    compiled = run(fork, sys.executable, "-m", "compileall", "-q", NEW, "scripts", "tests")
    assert compiled.returncode == 0, compiled.stdout
    imported = run(fork, sys.executable, "-c", f"import {NEW}; print({NEW}.__file__)")
    assert imported.stdout.strip() == str(fork / NEW / "__init__.py")
    inner = run(
        fork, sys.executable, "-c", f"from {NEW}.types import ConfigError; print(ConfigError.__module__)"
    )
    assert inner.stdout.strip() == f"{NEW}.types"


def test_the_pieces_that_name_the_package_follow(fork: Path) -> None:
    assert rename(fork, f"name={NEW}").returncode == 0
    pyproject = (fork / "pyproject.toml").read_text()
    assert f'name = "{NEW}"' in pyproject
    assert f'"{NEW}*"' in pyproject
    assert NEW in tomllib.loads(pyproject)["tool"]["mypy"]["files"]
    again = rename(fork, "name=other_name", "force=true")
    assert again.returncode == 0, again.stderr
    assert (fork / "other_name" / "__init__.py").is_file()
    assert not (fork / NEW).exists()


def test_names_within_names_and_file_names_change_and_strangers_do_not(small: Path) -> None:
    (small / "tiny" / "__init__.py").write_text('TINY_HOME = "tiny_home"\nother = "destiny tinyest Tiny"\n')
    (small / "tiny.md").write_text("about tiny.\n")
    (small / "picture").write_bytes(b"tiny \xff\x00")
    (small / "link").symlink_to("tiny.md")
    assert rename(small, "name=large", "force=true").returncode == 0
    assert (
        small / "large" / "__init__.py"
    ).read_text() == 'LARGE_HOME = "large_home"\nother = "destiny tinyest Tiny"\n'
    assert (small / "large.md").read_text() == "about large.\n"
    assert (small / "picture").read_bytes() == b"tiny \xff\x00"
    assert (small / "LICENSE").read_text() == "Copyright the tiny authors\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Odd-Name", "for example name=odd_name"),
        ("2fast", "for example name=fast"),
        ("class", "a word of the Python language"),
        ("random", "standard library"),
        ("numpy", "installed package 'numpy'"),
        ("train", "is taken"),
        ("scripts", "is taken"),
        ("tiny", "called tiny already"),
        ("../x", "lower-case letters"),
        ("", "Usage: make rename"),
    ],
)
def test_bad_names_are_refused_and_nothing_changes(small: Path, name: str, message: str) -> None:
    done = rename(small, f"name={name}", "force=true")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert run(small, "git", "status", "--porcelain").stdout == ""


def test_work_that_is_not_committed_is_not_put_at_risk(small: Path) -> None:
    (small / "notes.txt").write_text("tiny\n")
    refused = rename(small, "name=large")
    assert refused.returncode == 2
    assert "force=true" in refused.stderr
    assert (small / "tiny").is_dir()
    assert rename(small, "name=large", "force=true").returncode == 0
    assert (small / "notes.txt").read_text() == "large\n"


def test_misspelt_words_are_refused(small: Path) -> None:
    for words in (["nam=large"], ["name=large", "force=maybe"], ["large"]):
        done = rename(small, *words)
        assert done.returncode == 2, words
        assert (small / "tiny").is_dir()
