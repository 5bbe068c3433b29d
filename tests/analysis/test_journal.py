"""The journal: one entry per run or sweep, none lost to others, and nothing of the reader's overwritten."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from conftest import program

from rltemplate.analysis.journal import put
from rltemplate.run import paths

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["algo=ppo", "env=CartPole", "total_env_steps=1024", "video_every=0", "eval_every=1024"]


def entries(path: Path) -> dict[str, str]:
    found = re.findall(r"<!-- entry (\S+) \S+ -->\n(.*?)<!-- end \1 -->", path.read_text(), re.DOTALL)
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


# --- The file --------------------------------------------------------------------------------------------


def test_entries_are_added_at_the_end_and_replaced_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "journal.md"
    put(path, "a", "one\n")
    put(path, "b", "two\n")
    put(path, "a", "three\n")
    assert list(entries(path).items()) == [("a", "three\n"), ("b", "two\n")]
    assert path.read_text().startswith("# Journal\n")


def test_what_somebody_wrote_stays(tmp_path: Path) -> None:
    path = tmp_path / "journal.md"
    put(path, "a", "one\n")
    put(path, "b", "two\n")
    before = "My own title\n\n" + path.read_text().replace("# Journal", "").replace("two", "two, I think")
    path.write_text(before + "\na last thought, without an end")
    put(path, "a", "again\n")  # nobody has touched this one
    put(path, "b", "again\n")  # but this one
    put(path, "c", "new\n")
    text = path.read_text()
    assert text.startswith("My own title\n")
    assert "two, I think" in text
    assert "a last thought, without an end\n" in text
    assert text.count("<!-- entry b ") == 2
    assert text.index("again") < text.index("two, I think") < text.index("a last thought")
    assert text.rstrip().endswith("<!-- end c -->")


def test_a_journal_in_another_encoding_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "journal.md"
    path.write_bytes("Präfix\n".encode("latin-1"))
    put(path, "a", "one\n")
    put(path, "a", "two\n")
    assert path.read_bytes().startswith("Präfix\n".encode("latin-1"))
    assert path.read_bytes().count(b"<!-- entry a ") == 2


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "notes" / "real.md", tmp_path / "journal.md"
    real.parent.mkdir()
    link.symlink_to(real)
    put(link, "a", "one\n")
    put(link, "a", "two\n")
    assert link.is_symlink()
    assert entries(real) == {"a": "two\n"}


def _write_many(path: Path, who: int) -> None:
    for i in range(25):
        put(path, f"{who}-{i}", f"{who} {i}\n" * 50)
        put(path, f"{who}-{i}", f"{who} {i} again\n" * 50)


def test_many_at_once_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "journal.md"
    writers = [multiprocessing.Process(target=_write_many, args=(path, who)) for who in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = entries(path)
    assert found == {f"{who}-{i}": f"{who} {i} again\n" * 50 for who in range(4) for i in range(25)}
    assert path.read_text().count("# Journal") == 1


# --- Entries of real runs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs_dir(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs and two sweeps, one after another."""
    runs = tmp_path_factory.mktemp("journal") / "my runs"
    train(fork, runs, "seed=1", "note=the first one, to see | whether it *runs*")
    train(fork, runs, "seed=2", "algo.gamma=0.9")
    train(fork, runs, "seed=5", "algo.gamma=0.9", "log_every=512")
    train(fork, runs, "seed=3", "logger=none")
    train(fork, runs, "seed=1,2", "algo.gamma=0.98")
    train(fork, runs, "seed=1,2", "algo.gamma=0.8,0.95", "note=which horizon?")
    return runs


def train(fork: Path, runs: Path, *words: str) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "PYTHON"))}
    command = [sys.executable, str(fork / "scripts" / "train.py"), *SHORT, f"runs_dir={runs}", *words]
    subprocess.run(command, check=True, env=clean, cwd=runs.parent, stdout=subprocess.DEVNULL)


def records(runs: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in runs.glob(f"*/*/{paths.RECORD}")]
    return sorted(found, key=lambda record: str(record["started_at"]))


def test_each_run_and_each_sweep_has_one_entry(runs_dir: Path) -> None:
    singles = [record for record in records(runs_dir) if record["sweep"] is None]
    told = entries(runs_dir / paths.JOURNAL)
    sweeps = sorted(path.name for path in (runs_dir / paths.SWEEPS).iterdir())
    assert list(told) == [*(each["id"] for each in singles[:3]), *sweeps]  # the fourth was to tell nobody


def test_an_entry_says_why_what_and_what_came_of_it(runs_dir: Path) -> None:
    first, second, *_ = entries(runs_dir / paths.JOURNAL).values()
    known = records(runs_dir)
    assert "**Why** the first one, to see | whether it \\*runs\\*" in first
    assert "the first of its kind here" in first
    assert "**Why**" not in second
    assert f"against the run before [{known[0]['id']}]" in second
    assert "algo.gamma 0.98 -> 0.9" in second
    for text, record in ((first, known[0]), (second, known[1])):
        assert f"eval/return {record['final_metrics']['eval/return']:,.4g} after 1,024 steps" in text
        assert record["git"]["ref"] in text
        assert record["git"]["base_commit"][:10] in text


def test_a_run_tells_what_its_experiment_says_so_far(runs_dir: Path) -> None:
    first, second, third, *_ = entries(runs_dir / paths.JOURNAL).values()
    assert "Seeds so far" not in first + second  # another discount is another experiment
    returns = [record["final_metrics"]["eval/return"] for record in records(runs_dir)[1:3]]
    listed = ", ".join(f"{value:,.4g}" for value in returns)
    assert re.search(rf"Seeds so far\*\* interquartile mean .* \(2 seeds: {re.escape(listed)}\)", third)
    assert third.count("too few to tell") == 1


def test_a_sweep_tells_each_setting_with_its_interval(runs_dir: Path) -> None:
    *_, first_sweep, sweep = entries(runs_dir / paths.JOURNAL).values()
    assert "**Jobs** 4 finished" in sweep
    # Seed 1 against seed 1, although another run of the sweep before was the last one.
    seeds = {record["id"]: record["id"].split("-")[2] for record in records(runs_dir)}
    match = re.search(r"against the run before \[([^]]+)\]\S* (.*)", sweep)
    assert match is not None
    assert seeds[match[1]] == "seed1"
    assert "seed" not in match[2]
    assert "**Jobs** 2 finished" in first_sweep
    assert "which horizon?" in sweep
    for gamma in ("0.8", "0.95"):
        pattern = rf"`algo.gamma={gamma}`: interquartile mean .* 95 % interval .* \(2 seeds: .*; random "
        assert re.search(pattern, sweep)
    assert sweep.count("too few to tell") == 1


def test_links_lead_there(runs_dir: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", (runs_dir / paths.JOURNAL).read_text())
    assert len(links) >= 8
    for link in links:
        assert (runs_dir / unquote(link)).exists(), link


def test_a_run_that_goes_on_has_still_one_entry(fork: Path, runs_dir: Path) -> None:
    record = records(runs_dir)[0]
    before = list(entries(runs_dir / paths.JOURNAL))
    words = [f"run={record['id']}", f"runs_dir={runs_dir}", "total_env_steps=2048"]
    done = subprocess.run([*program(fork, "resume"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = entries(runs_dir / paths.JOURNAL)
    assert list(after) == before
    assert "after 2,048 steps" in after[record["id"]]


def test_a_journal_that_cannot_be_written_costs_a_line(fork: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / paths.JOURNAL).mkdir(parents=True)  # a folder in its place
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "PYTHON"))}
    command = [sys.executable, str(fork / "scripts" / "train.py"), *SHORT, f"runs_dir={runs}"]
    done = subprocess.run(command, env=clean, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "no entry in" in done.stderr
    assert records(runs)[0]["status"] == "finished"
