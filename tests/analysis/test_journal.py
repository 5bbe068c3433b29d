"""The journal: an entry per run or sweep that has ended, made when asked for; its reader's words stay."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from conftest import run_train, write_run

from runlab.__main__ import main
from runlab.run import paths

SHORT = ["env=CartPole", "total_env_steps=1024", "video_every=0", "eval_every=1024"]


def journal_of(runs_dir: Path, *words: str) -> str:
    """The text of the journal after `make runs journal=...`."""
    file = runs_dir / "journal.md"
    assert main(["runs", f"runs_dir={runs_dir}", f"journal={file}", *words]) == 0
    return file.read_text()


def test_an_entry_says_why_what_changed_and_what_came_of_it(tmp_path: Path) -> None:
    runs_dir = tmp_path / "my runs"
    write_run(runs_dir, 1, [0.0, 5.0], config={"note": "to see | whether it *runs* <b>"})
    text = journal_of(runs_dir)
    for part in (
        "# Journal\n",
        "**Why** to see | whether it \\*runs\\* \\<b>",
        "the first of its kind here",
        "return 5 after 200 steps",
    ):
        assert part in text
    mine = text.replace("to see", "I wanted to see") + "a thought of mine, without an end of the line"
    (runs_dir / "journal.md").write_text(mine)
    write_run(runs_dir, 2, [0.0, 7.0], status="interrupted", error="no | luck")
    write_run(runs_dir, 3, status="running")
    text = journal_of(runs_dir)
    assert text.startswith(mine)
    for part in ("**Changed** against [run-1](ppo-Thing/run-1)", "only the seed differs", "no | luck"):
        assert part in text.removeprefix(mine)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == 3
    assert all((runs_dir / unquote(link)).exists() for link in links)


def test_entries_are_added_once_and_again_after_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        write_run(tmp_path, seed, status="interrupted")
    journal_of(tmp_path, "last=1")
    text = journal_of(tmp_path)
    assert re.findall(r"seed (\d) · interrupted", text) == ["2", "1"]
    assert journal_of(tmp_path) == text
    notes = capsys.readouterr().err.splitlines()
    assert [line.partition(" added")[0] for line in notes] == ["1 entry", "1 entry", "0 entries"]
    record = tmp_path / "ppo-Thing" / "run-1" / paths.RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | {"status": "finished", "resumed": [{}]}))
    assert re.findall(r"seed (\d) · (\w+)", journal_of(tmp_path).removeprefix(text)) == [("1", "finished")]


def test_a_journal_that_cannot_be_written_costs_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    (tmp_path / "journal.md").mkdir()  # a folder in its place
    assert main(["runs", f"runs_dir={tmp_path}", f"journal={tmp_path / 'journal.md'}"]) == 2
    assert "journal.md: expected a file" in capsys.readouterr().err


@pytest.mark.long
def test_recorded_runs_and_sweeps_have_an_entry_each(fork: Path, tmp_path: Path) -> None:
    for words in (["seed=1"], ["seed=1,2", "algo.gamma=0.98"]):
        run_train(fork, tmp_path, *SHORT, *words, f"runs_dir={tmp_path / 'runs'}", status=0)
    text = journal_of(tmp_path / "runs")
    heads = re.findall(r"^## \S+ \S+ · (\S+ \S+ \S+)", text, re.MULTILINE)
    assert [head.partition(" ")[0] for head in heads] == ["ppo", "sweep"]
    result = r"^\* \*\*Result\*\* 2 finished; ppo.* on CartPole: return .* of 2 seeds"
    assert re.search(result, text, re.MULTILINE)
    assert journal_of(tmp_path / "runs") == text
