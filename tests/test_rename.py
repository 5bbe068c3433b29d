"""Renaming a fork: tried on a copy of this repository, which has to work afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, git

# A fork runs these tests too, and was hardly given a name with this end.
OLD = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
NEW = f"{OLD}_renamed"
# What git hands to its hooks would lead the commands below to another repository.
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PYTHONPATH"))}


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = CLEAN | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def rename(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "scripts/rename.py", *words)


def files_of(folder: Path) -> list[str]:
    names = git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [name for name in names if name and (folder / name).is_file()]


def committed(folder: Path) -> Path:
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "start")
    return folder


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
    return committed(folder)


def test_a_renamed_fork_works_and_can_be_renamed_again(tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    for name in files_of(ROOT):
        (fork / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, fork / name)
    committed(fork)
    done = rename(fork, f"name={NEW}")
    assert done.returncode == 0, done.stderr
    assert not (fork / OLD).exists()
    texts = {name: (fork / name).read_text("utf-8", errors="replace").lower() for name in files_of(fork)}
    assert {name for name, text in texts.items() if OLD in text.replace(NEW, "")} <= {"LICENSE"}
    assert NEW in tomllib.loads((fork / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert python(fork, "-m", "compileall", "-q", NEW, "scripts", "tests").returncode == 0
    helped = python(fork, "-m", NEW, "help")
    assert helped.stdout.startswith(f"usage: python -m {NEW} COMMAND")
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


REFUSED = {
    "name=Odd-Name": "for example name=odd_name",
    "name=class": "a word of the Python language",
    "name=random": "standard library",
    "name=numpy": "installed package 'numpy'",
    "name=train": "is taken",
    "name=tiny": "called tiny already",
    "name=../x": "lower-case letters",
    "name=a\nb": r"name='a\nb'",
    "name=" + "a" * 300: "300 characters long; at most 60",
    "name=": "Usage: make rename",
    "large": "'large' is not understood",
}


def test_bad_words_are_refused_and_nothing_changes(small: Path) -> None:
    for word, message in REFUSED.items():
        done = rename(small, word)
        assert done.returncode == 2, word
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    for words in (["name=one", "name=two"], ["name=fine", "force=maybe"]):
        assert rename(small, *words).returncode == 2
    assert git(small, "status", "--porcelain") == ""
