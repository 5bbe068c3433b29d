"""The console, read back from a pseudo terminal, a pipe and a file."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios
from pathlib import Path
from typing import Any

import pytest
from conftest import run_facts

from rltemplate.run.sinks.console import ConsoleSink, show_number, show_time


def test_numbers_are_short_and_times_are_clocks() -> None:
    numbers = {143.25: "143.2", 200.0: "200", 39113.64: "39113.6", 2.5e-7: "2.5e-07", float("inf"): "inf"}
    assert {value: show_number(value) for value in numbers} == numbers
    times = {8.2: "0:00:08", 3661: "1:01:01", 90061: "25:01:01", None: "-:--:--"}
    assert {seconds: show_time(seconds) for seconds in times} == times


def test_plain_lines_are_aligned_and_tell_the_time_left() -> None:
    known: Any = {"total_env_steps": 100_000, "standing": lambda at, value: f"{value:.0f} at {at}"}
    stream = io.StringIO()
    console = ConsoleSink(run_facts(Path("/runs here/the-id"), **known), stream)
    row = {"loss/policy": -0.0123, "policy/entropy": 0.61, "time/steps_per_second": 9812.3}
    console.write({"env_steps": 1000, "wall_time_s": 1.0, **row})
    console.note("a note")
    later = {"episode/return": 143.2, "eval/return": 200.0, **row}
    console.write({"env_steps": 21000, "wall_time_s": 3.0, **later})
    console.close("finished", {})
    title, first, note, second, *ending = stream.getvalue().splitlines()
    assert (title, note) == ("ppo on CartPole-v1, seed 1: /runs here/the-id", "a note")
    # 79,000 steps are left, at 10,000 a second as between these two rows.
    assert second == (
        "step  21000/100000   21%  return    143.2  left 0:00:08    9,812 steps/s  eval      200"
        "  entropy     0.61  loss/policy  -0.0123"
    )
    assert "return        -  left 0:00:10" in first  # one row only: 99,000 steps at its 9,812 a second
    assert ending == [
        "finished after 21000 steps in 0:00:03",
        "200 at 21000",
        "next: make evaluate run='/runs here/the-id'",
    ]


def test_a_resumed_run_says_where_it_goes_on_and_tells_time_from_the_new_part() -> None:
    stream = io.StringIO()
    console = ConsoleSink(run_facts(Path("/runs"), total_env_steps=10_000, resumed_at=5000), stream)
    # The old part took 500 s for 5000 steps; now it is 100 steps a second.
    console.write({"env_steps": 6000, "wall_time_s": 510.0, "time/steps_per_second": 100.0})
    console.write({"env_steps": 10_500, "wall_time_s": 555.0, "time/steps_per_second": 100.0})
    _, begin, first, last = stream.getvalue().splitlines()
    assert begin == "goes on after 5000 of 10000 steps"
    assert "left 0:00:40" in first
    assert last.startswith("step 10500/10000  100%")
    console.close("interrupted", {})
    assert stream.getvalue().splitlines()[-1] == "next: make resume run=/runs"


def in_terminal(width: int) -> str:
    """What a run writes to a pseudo terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    run_dir = Path.cwd() / "runs" / "sac-InvertedDoublePendulum" / "the-id"
    title = "sac on InvertedDoublePendulum-v5, seed 123456"
    with open(theirs, "w", encoding="utf-8") as terminal:  # noqa: PTH123  a descriptor
        console = ConsoleSink(run_facts(run_dir, title=title), terminal)
        values = {"episode/return": 125.0, "time/steps_per_second": 100.0, "loss/policy": 0.25}
        console.write({"env_steps": 500, "wall_time_s": 5.0, "eval/return": 77.0, **values})
        console.note("a note")
        console.close("finished", {"eval/return": 99.0})
    written = b""
    with contextlib.suppress(OSError):  # Linux says so when the last writer has gone
        while data := os.read(ours, 1 << 16):
            written += data
    os.close(ours)
    return written.decode()


@pytest.mark.parametrize("width", [60, 120, 200])
def test_a_terminal_gets_one_line_in_place_that_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    written = in_terminal(width)
    lines = re.split(r"[\r\n]+", written.replace("\x1b[K", ""))
    drawn = [line for line in lines if "50%" in line]
    assert max(map(len, drawn)) < width
    assert len(set(drawn)) == 1
    assert len(drawn) == 3  # as it came, below the note, and when the run ended
    assert "step  500/1000   50%  return      125  left 0:00:05" in drawn[0]
    assert ("steps/s" in drawn[0]) is (width >= 80)
    assert ("loss/policy" in drawn[0]) is (width > 100)
    assert {"a note", "finished after 500 steps in 0:00:05"} <= set(lines)
    folder = "runs/sac-InvertedDoublePendulum/the-id"
    assert [line for line in lines if line][-1] == f"next: make evaluate run={folder}"
    monkeypatch.setenv("TERM", "dumb")  # it cannot move a cursor
    assert "\x1b" not in in_terminal(width)
