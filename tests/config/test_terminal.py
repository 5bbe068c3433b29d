"""Text of others is shown on a terminal, and never obeyed."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from conftest import git, write_run

from runlab.__main__ import main
from runlab.analysis import differences
from runlab.analysis.commands import diff
from runlab.config.terminal import escaped
from runlab.run import paths
from runlab.run.files import to_stderr

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1m\u202egnp.exe\u2066\x08"
OBEYED = [each for each in EVIL if not each.isprintable()]


def on_a_terminal(*words: str, cwd: Path) -> str:
    """The output of a command in a fork of this process whose streams are a terminal."""
    pid, terminal = pty.fork()
    if not pid:
        status = 70
        try:
            os.chdir(cwd)
            os.environ["TERM"] = "xterm"
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - those of pytest are files
            status = main([*words])
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    output = b""
    with contextlib.suppress(OSError):  # the end of the process
        while part := os.read(terminal, 65536):
            output += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (0, 2), output
    return output.decode()


def test_only_what_is_no_text_is_escaped() -> None:
    plain = "é 漢\xa0\U0001f600\ttab\nline \\x1b"
    assert escaped(plain) == plain
    assert escaped("\x1b[31mred\x1b[0m") == "red"
    assert (
        escaped("a\x1b[2J\r\x00\x7f\u202e\u200f\u2028\ud800") == r"a\x1b[2J\r\x00\x7f\u202e\u200f\u2028\ud800"
    )


def test_a_line_of_a_run_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    to_stderr(f"other variables: {EVIL}")
    assert not [each for each in OBEYED if each in capsys.readouterr().err]


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        *("runs show=note,error", "stats", "stats by=note", "report", "resume run=runs/ppo-Thing/run-2"),
        *("diff a=run-1 b=runs/ppo-Thing/run-2", "compare a=run-1 b=runs/ppo-Thing/run-2"),
        *("runs note=x", "film run=runs/ppo-Thing/run-2", "reproduce run=runs/ppo-Thing/run-2"),
    ],
)
def test_no_command_lets_a_terminal_obey_files_of_others(tmp_path: Path, words: str) -> None:
    write_run(tmp_path / "runs", 1)
    facts: dict[str, Any] = {"error": EVIL, "overrides": ["env=Thing", f"x={EVIL}"], "machine": {EVIL: EVIL}}
    config = {"note": EVIL, "algo": {"gamma": EVIL, EVIL: 1}}
    evil = write_run(
        tmp_path / "runs", 2, config=config, final_metrics={EVIL: 1.0, "eval/return": 1.0}, **facts
    )
    write_run(tmp_path / "runs", 3, id=EVIL, status=EVIL)
    (evil / paths.TRACE).write_text(f"{EVIL}\n")
    (evil.parent / EVIL.replace("/", "")).mkdir()
    (evil.parent / EVIL.replace("/", "") / paths.RECORD).write_text("{")
    output = on_a_terminal(*words.split(), cwd=tmp_path)
    assert output
    assert not [each for each in OBEYED if each in output], output


def test_a_console_of_another_encoding_shows_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs", 1, config={"note": "漢"})
    console = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(console, "ascii"))
    assert main(["runs", "show=note", f"runs_dir={tmp_path / 'runs'}"]) == 0
    assert rb"\u6f22" in console.getvalue()


def test_the_text_of_a_patch_is_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tmp_path, "init", "-q")
    for number, text in enumerate(("a = 1\n", f"a = 2  # {EVIL}\x1b[8mhidden\n"), start=1):
        (tmp_path / "new.py").write_text(text)
        git(tmp_path, "add", "new.py")
        write_run(tmp_path / "runs", number, git={"tree": git(tmp_path, "write-tree").strip()})
    for module in (diff, differences):
        monkeypatch.setattr(module, "PROJECT", tmp_path)
    assert main(["diff", "a=run-1", "b=run-2", "code=full", f"runs_dir={tmp_path / 'runs'}"]) == 0
    output = capsys.readouterr().out
    assert "\n-a = 1\n" in output
    assert r"\x1b]0;owned\x07" in output
    assert {each for each in output if not each.isprintable()} == {"\n"}
