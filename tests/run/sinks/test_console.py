"""The console, read back from a pseudo terminal, a pipe and a file."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import os
import pty
import select
import struct
import termios
from pathlib import Path
from typing import Any

import pyte
import pytest
from conftest import Configure
from fed import run_facts

from runlab.errors import ConfigError
from runlab.run import sinks
from runlab.run.sinks.console import ConsoleSink


def test_plain_lines_are_aligned_and_tell_the_time_left() -> None:
    """Of a resumed run, whose old part was slower."""
    stream, run_dir = io.StringIO(), Path("/runs here/the-id")
    facts = run_facts(run_dir, resumed_at=500, config={"total_env_steps": 100_000})
    console = ConsoleSink(facts, stream)
    row = {"loss/policy": -0.0123, "policy/entropy": 0.61, "time/steps_per_second": 9812.3}
    console.write({"env_steps": 1000, "wall_time_s": 501.0, **row})
    console.note("a note")
    later = {"episode/return": 143.2, "eval/return": 200.0, **row}
    console.write({"env_steps": 21000, "wall_time_s": 503.0, **later})
    console.write({"env_steps": 100_010, "wall_time_s": 510.0})
    console.close("finished", {})
    title, folder, begin, first, note, second, last, *ending = stream.getvalue().splitlines()
    assert (title, folder, note) == ("ppo on CartPole-v1, seed 1: lr=1e-3", "/runs here/the-id", "a note")
    assert begin == "goes on after 500 of 100000 steps"
    # 79,000 steps are left, at 10,000 a second as between these two rows.
    assert second == (
        "step  21000/100000   21%  return    143.2  left 0:00:08    9,812 steps/s  eval      200"
        "  entropy     0.61  policy loss  -0.0123"
    )
    assert "return        -  left -:--:--" in first  # of one row, which may have waited for a compiler
    assert last.startswith("step 100010/100000  100%")
    commands = [f"{start} run='/runs here/the-id'" for start in ("next: make evaluate", "      make film")]
    assert ending == ["finished after 100010 steps in 0:08:30", *commands]


@pytest.mark.parametrize(
    ("status", "steps", "offered"), [("failed", 0, 0), ("failed", 9, 1), ("interrupted", 0, 1)]
)
def test_a_run_that_would_only_fail_again_or_has_no_checkpoints_is_not_to_be_resumed(
    status: str, steps: int, offered: int
) -> None:
    console = ConsoleSink(run_facts(Path("/runs")), stream := io.StringIO())
    console.close(status, {"env_steps": steps})
    without = run_facts(Path("/runs"), config={"checkpoint_every": 0})
    ConsoleSink(without, stream).close(status, {"env_steps": steps})
    assert stream.getvalue().count("next: make resume") == offered


def test_a_note_of_a_signal_waits_for_the_line_that_is_written() -> None:
    """A stream raises if it is entered a second time, and a panel would be drawn twice."""

    class Interrupted(io.StringIO):
        inside = False

        def write(self, text: str) -> int:
            assert not self.inside
            self.inside = True
            if text == "a line\n":
                console.note("of a signal")  # as a handler does that runs now
            self.inside = False
            return super().write(text)

    console = ConsoleSink(run_facts(Path("/runs")), stream := Interrupted())
    console.note("a line")
    assert stream.getvalue().splitlines()[-2:] == ["a line", "of a signal"]


def in_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[list[str]]]:
    """What a run writes to a pseudo terminal, and the lines of its screen at several times."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "24")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    screen, written, seen = pyte.Screen(width, 24), b"", []
    stream = pyte.ByteStream(screen)

    def look() -> None:
        nonlocal written
        with contextlib.suppress(OSError):  # Linux says so when the last writer has gone
            while select.select([ours], [], [], 0.05)[0] and (data := os.read(ours, 1 << 16)):
                written += data
                stream.feed(data)
        seen.append([line.rstrip() for line in screen.display if line.strip()])

    with open(theirs, "w", encoding="utf-8") as terminal:  # noqa: PTH123  a descriptor
        facts = run_facts(Path.cwd() / "runs" / "the-id")
        console = ConsoleSink(facts, terminal)
        values = {"episode/return": 125.0, "time/steps_per_second": 100.0, "loss/policy": 0.25}
        console.write({"env_steps": 100, "wall_time_s": 1.0})
        console.write({"env_steps": 500, "wall_time_s": 5.0, "eval/return": 77.0, **values})
        console.note("a note")
        look()
        os.write(ours, b"\x03")  # Ctrl-C, which a terminal shows as ^C at its cursor
        look()
        assert any("^C" in line for line in seen.pop())
        console.activity("evaluating")
        console.note("a note above a panel with markup")
        look()
        console.activity("")
        console.close("interrupted", {"eval/return": 99.0, "env_steps": 640})
        look()
    os.close(ours)
    return written.decode(), seen


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_one_panel_in_place(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")  # it cannot move a cursor
    assert "\x1b" not in in_terminal(width, monkeypatch)[0]
    monkeypatch.setenv("TERM", "xterm-256color")
    _, (first, second, last) = in_terminal(width, monkeypatch)
    assert first[:3] == ["ppo on CartPole-v1, seed 1: lr=1e-3", "runs/the-id", "a note"]
    for shown in (first, second, last):
        assert "".join(shown).count("╭") == "".join(shown).count("╰") == 1
        assert "^C" not in "".join(shown)
        assert sum("500 of 1,000 steps" in line for line in shown) == 1
        text = "\n".join(shown)
        assert "[yellow]" not in text
        assert "[dim]" not in text
        for part in ("return 125", "evaluation 77", "policy loss 0.25", "left 0:00:05"):
            assert part in text
    assert [sum("evaluating" in line for line in shown) for shown in (first, second, last)] == [0, 1, 0]
    assert last[-2].startswith("interrupted after 640 steps")  # to which no row reaches
    assert last[-1] == "next: make resume run=runs/the-id"


def test_a_panel_is_drawn_again_only_for_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel takes as long as a short iteration, and after each of them nothing is done beside training."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(stream := io.StringIO(), "isatty", lambda: True)
    console = ConsoleSink(run_facts(Path("/runs/a")), stream)
    sizes = []
    for text in ("", "", "evaluating", "evaluating", ""):
        console.activity(text)
        sizes.append(stream.tell())
    console.close("finished", {})
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3] < sizes[4]


def test_names_are_neither_markup_nor_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    facts = run_facts(Path("/runs/[/]\x1b]0;x\x07[red]"))
    facts.config["env"]["id"] = "[bold]A-v0\u202e"
    monkeypatch.setattr(stream := io.StringIO(), "isatty", lambda: True)
    console = ConsoleSink(facts, stream)
    console.write({"env_steps": 1000, "wall_time_s": 1.0})
    console.note("[/]\x1b]0;x\x07")
    console.close("finished", {})
    said = stream.getvalue()
    assert said.count(r"[bold]A-v0\u202e") > 1
    assert said.count(r"/runs/[/]\x1b]0;x\x07[red]") > 1
    assert "\x1b]" not in said


def test_a_sink_that_cannot_be_made_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configure: Configure
) -> None:
    """As on another machine, which lacks its package and resumes the run."""

    def load(key: str, group: str, name: str) -> Any:
        if name == "gone":
            raise ConfigError(f"{key}: no such sink")
        return lambda facts: name

    monkeypatch.setattr(sinks, "load", load)
    said: list[str] = []
    config = dataclasses.replace(configure("logger=none").logger, sinks={"gone": True, "there": True})
    made: list[Any] = sinks.make_sinks(config, run_facts(tmp_path, notify=said.append))
    assert (made, said) == (["there"], ["the sink gone is left out: logger.sinks.gone: no such sink"])
