"""Run folders of others: whatever they hold, a command shows the other runs, and ends in no traceback."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import RecordedRun, git, write_run

from runlab.__main__ import main
from runlab.launch import resume
from runlab.run import paths
from runlab.run.git import changes
from runlab.run.git.snapshot import GitRecord

DEEP: Any = "x"
for _ in range(300):
    DEEP = [DEEP]
GONE = object()
VALUES: list[Any] = [5, -1.5, True, None, "", "\x1b[31mx\n\u202e\ud800", r"$\frac{$", [], [1], {"code": [5]}]
VALUES += [{"\x1b]0;x\x07": {r"$\frac{$": "x"}}, 10**290, 1e308, DEEP, "../../x", [{"path": "."}], GONE]
FEW = [5, "\x1b[31mx\n\u202e\ud800", [r"$\frac{$"], GONE]
LINES = [
    *(b"[" * 100_000 + b"\n", b"\xff\n", b"null\n", b'{"env_steps": 1e999}\n', b'{"env_steps": NaN}\n'),
    *(b'{"env_steps": %s}\n' % (b"9" * 6000), b"x" * 3_000_000 + b"\n", b"\0" * 5000 + b"\n"),
    *(b'{"env_steps": 5, "$\\\\frac{$": 1, "_x": 2, "\\u001b[31m": 3}\n', b'{"env_steps": true}\n'),
    b'{"env_steps": 9223372036854775807, "eval/return": 1e299}\n{"env_steps": -7, "eval/return": -1e299}\n',
]
PART = {
    "started_at": "2026-01-01",
    "pid": 1,
    "hostname": "x",
    "command_line": ["a"],
    "changed": {"cpu": ["a", "b"], "code": ["a"]},
    "notes": ["x"],
}
FACTS: dict[str, Any] = {
    "resumed": [PART],
    "sweep": {"id": "x", "dir": "y", "job": 1},
    "trace": {"digest": "0f", "iterations": 3},
    "versions": {"torch": "2"},
    "environment": {"X": "1"},
    "determinism": {
        "level": "repeat",
        "settings": {"mkl": True},
        "checks": {"repeats": {"holds": True}},
        "computed": {"definition": "d", "digests": {"libm": "0" * 16}, "libraries": {"torch's MKL": "1"}},
    },
    "error": "no luck",
    "git": {"tree": "a" * 40, "dirty": True, "skipped": [{"path": "a", "reason": "b", "bytes": 5}]},
}

PROJECTS = ["", ".x", "/..y", "..", "x/y", "a b.c", "\\u0000x.y", "²x.y", f"{'x' * 2000}.y", "\\ud800.y"]
SETTINGS = [f'[tool.runlab]\nproject = "{name}"\n' for name in PROJECTS]
SETTINGS += ["[tool.runlab]\nproject = 5\n", "[tool.runlab]\nother = 1\n[more]\nproject = 'x.y'\n"]
SETTINGS += [f"a = {'[' * 50_000}", f"{'a.' * 45_000}a = 1", "\x00\u202e", "[tool", "tool = 5"]
SETTINGS += [f"[tool.runlab]\nproject = 'x.y'\n{'#' * 1_000_000}"]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all parts of nested values; of a list and of versions the first."""
    yield at
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in [*parts][: 3 if at == ("versions",) or isinstance(value, list) else None]:
        yield from places(part, (*at, key))


def mutated(values: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A copy of nested values with another one at a place."""
    if not at:
        return None if new is GONE else new
    copied = node = copy.deepcopy(values)
    for key in at[:-1]:
        node = node[key]
    if new is GONE:
        del node[at[-1]]
    else:
        node[at[-1]] = new
    return copied


def check(capsys: pytest.CaptureFixture[str], *words: str, shows: str = "") -> None:
    """Call a command, which must end without an exception, and print nothing that a terminal obeys."""
    status = main([*words])
    output = capsys.readouterr()
    assert status in ((0,) if shows else (0, 1, 2)), output.err
    assert shows in output.out
    assert {each for each in output.out + output.err if not each.isprintable()} <= {"\n"}


@pytest.mark.parametrize("name", [paths.RECORD, paths.CONFIG])
def test_a_value_of_any_kind_hides_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"), 1)
    file = write_run(Path("runs"), 2, **FACTS) / name
    values = json.loads(file.read_text())
    for at in places(values):
        for new in FEW:
            file.write_text(json.dumps(mutated(values, at, new)))  # which is YAML too
            Path("journal.md").unlink(missing_ok=True)
            check(capsys, "runs", "show=machine.cpu", "journal=journal.md", shows="run-1")
            assert "/run-1)" in Path("journal.md").read_text()
        file.write_text(json.dumps(mutated(values, at, FEW[0])))
        check(capsys, "stats", shows="return")
        check(capsys, "diff", "a=run-1", f"b={file.parent}")


@pytest.mark.parametrize("number", range(len(LINES)))
def test_a_line_of_any_kind_hides_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"), 1)
    (write_run(Path("runs"), 2) / paths.METRICS).write_bytes(LINES[number])
    check(capsys, "runs", shows="run-1")
    check(capsys, "report", shows="written")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"), 1)
    for seed, name in enumerate((paths.RECORD, paths.CONFIG, paths.METRICS, paths.TRACE), start=2):
        file = write_run(Path("runs"), seed) / name
        file.unlink(missing_ok=True)
        os.mkfifo(file)
        check(capsys, "stats", shows="return")
        check(capsys, "report", shows="written")
        check(capsys, "compare", "a=run-1", f"b={file.parent}")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_settings_of_any_kind_in_the_code_of_a_run_hide_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """They declare no package."""
    for module in ("experiments", "differences", "commands.diff"):
        monkeypatch.setattr(f"runlab.analysis.{module}.PROJECT", tmp_path)
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    for seed, text in enumerate(("[tool.runlab]\nproject = 'own.project'\n", SETTINGS[number]), start=1):
        Path("pyproject.toml").write_text(text)
        git(tmp_path, "add", "pyproject.toml")
        side = GitRecord(tree=git(tmp_path, "write-tree").strip())
        write_run(Path("runs"), seed, git={"tree": side.tree}, used={"files": ["own/x.py", "x.py"]})
    code = changes.code_contents(tmp_path, side)
    assert code is not None
    assert (code.package, [*code.contents]) == ("", ["pyproject.toml"])
    check(capsys, "stats", shows="return")
    check(capsys, "diff", "a=run-1", "b=run-2", "code=full", shows="pyproject.toml")


@pytest.mark.long
@pytest.mark.parametrize("name", [paths.RECORD, paths.CONFIG, paths.TRACE])
def test_no_value_of_a_recorded_run_brings_a_traceback(
    recorded_run: RecordedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resume, "become", lambda job: 0)
    monkeypatch.setattr("runlab.analysis.stats._RESAMPLES", 9)  # intervals took most of the time of `stats`
    source = recorded_run.run_dir
    good, bad = (Path("runs") / source.parent.name / f"run-{each}" for each in ("good", "bad"))
    for each in (good, bad):
        shutil.copytree(source, each)
    lines = (bad / name).read_text().splitlines() if name == paths.TRACE else []
    values: Any = [*map(json.loads, lines)] if lines else yaml.safe_load((bad / name).read_text())
    if name == paths.RECORD:
        values |= FACTS
    known = list(places(values))
    for number, at in enumerate(known):
        for new in VALUES[number % 5 :: 5]:
            changed = mutated(values, at, new)
            if lines:
                changed = changed if isinstance(changed, list) else [changed]
                (bad / name).write_text("".join(f"{json.dumps(line)}\n" for line in changed))
            else:
                (bad / name).write_text(json.dumps(changed))
                check(capsys, "runs", shows=source.name)
                check(capsys, "stats", shows="return")
                check(capsys, "resume", f"run={bad}", "total_env_steps=500")
            check(capsys, "compare", f"a={bad}", f"b={good}")
