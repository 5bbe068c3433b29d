"""The journal: an entry per run or sweep that has ended, made when asked for; its reader's words stay."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import pytest
from conftest import full_disk, run_train, write_run
from markdown_it import MarkdownIt

from runlab.__main__ import main
from runlab.analysis.runs import load_run
from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.files import lock
from runlab.run.git.snapshot import GitRecord
from runlab.run.record import SweepJob, SweepRecord

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
    write_run(runs_dir, 2, [0.0, 12345.0], status="interrupted", error="no | luck")
    write_run(runs_dir, 3, status="running")
    text = journal_of(runs_dir)
    assert text.startswith(mine)
    for part in (
        "**Changed** against [run-1](ppo-Thing/run-1)",
        "only the seed differs",
        "return 12,345",
        "no | luck",
    ):
        assert part in text.removeprefix(mine)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == 3
    assert all((runs_dir / unquote(link)).exists() for link in links)


def test_a_run_is_compared_with_the_one_that_began_before_it_whatever_their_folders_are_called(
    tmp_path: Path,
) -> None:
    """As with `run_dir=` and in the hour in which clocks are set back."""
    write_run(tmp_path, 1).rename(tmp_path / "ppo-Thing" / "z first")
    write_run(tmp_path, 2).rename(tmp_path / "ppo-Thing" / "a second")
    text = journal_of(tmp_path)
    assert text.index("the first of its kind here") < text.index("**Changed** against [run-1](")


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


def add_at_once(runs_dir: Path, barrier: Barrier) -> None:
    """Add to the journal in this process as soon as the others do so too."""
    barrier.wait(60)
    journal_of(runs_dir)


def test_processes_that_add_at_once_add_each_entry_once(tmp_path: Path) -> None:
    for seed in range(12):
        write_run(tmp_path, seed)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    writers = [context.Process(target=add_at_once, args=(tmp_path, barrier)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    text = (tmp_path / "journal.md").read_text()
    assert sorted(re.findall(r"^## .*, seed (\d+) ", text, re.MULTILINE), key=int) == [*map(str, range(12))]
    assert text.count("# Journal\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["journal.md"]


@pytest.mark.parametrize(
    "place", ["missing/journal.md", "folder", "text.md/journal.md", "pipe", "/dev/null", "x" * 300]
)
def test_a_journal_that_cannot_be_written_costs_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    write_run(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.md").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    assert main(["runs", f"runs_dir={tmp_path}", f"journal={tmp_path / place}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: journal=/")
    assert any(text in line for text in ("expected a file", "text.md is no folder", "File name too long"))


@pytest.mark.parametrize("words", ["", "words of mine, without an end of the line"])
def test_a_full_disk_leaves_the_former_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    write_run(tmp_path)
    file = tmp_path / "journal.md"
    file.write_text(words)
    with full_disk(100):  # an entry has more bytes
        assert main(["runs", f"runs_dir={tmp_path}", f"journal={file}"]) == 2
    assert "journal.md cannot be written: File too large" in capsys.readouterr().err
    assert file.read_text() == words
    assert journal_of(tmp_path).count("\n## ") == 1


HOSTILE = "x`\n\n## Fake \n* [a](b) *c* ~~d~~\n\n<script>e</script>\n```\n---\n| f |\n|-|\n\ud800\u2028\r# g"


def with_hostile_texts(file: Path, read: Any) -> None:
    """Replace each text in a file of JSON by a hostile one, as far as the file can be read after it."""
    values, unicode = json.loads(file.read_text()), HOSTILE.replace("\ud800", "")

    def visit(node: Any) -> None:
        for key, value in [*(node.items() if isinstance(node, dict) else enumerate(node))]:
            if isinstance(value, dict | list):
                visit(value)
            for text in (HOSTILE, unicode, " ".join(unicode.split())) if isinstance(value, str) else ():
                node[key] = text
                file.write_text(json.dumps(values))
                try:
                    read(file.parent)
                    break
                except ConfigError:
                    node[key] = value
        file.write_text(json.dumps(values))

    visit(values)


def test_no_text_of_a_record_is_markdown_or_html_in_the_journal(tmp_path: Path) -> None:
    runs_dir, name = tmp_path / "runs", HOSTILE.replace("/", "").replace("\ud800", "\udcff")
    git = dict.fromkeys(("ref", "commit", "tree", "base_commit", "branch", "problem"), "x") | {"dirty": True}
    for seed, config in enumerate(({"note": "x"}, {"note": "x", "baseline": "x"}, {}), start=1):
        sweep = {"id": name, "dir": "x", "job": 1} if seed == 3 else None
        run_dir = write_run(runs_dir, seed, config=config, error="x", git=git, sweep=sweep)
        with_hostile_texts(run_dir / paths.RECORD, load_run)
        with_hostile_texts(run_dir / paths.CONFIG, load_run)
        if sweep:  # which is found by its id
            values = json.loads((run_dir / paths.RECORD).read_text())
            (run_dir / paths.RECORD).write_text(json.dumps(values | {"sweep": sweep}))
        run_dir.rename(run_dir.with_name(f"{seed}{name}"))
    folder = runs_dir / paths.SWEEPS / name
    folder.mkdir(parents=True)
    job = {"job": 1, "overrides": ["x"], "status": "x", "run_dir": f"../../ppo-Thing/3{name}"}
    index = {"id": "x", "words": ["x", "x"], "num_jobs": 1, "commands": [["x"]], "start_time": "x"}
    index |= {"versions": {}, "snapshot": {}, "status": "x"}
    (folder / paths.SWEEP_INDEX).write_text(json.dumps(index))
    (folder / "job_1.json").write_text(json.dumps(job | {"run_dir": None}))
    with_hostile_texts(folder / "job_1.json", lambda _: SweepRecord.read(folder))
    values = json.loads((folder / "job_1.json").read_text())
    (folder / "job_1.json").write_text(json.dumps(values | {"run_dir": job["run_dir"]}))
    with_hostile_texts(folder / paths.SWEEP_INDEX, SweepRecord.read)
    file = tmp_path / "journal.md"
    assert main(["runs", f"runs_dir={runs_dir}", f"journal={file}"]) == 0
    text = file.read_text()
    lines = text.removeprefix(
        "# Journal\n\nOne entry per run or sweep. Write wherever you like.\n"
    ).splitlines()
    ours = re.compile(r"## x\\` .* · |\* \*\*(Why|Changed|Result)\*\* |\* \[|$")
    assert [line for line in lines if not ours.match(line)] == []
    tokens = MarkdownIt().enable(["table", "strikethrough"]).parse(text)
    parts = [part for token in tokens for part in (token, *(token.children or ()))]
    assert [part.tag for part in parts if part.type == "heading_open"] == ["h1", "h2", "h2", "h2"]
    assert {part.tag for part in parts} <= {"", "h1", "h2", "p", "ul", "li", "strong", "a"}
    assert {part.content for part in parts if part.type.startswith("html")} == set()
    links = [str(part.attrs["href"]) for part in parts if part.type == "link_open"]
    assert len(links) == 4
    assert all((tmp_path / os.fsdecode(unquote_to_bytes(link))).exists() for link in links)


def write_sweep(runs_dir: Path, jobs: dict[str, str], status: str = "running") -> Path:
    """Writes a sweep, whose jobs are folders of runs with their statuses; its folder."""
    folder = runs_dir / paths.SWEEPS / "a"
    folder.mkdir(parents=True)
    facts: dict[str, Any] = {"start_time": "x", "versions": {}, "snapshot": GitRecord(), "status": status}
    SweepRecord(id="a", words=["seed=1,2"], num_jobs=2, commands=[[]], **facts).write(folder)
    for number, (run_dir, of_job) in enumerate(jobs.items(), start=1):
        SweepJob(job=number, overrides=[], status=of_job, run_dir=run_dir).write(folder)
    return folder


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "", "../.."])
def test_a_sweep_that_no_folder_can_have_leaves_a_run_its_own_entry(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, 1, sweep={"id": name, "dir": "x", "job": 1})
    run_dir = write_run(tmp_path, 2, sweep={"id": "a", "dir": "x", "job": 1})
    write_sweep(tmp_path, {name: "finished", str(run_dir): "finished"}, status="finished")
    text = journal_of(tmp_path)
    assert re.findall(r"seed 1 · finished|2 finished; ppo on Thing", text) == [
        "seed 1 · finished",
        "2 finished; ppo on Thing",
    ]


def test_a_sweep_whose_process_was_killed_has_an_entry(tmp_path: Path) -> None:
    jobs = {}
    for number, status in enumerate(("finished", "running"), start=1):
        run_dir = write_run(tmp_path, number, status=status, sweep={"id": "a", "dir": "x", "job": number})
        jobs[str(run_dir)] = status
    folder = write_sweep(tmp_path, jobs)
    with multiprocessing.Pool(1) as alive:
        alive.apply(lock, [folder])
        assert "sweep" not in (text := journal_of(tmp_path)), text
    for _ in range(2):
        text = journal_of(tmp_path)
        assert text.count("sweep seed=1,2 · killed") == 1, text
        assert "**Result** 1 finished, 1 killed; ppo on Thing: return 1 (of 1 seed)\n" in text


@pytest.mark.parametrize("baseline", ["~a\0b", "x" * 300, 5, ["x"]])
def test_a_baseline_that_names_no_run_is_said_to_be_unknown(tmp_path: Path, baseline: Any) -> None:
    write_run(tmp_path, config={"baseline": baseline})
    assert "* **Changed** unknown: baseline=" in journal_of(tmp_path)


@pytest.mark.long
def test_recorded_runs_and_sweeps_have_an_entry_each(fork: Path, tmp_path: Path) -> None:
    for words in (["seed=1"], ["seed=1,2", "algo.gamma=0.98"]):
        run_train(fork, tmp_path, *SHORT, *words, f"runs_dir={tmp_path / 'runs'}", status=0)
    text = journal_of(tmp_path / "runs")
    heads = re.findall(r"^## \S+ \S+ · (\S+ \S+ \S+)", text, re.MULTILINE)
    assert [head.partition(" ")[0] for head in heads] == ["ppo", "sweep"]
    result = r"^\* \*\*Result\*\* 2 finished; ppo.* on CartPole: return .* \(of 2 seeds\)"
    assert re.search(result, text, re.MULTILINE)
    assert journal_of(tmp_path / "runs") == text
