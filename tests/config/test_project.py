"""A declaration of the project that does not hold is refused in a line, before anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import NAME, copy_project, program, run


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("declared") / "copy"
    copy_project(folder)
    return folder


@pytest.mark.parametrize(
    ("value", "message"),
    {
        f'"{NAME}.project"': "",
        '"nowhere.project"': "the project nowhere.project cannot be imported: no module nowhere",
        f'"{NAME}.nowhere"': f"cannot be imported: no module {NAME}.nowhere",
        f'"{NAME}.algos"': "lacks ALGORITHMS, build, train, codec; see docs/design.md",
        f'"{NAME}.train"': "cannot be declared by a module that imports it",
        "3": "no project is declared; pyproject.toml names it as [tool.runlab] project",
        "nothing": "pyproject.toml cannot be read: Invalid value",
    }.items(),
)
def test_a_declaration(value: str, message: str, copy: Path) -> None:
    settings = copy / "pyproject.toml"
    text = settings.read_text()
    settings.write_text(text.replace(f'project = "{NAME}.project"', f"project = {value}"))
    try:
        done = run(copy, *program(copy, "runs"), status=2 * bool(message))
    finally:
        settings.write_text(text)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == bool(message)
