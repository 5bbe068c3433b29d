"""The journal: one entry per run or sweep that ended, none lost to others, and the reader's words kept."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from conftest import run_train, write_run

from rltemplate.analysis import journal
from rltemplate.run import paths

SHORT = ["env=CartPole", "total_env_steps=1024", "video_every=0", "eval_every=1024"]


def text(runs_dir: Path) -> str:
    return (runs_dir / paths.JOURNAL).read_text()


def test_an_entry_says_why_what_changed_and_what_came_of_it(tmp_path: Path) -> None:
    runs_dir = tmp_path / "my runs"
    first = write_run(runs_dir, 1, [0.0, 5.0], config={"note": "to see | whether it *runs* <b>"})
    journal.write_run(first, runs_dir, tmp_path)
    for said in (
        "**Why** to see | whether it \\*runs\\* \\<b>",
        "the first of its kind here",
        "return 5 after 200 steps",
    ):
        assert said in text(runs_dir)
    (runs_dir / paths.JOURNAL).write_text(text(runs_dir) + "a thought of mine\n")
    second = write_run(runs_dir, 2, [0.0, 7.0], status="interrupted", error="no | luck")
    journal.write_run(second, runs_dir, tmp_path)
    added = text(runs_dir).partition("a thought of mine\n")[2]
    for said in ("**Changed** against [run-1](ppo-Thing/run-1)", "only the seed differs", "no | luck"):
        assert said in added
    links = re.findall(r"\]\(([^)]+)\)", text(runs_dir))
    assert len(links) == 3
    assert all((runs_dir / unquote(link)).exists() for link in links)


def _write_many(run_dir: Path, runs_dir: Path) -> None:
    for _ in range(10):
        journal.write_run(run_dir, runs_dir, runs_dir)


def test_many_at_once_lose_none(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, seed) for seed in range(4)]
    writers = [multiprocessing.Process(target=_write_many, args=(folder, tmp_path)) for folder in folders]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    entries = re.findall(r"^## .*, seed (\d) · finished\n\n(?:\* .*\n)+$", text(tmp_path), re.MULTILINE)
    assert sorted(entries) == sorted("0123" * 10)
    assert text(tmp_path).count("# Journal") == 1


def test_a_journal_that_cannot_be_written_costs_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / paths.JOURNAL).mkdir()  # a folder in its place
    journal.write_run(write_run(tmp_path), tmp_path, tmp_path)
    assert "no entry in" in capsys.readouterr().err


@pytest.mark.long
def test_runs_and_sweeps_write_their_entries(fork: Path, tmp_path: Path) -> None:
    for words in (["seed=1"], ["seed=3", "logger=none"], ["seed=1,2", "algo.gamma=0.98"]):
        run_train(fork, tmp_path, *SHORT, *words, f"runs_dir={tmp_path / 'runs'}", status=0)
    heads = re.findall(r"^## \S+ \S+ · (\S+ \S+ \S+)", text(tmp_path / "runs"), re.MULTILINE)
    assert [head.partition(" ")[0] for head in heads] == ["ppo", "sweep"]  # none of `logger=none`
    result = r"^\* \*\*Result\*\* 2 finished; ppo.* on CartPole: return .* of 2 seeds"
    assert re.search(result, text(tmp_path / "runs"), re.MULTILINE)
