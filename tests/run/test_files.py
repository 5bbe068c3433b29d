"""The files of a run: lines survive kills and full disks, and nothing is written through a link."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import full_disk

from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.files import LineFile, cut_file, lock, replace_text


def test_a_full_disk_loses_no_row(tmp_path: Path) -> None:
    path, notes = tmp_path / "metrics.jsonl", list[str]()
    writer = LineFile(path)
    writer.warn = notes.append
    with full_disk(1000):
        for step in range(100):
            writer.write(json.dumps({"env_steps": step}))
        assert path.stat().st_size == 1000
    writer.close()
    waiting, over = notes
    assert waiting.startswith(f"{path} cannot be written (")
    assert over == f"{path} can be written again, no line is lost"
    assert [row["env_steps"] for row in map(json.loads, path.read_text().splitlines())] == list(range(100))


def test_a_disk_that_refuses_to_flush_is_reported(tmp_path: Path) -> None:
    notes = list[str]()
    for path in (tmp_path / "file", tmp_path / "pipe"):
        writer = LineFile(path)
        writer.warn = notes.append
        if path.name == "pipe":  # which no kernel flushes
            os.mkfifo(path)
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer.write("a line")
        writer.sync()
        writer.close()
    assert os.read(reader, 100) == b"a line\n"
    os.close(reader)
    assert notes == [f"{path} cannot be flushed to the disk ({os.strerror(errno.EINVAL)})"]


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "a buffered file"])  # the inverse
def test_kill_right_after_a_row_loses_nothing(tmp_path: Path, ours: bool) -> None:
    path = tmp_path / "rows"
    if (child := os.fork()) == 0:
        write = LineFile(path).write if ours else path.open("w").write
        for step in range(500):
            write(f"{step}\n")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert ("499" in path.read_text()) is ours


def append(path: Path) -> None:
    lines, warnings = LineFile(path), list[str]()
    lines.warn = warnings.append
    lines.write("a line")
    lines.close()
    if warnings:
        raise OSError(warnings[0])


@pytest.mark.parametrize("write", [append, lambda path: cut_file(path, 0), lambda path: lock(path.parent)])
def test_no_file_of_a_run_is_written_through_a_link(write: Callable[[Path], object], tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    folder.mkdir()
    outside.write_text("kept")
    path = folder / paths.LOCK
    path.symlink_to(outside)
    with pytest.raises((OSError, ConfigError), match="symbolic links"):
        write(path)
    assert outside.read_text() == "kept"
    path.unlink()
    path.write_text("x")
    write(path)


def test_a_planted_link_in_the_place_of_a_new_file_is_not_followed(tmp_path: Path) -> None:
    outside, path = tmp_path / "outside", tmp_path / paths.RECORD
    outside.write_text("kept")
    (tmp_path / f".{path.name}.{os.getpid()}.tmp").symlink_to(outside)
    replace_text(path, ["new"])
    assert (outside.read_text(), path.read_text(), path.is_symlink()) == ("kept", "new", False)
