"""Renaming a fork: tried on a copy of this repository, which has to work afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, copy_project, git

# A fork runs these tests too, and was hardly given a name with this end.
OLD = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
NEW = f"{OLD}_renamed"


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # What git hands to its hooks would lead to another repository.
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PYTHONPATH"))}
    environment = {**clean, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def rename(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "scripts/rename.py", *words)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The least that can be renamed."""
    folder = tmp_path / "small"
    (folder / "scripts").mkdir(parents=True)
    (folder / "tiny").mkdir()
    shutil.copy(ROOT / "scripts" / "rename.py", folder / "scripts")
    (folder / "scripts" / "train.py").write_text("import tiny\nprint(tiny.NAME)\n")
    (folder / "tiny" / "__init__.py").write_text('TINY_HOME = "tiny_home"\nother = "destiny tinyest Tiny"\n')
    (folder / "pyproject.toml").write_text('[project]\nname = "tiny"\n')
    (folder / "LICENSE").write_text("Copyright the tiny authors\n")
    (folder / "tiny.md").write_text("about tiny.\n")
    (folder / "picture").write_bytes(b"tiny \xff\x00")
    (folder / "link").symlink_to("tiny.md")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "start")
    return folder


def test_a_renamed_fork_works_and_can_be_renamed_again(tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    copy_project(fork)
    done = rename(fork, f"name={NEW}")
    assert done.returncode == 0, done.stderr
    assert not (fork / OLD).exists()
    git(fork, "add", "-A")
    names = git(fork, "ls-files").splitlines()
    texts = {name: (fork / name).read_text("utf-8", errors="replace").lower() for name in names}
    assert {name for name, text in texts.items() if OLD in text.replace(NEW, "")} <= {"LICENSE"}
    assert NEW in tomllib.loads((fork / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert python(fork, "-m", "compileall", "-q", NEW, "scripts", "tests").returncode == 0
    assert python(fork, "-m", NEW, "help").stdout.startswith(f"usage: python -m {NEW} COMMAND")
    again = rename(fork, "name=other_name", "force=true")
    assert again.returncode == 0, again.stderr
    assert (fork / "other_name" / "__init__.py").is_file()


def test_names_within_names_and_file_names_change_and_strangers_do_not(small: Path) -> None:
    (small / "notes.txt").write_text("tiny\n")
    refused = rename(small, "name=large")
    assert (refused.returncode, "force=true" in refused.stderr) == (2, True)
    assert rename(small, "name=large", "force=true").returncode == 0
    code = (small / "large" / "__init__.py").read_text()
    assert code == 'LARGE_HOME = "large_home"\nother = "destiny tinyest Tiny"\n'
    assert (small / "large.md").read_text() == "about large.\n"
    assert (small / "notes.txt").read_text() == "large\n"
    assert (small / "picture").read_bytes() == b"tiny \xff\x00"
    assert (small / "LICENSE").read_text() == "Copyright the tiny authors\n"


def test_bad_words_are_refused_and_nothing_changes(small: Path) -> None:
    for words, message in {
        "name=Odd-Name": "for example name=odd_name",
        "name=class": "a word of the Python language",
        "name=random": "standard library",
        "name=numpy": "installed package 'numpy'",
        "name=train": "is taken",
        "name=tiny": "called tiny already",
        "name=" + "a" * 300: "300 characters long; at most 60",
        "name=": "Usage: make rename",
        "name=one name=two": "'name=two' is not understood a second time",
        "name=fine force=maybe": "expected true or false",
    }.items():
        done = rename(small, *words.split())
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert git(small, "status", "--porcelain") == ""
