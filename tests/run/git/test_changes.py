"""Changes of code between recorded runs, and between a run and the work tree, with real git."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import git

from rltemplate.run.git import changes
from rltemplate.run.git.snapshot import commit_outcome, commit_run, take_snapshot


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "a.py").write_text("x = 1\n")
    (folder / "README.md").write_text("read\n")
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def recorded(repo: Path, run_id: str, config: str = "seed: 1\n") -> dict[str, Any]:
    """What the record of a run that began and ended now says of its code."""
    snapshot = take_snapshot(repo)
    record = commit_run(repo, snapshot, run_id, config)
    assert record.problem is None
    assert commit_outcome(repo, record, "{}") is None
    return asdict(record)


def everything(repo: Path) -> list[str]:
    return sorted(str(path) for path in (repo / ".git").rglob("*"))


def test_files_and_text_between_two_runs(repo: Path) -> None:
    one = recorded(repo, "one")
    (repo / "pkg" / "a.py").write_text("x = 2\n")
    (repo / "new.py").write_text("y = 1\n")
    two = recorded(repo, "two", "seed: 2\n")
    before = everything(repo)
    assert changes.files_between(repo, one, two) == ["new.py", "pkg/a.py"]
    text = changes.text_between(repo, one, two)
    assert text is not None
    assert "-x = 1\n+x = 2\n" in text
    assert "seed" not in text  # the configuration is no code, and is compared by itself
    assert changes.files_between(repo, two, two) == []
    (repo / "pkg" / "a.py").write_text("x = 3\n")
    assert changes.files_since(repo, two) == ["pkg/a.py"]
    assert everything(repo) == before
    # A record may come from anywhere, and may not give git options.
    assert changes.files_between(repo, one, {"tree": f"--output={repo}/written"}) is None
    assert not (repo / "written").exists()


def test_runs_of_another_clone(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", str(repo), "other")
    clean = recorded(repo, "one")
    (repo / "pkg" / "a.py").write_text("x = 2\n")
    edited = recorded(repo, "two")
    other = tmp_path / "other"
    (other / "pkg" / "a.py").write_text("x = 4\n")
    here = recorded(other, "three")
    # Committed code is in every clone; other code is known where it was recorded.
    assert changes.files_between(other, clean, here) == ["pkg/a.py"]
    assert changes.files_between(other, edited, here) is None
    git(other, "fetch", "-q", "origin", "refs/runs/*:refs/runs/*")
    assert changes.files_between(other, edited, here) == ["pkg/a.py"]
