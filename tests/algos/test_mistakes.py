"""Of every mistake in mistakes.toml some test notices that it is one."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import planted
import pytest
from conftest import ROOT

GROUPS = tomllib.loads((ROOT / "tests" / "algos" / "mistakes.toml").read_text(encoding="utf-8"))["group"]
MISTAKES = [
    {"in": group["in"], "caught_by": [group["caught_by"], *test][-1], "is": wrong, "old": old, "new": new}
    for group in GROUPS
    for wrong, old, new, *test in group["mistakes"]
]
NAMES = [f"{mistake['in']}: {mistake['is']}" for mistake in MISTAKES]


@pytest.mark.parametrize("mistake", MISTAKES, ids=NAMES)
def test_every_mistake_can_be_made(mistake: dict[str, str], tmp_path: Path) -> None:
    """Otherwise the list would grow old unnoticed."""
    copy = shutil.copy(ROOT / "rltemplate" / mistake["in"], tmp_path)
    planted.plant(Path(copy), mistake["old"], mistake["new"])
    compile(Path(copy).read_text(encoding="utf-8"), copy, "exec")


def test_no_mistake_is_listed_twice() -> None:
    assert len({(mistake["in"], mistake["old"], mistake["new"]) for mistake in MISTAKES}) == len(MISTAKES)
    assert len(set(NAMES)) == len(NAMES) >= 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project without any of the mistakes, in which all tests named in the list pass."""
    folder = tmp_path_factory.mktemp("whole")
    planted.copy_project(ROOT, folder)
    tests = sorted({mistake["caught_by"] for mistake in MISTAKES})
    outcomes = planted.run_tests(folder, tests)
    assert [(one.test, one.stopped_by) for one in outcomes] == [(one.test, "") for one in outcomes]
    assert len(outcomes) == len(tests)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES, ids=NAMES)
def test_every_mistake_is_noticed(mistake: dict[str, str], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    planted.plant(folder / "rltemplate" / mistake["in"], mistake["old"], mistake["new"])
    (outcome,) = planted.run_tests(folder, [mistake["caught_by"]])
    assert outcome.stopped_by == "AssertionError", outcome.text
