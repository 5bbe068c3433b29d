"""The console, read back from a pseudo terminal, a pipe and a file."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, run_facts

from rltemplate.run.sinks.console import ConsoleSink, show_number, show_time


def test_numbers_are_short_and_times_are_clocks() -> None:
    numbers = {143.25: "143.2", 200.0: "200", 39113.64: "39113.6", 2.5e-7: "2.5e-07", float("inf"): "inf"}
    assert {value: show_number(value) for value in numbers} == numbers
    times = {8.2: "0:00:08", 3661: "1:01:01", 90061: "1d 1:01:01", None: "-:--:--"}
    assert {seconds: show_time(seconds) for seconds in times} == times


def plain(**known: Any) -> tuple[ConsoleSink, io.StringIO]:
    stream = io.StringIO()
    return ConsoleSink(run_facts(Path("/runs here/the-id"), **known), stream), stream


def test_plain_lines_are_aligned_and_tell_the_time_left() -> None:
    console, stream = plain(total_env_steps=100_000, standing=lambda at, value: f"{value:.0f} at {at}")
    row = {"loss/policy": -0.0123, "policy/entropy": 0.61, "time/steps_per_second": 9812.3}
    console.write({"env_steps": 1000, "wall_time_s": 1.0, **row})
    console.note("a note")
    later = {"episode/return": 143.2, "episode/length": 143.0, "eval/return": 200.0, **row}
    console.write({"env_steps": 21000, "wall_time_s": 3.0, **later})
    console.close("finished", {})
    title, first, note, second, *ending = stream.getvalue().splitlines()
    assert (title, note) == ("ppo on CartPole-v1, seed 1: /runs here/the-id", "a note")
    # 79,000 steps are left, at 10,000 a second as between these two rows.
    assert second == (
        "step  21000/100000   21%  return    143.2  length      143  entropy     0.61"
        "  loss/policy  -0.0123    9,812 steps/s  left 0:00:08  eval 200"
    )
    assert "left 0:00:10" in first  # one row only: 99,000 steps at its 9,812 a second
    assert first.index("left") == second.index("left")
    assert "return        -" in first
    assert ending == [
        "finished after 21000 steps in 0:00:03",
        "200 at 21000",
        "/runs here/the-id",
        "next: make evaluate run='/runs here/the-id'",
    ]


def test_a_resumed_run_says_where_it_goes_on_and_tells_time_from_the_new_part() -> None:
    console, stream = plain(total_env_steps=10_000, resumed_at=5000)
    # The old part took 500 s for 5000 steps; now it is 100 steps a second.
    console.write({"env_steps": 6000, "wall_time_s": 510.0, "time/steps_per_second": 100.0})
    console.write({"env_steps": 10_500, "wall_time_s": 555.0, "time/steps_per_second": 100.0})
    _, begin, first, last = stream.getvalue().splitlines()
    assert begin == "goes on after 5000 of 10000 steps"
    assert "left 0:00:40" in first
    assert last.startswith("step 10500/10000  100%")


def test_the_next_command_fits_the_ending_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for parent, named in {"runs": "an-id", "elsewhere": "elsewhere/ppo-CartPole/an-id"}.items():
        for status, command in {"finished": "evaluate", "interrupted": "resume", "failed": "resume"}.items():
            stream, run_dir = io.StringIO(), tmp_path / parent / "ppo-CartPole" / "an-id"
            ConsoleSink(run_facts(run_dir), stream).close(status, {})
            assert stream.getvalue().splitlines()[-2:] == [str(run_dir), f"next: make {command} run={named}"]


CHILD = """
import os, pathlib, sys
from conftest import run_facts
from rltemplate.run.sinks.console import ConsoleSink
console = ConsoleSink(run_facts(
    pathlib.Path.cwd() / "runs" / "sac-InvertedDoublePendulum" / "the-id",
    title="sac on InvertedDoublePendulum-v5, seed 123456",
    resumed_at=100 if sys.argv[1] == "resume" else None,
))
for step in (250, 500):
    console.write({"env_steps": step, "wall_time_s": step / 100, "episode/return": step / 4,
                   "time/steps_per_second": 100.0, "loss/policy": 0.25, "loss/critic": 3.5,
                   "policy/entropy": 0.75, **({"eval/return": 77.0} if step == 250 else {})})
    console.note(f"note at {step}")
if sys.argv[1] == "close":
    console.close("finished", {"eval/return": 99.0})
elif sys.argv[1] == "die":
    os._exit(1)
raise SystemExit(1)
"""


def in_terminal(ending: str, width: int = 100, term: str = "xterm-256color") -> str:
    """The output of a child process on a real pseudo terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    env = {**os.environ, "TERM": term, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        env.pop(name, None)
    command = [sys.executable, "-c", CHILD, ending]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    written = b""
    while select.select([ours], [], [], 60.0)[0]:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # Linux says so when the last writer has gone
            break
        if not data:
            break
        written += data
    os.close(ours)
    child.wait(10)
    return written.decode()


def lines_of(written: str) -> list[str]:
    """The text without escape sequences; a redrawn line counts each time."""
    without = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    return [line.rstrip() for line in re.split(r"[\r\n]+", without)]


SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


@pytest.mark.parametrize("width", [60, 200])
def test_a_terminal_gets_a_bar_with_metrics_and_the_folder(width: int) -> None:
    written = in_terminal("close", width)
    lines = lines_of(written)
    bars = [line for line in lines if "50%" in line]
    assert re.search(r"seed 123456 ━.* 50% return +125( +100 steps/s)? left 0:00:05$", bars[-1])
    assert ("steps/s" in bars[-1]) is (width >= 72)
    assert max(map(len, lines)) <= width
    assert bars[-1].startswith("sac on InvertedDoublePendulum-v5, seed 123456 ") is (width >= 100)
    shown = "\n".join(lines)
    for label, value in {"eval": 77, "entropy": 0.75, "loss/policy": 0.25, "loss/critic": 3.5}.items():
        assert re.search(rf"\b{label} +{value}\b", shown), label
    assert "note at 500" in lines
    assert "finished after 500 steps in 0:00:05" in lines
    assert re.search(r"eval/return +99\b", shown)
    assert written.rfind(SHOW_CURSOR) > written.rfind(HIDE_CURSOR) >= 0
    folder = "runs/sac-InvertedDoublePendulum/the-id"
    start = next(i for i, line in enumerate(lines) if line.endswith(folder))
    assert not any("50%" in line for line in lines[:start])
    assert [line for line in lines if line][-2:] == [folder, "next: make evaluate run=the-id"]


def test_a_bar_begins_where_the_run_goes_on_and_gives_the_cursor_back() -> None:
    written = in_terminal("resume")
    assert any(" 10% " in line for line in lines_of(written))
    assert "goes on after 100 of 1000 steps" in lines_of(written)
    assert written.rfind(SHOW_CURSOR) > written.rfind(HIDE_CURSOR) >= 0
    killed = in_terminal("die")  # the inverse: the process dies without a word
    assert killed.rfind(SHOW_CURSOR) < killed.rfind(HIDE_CURSOR)
    assert not any(" 10% " in line for line in lines_of(killed))


def test_no_escape_sequences_where_nothing_can_move_a_cursor() -> None:
    dumb = in_terminal("close", term="dumb")
    assert "\x1b" not in dumb
    assert "step  500/1000   50%  return      125" in dumb
    assert str(Path.cwd() / "runs") in dumb  # whole paths: a log may be read elsewhere
