"""Of every mistake in mistakes.toml some test notices that it is one."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import planted
import pytest
from conftest import NAME, ROOT, made_once

GROUPS = tomllib.loads((ROOT / "tests" / "algos" / "mistakes.toml").read_text(encoding="utf-8"))["group"]
MISTAKES = {
    f"{group['in']}: {wrong}": (group["in"], old, new, *(test or [group["caught_by"]]))
    for group in GROUPS
    for wrong, old, new, *test in group["mistakes"]
}
each = pytest.mark.parametrize("mistake", MISTAKES)


def place(file: str) -> Path:
    """A file of the project or of the machinery, from the folder around both."""
    return next(Path(name, file) for name in (NAME, "runlab") if (ROOT / name / file).is_file())


def with_mistake(file: str, old: str, new: str) -> str:
    """The text of a file, with `new` in the place of `old`."""
    text = (ROOT / place(file)).read_text(encoding="utf-8")
    assert text.count(old) == 1
    return text.replace(old, new)


@each
def test_every_mistake_can_be_made(mistake: str) -> None:
    """Otherwise the list would grow old unnoticed."""
    compile(with_mistake(*MISTAKES[mistake][:3]), mistake, "exec")


def test_no_mistake_is_listed_twice() -> None:
    assert len({made[:3] for made in MISTAKES.values()}) == sum(len(group["mistakes"]) for group in GROUPS)


@pytest.fixture(scope="module")
def whole() -> Path:
    """A copy of the project without any of the mistakes, in which all tests named in the list pass."""

    def make(folder: Path) -> None:
        for name in (NAME, "runlab", "conf", "tests"):  # with compiled modules, which stay valid
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("default.yaml"))
        shutil.copy2(ROOT / "pyproject.toml", folder)
        tests = sorted({made[3] for made in MISTAKES.values()})
        output = planted.run_tests(folder, tests)
        assert output.splitlines()[-1].startswith(f"{len(tests)} passed"), output

    return made_once("whole", make)


@pytest.mark.long
@each
def test_every_mistake_is_noticed(mistake: str, whole: Path, tmp_path: Path) -> None:
    file, old, new, caught_by = MISTAKES[mistake]
    folder = shutil.copytree(whole, tmp_path / "copy")
    (folder / place(file)).write_text(with_mistake(file, old, new), encoding="utf-8")
    output = planted.run_tests(folder, [caught_by])
    assert re.findall(r"^\S+:\d+: (\w+)$", output, re.MULTILINE)[-1:] == ["AssertionError"], output
