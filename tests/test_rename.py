"""Renaming a fork: tried on a copy of this repository, which has to work afterwards."""

from __future__ import annotations

import os
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


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with some files of a user's, all committed."""
    copy = tmp_path_factory.mktemp("clone") / "copy"
    copy_project(copy)
    (copy / f"{OLD}.md").write_text(f"about {OLD}, x{OLD} and {OLD.upper()}_HOME\n")
    (copy / "picture").write_bytes(f"{OLD} \xff\0".encode("latin1"))
    (copy / "link").symlink_to("README.md")
    git(copy, "add", "-A")
    git(copy, "commit", "-q", "-m", "files of a user")
    return copy


def test_bad_words_are_refused_and_nothing_changes(clone: Path) -> None:
    for words, message in {
        "name=Odd-Name": "for example name=odd_name",
        "name=class": "a word of the Python language",
        "name=random": "standard library",
        "name=numpy": "installed package 'numpy'",
        "name=train": "is taken",
        f"name={OLD}": f"called {OLD} already",
        "name=" + "a" * 300: "300 characters long; at most 60",
        "name=": "Usage: make rename",
        "name=one name=two": "'name=two' is not understood a second time",
        "name=fine force=maybe": "expected true or false",
    }.items():
        done = rename(clone, *words.split())
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert git(clone, "status", "--porcelain") == ""


def test_a_renamed_fork_works_and_can_be_renamed_again(clone: Path) -> None:
    licence = (clone / "LICENSE").read_text()
    done = rename(clone, f"name={NEW}")
    assert done.returncode == 0, done.stderr
    assert not (clone / OLD).exists()
    assert (clone / f"{NEW}.md").read_text() == f"about {NEW}, x{OLD} and {NEW.upper()}_HOME\n"
    assert (clone / "picture").read_bytes() == f"{OLD} \xff\0".encode("latin1")
    assert (clone / "LICENSE").read_text() == licence
    names = set(git(clone, "ls-files", "-co", "--exclude-standard").splitlines()) - {"LICENSE", f"{NEW}.md"}
    files = [clone / name for name in names if (clone / name).is_file() and name != "picture"]
    texts = {path: path.read_text("utf-8", errors="replace").lower() for path in files}
    assert [path for path, text in texts.items() if OLD in text.replace(NEW, "")] == []
    assert NEW in tomllib.loads((clone / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert python(clone, "-m", "compileall", "-q", NEW, "scripts", "tests").returncode == 0
    assert python(clone, "-m", NEW, "help").stdout.startswith(f"usage: python -m {NEW} COMMAND")
    refused = rename(clone, "name=other_name")
    assert (refused.returncode, "force=true" in refused.stderr) == (2, True)
    assert rename(clone, "name=other_name", "force=true").returncode == 0
    assert (clone / "other_name" / "__init__.py").is_file()
