"""The numbers in README and docs/ are those of results/, and what these pages name is there."""

from __future__ import annotations

import json
import math
import re
import runpy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import NAME, ROOT, git

from runlab.analysis.stats import Interval
from runlab.run.git.snapshot import take_snapshot
from runlab.run.used_code import UsedCode

PAGES = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
README = "\n".join(text for path, text in PAGES.items() if path.parent.name != "stories")
RESULTS = ROOT / "results"


def tables(text: str) -> dict[str, list[str]]:
    """The rows of each Markdown table, by its first line; tables with the same first line are one."""
    by_head: dict[str, list[str]] = {}
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = table.splitlines()
        by_head.setdefault(head, []).extend(rows)
    return by_head


# A fork may have another README, or no results.
of_this_project = pytest.mark.skipif(
    not RESULTS.exists() or "results/table/runs.csv" not in README, reason="this README quotes no results"
)


@of_this_project
def test_tables_proofs_and_kills_are_those_of_results() -> None:
    made = tables("\n".join(path.read_text() for path in sorted(RESULTS.glob("*.md"))))
    shown = {head: rows for head, rows in tables(README).items() if head in made}
    assert len(shown) >= 3
    assert [row for head, rows in shown.items() for row in rows if row not in made[head]] == []
    proofs = sorted((RESULTS / "proofs").glob("*.txt"))
    assert len(proofs) == 18
    for path in proofs:
        assert re.sub(r", one digest.*", "", path.read_text().splitlines()[0]) in README
    results = [json.loads(line) for line in (RESULTS / "resume.jsonl").read_text().splitlines()]
    assert f"{sum(result['kills'] for result in results):,} kills in {len(results)} cases" in README
    assert all(result["identical"] for result in results)


@of_this_project
def test_the_scripts_of_results_start_a_program_that_there_is() -> None:
    scripts = "".join(path.read_text() for path in RESULTS.glob("*.py"))
    assert {*re.findall(r'"-m", "(\w+)"', scripts)} == {"runlab"}


@of_this_project
def test_the_page_of_results_is_made_from_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RESULTS)
    page = import_module("table_page").page_text()
    assert page == PAGES[ROOT / "docs" / "results.md"]
    sentences = re.findall(r"^\* (?:PPO|SAC): (.*)\.$", page, re.MULTILINE)
    assert len(sentences) == 2
    assert all(sentence in PAGES[ROOT / "README.md"].replace("\n", " ") for sentence in sentences)


@of_this_project
def test_a_row_of_the_table_is_bold_if_its_whole_interval_stands_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(RESULTS)
    standing = import_module("table_page").standing
    ends = [10.0, 20.0, 30.0]
    for mean, expected in (
        ((35.0, 31.0, 39.0), "**above the top**"),
        ((35.0, 29.0, 41.0), "above the top"),
        ((30.0, 30.0, 30.0), "**at the top**"),
        ((25.0, 20.0, 29.0), "**above par**"),
        ((15.0, 9.0, 21.0), "below par"),
        ((5.0, math.nan, math.nan), "below the floor"),
    ):
        assert standing(Interval(*mean), ends) == expected


@of_this_project
def test_the_policy_of_a_row_is_the_one_nearest_to_its_median() -> None:
    table = runpy.run_path(str(RESULTS / "table.py"))
    runs = [run for run in table["read"](table["Trained"]) if (run.algo, run.env) == ("ppo", "Walker2d")]
    by_return = [run.seed for run in sorted(runs, key=lambda run: run.eval_return)]
    assert len(runs) == 10
    for seeds, expected in ((by_return, by_return[4:6]), (by_return[6:], by_return[6:7]), ([None, 3], [3])):
        assert table["nearest_to_median"](runs, seeds) in expected


@of_this_project
def test_a_run_is_of_the_table_if_all_its_code_was_committed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name in ("used.py", "other.py"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "code")
    changes = runpy.run_path(str(RESULTS / "table.py"))["changes"]
    for changed, expected in (("notes.log", []), ("other.py", []), ("used.py", ["used.py"])):
        (tmp_path / changed).write_text("2")
        record = SimpleNamespace(git=take_snapshot(tmp_path), used=UsedCode(files=["used.py"]))
        assert record.git.dirty
        assert changes(SimpleNamespace(dir=tmp_path, record=record)) == expected
    record.git.tree = "0" * 40
    assert changes(SimpleNamespace(dir=tmp_path, record=record)) != []


@of_this_project
def test_rows_of_several_lengths_have_labels_of_their_own() -> None:
    label = runpy.run_path(str(RESULTS / "table.py"))["row_label"]
    rows = [
        ("ppo", "Ant", 1_001_472),
        ("ppo", "Ant", 3_000_320),
        ("sac", "Ant", 50_000),
        ("sac", "Ant", 200_000),
    ]
    assert [label(rows, row) for row in rows] == ["Ant", "Ant-3M", "Ant", "Ant-200k"]


@pytest.mark.skipif(not (RESULTS / "speed.svg").exists(), reason="this project has no chart of its speed")
def test_the_chart_of_speed_shows_the_measurements() -> None:
    svg = runpy.run_path(str(RESULTS / "speed_chart.py"))["svg"]
    assert svg() == (RESULTS / "speed.svg").read_bytes()


@pytest.mark.skipif(not (ROOT / "CITATION.cff").exists(), reason="this is a fork")
def test_the_citation_in_the_readme_is_that_of_the_file() -> None:
    entry = dict(re.findall(r"^  (\w+) += \{+(.*?)\}+,?$", PAGES[ROOT / "README.md"], re.MULTILINE))
    file = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    author = file["authors"][0]["name"]
    of_file = file["title"], author, file["version"], str(file["date-released"])[:4]
    assert tuple(entry[key] for key in ("title", "author", "version", "year")) == of_file


def test_every_file_and_make_target_that_the_readme_names_is_there() -> None:
    links = [
        str((path.parent / link).resolve().relative_to(ROOT))
        for path, text in PAGES.items()
        for link in re.findall(r"\]\(([^)#:]+)[)#]", text)
        if not link.startswith("../../actions/")  # of the repository's page
    ]
    named = re.findall(rf"`((?:conf|{NAME}|runlab|scripts|tests|results)/[\w./-]*\w)`(?!\n\n```)", README)
    assert [path for path in [*links, *named] if not (ROOT / path).exists()] == []
    makefiles = "".join(path.read_text() for path in [ROOT / "Makefile", *ROOT.glob("bench/*.mk")])
    targets = set(re.findall(r"^([a-z-]+):", makefiles, re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)) <= targets


def listed_in_the_readme() -> list[str]:
    """The paths in the tree of the README, whose lines are indented below their folder."""
    tree = PAGES[ROOT / "README.md"].partition("\n```\nconf/ ")[2].partition("\n```\n")[0]
    paths, folders = list[str](), [""]
    for line in f"conf/ {tree}".splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r" {2,}", line.strip())[0].split(" ") if line else []
        paths += [f"{folders[depth]}{name}" for name in names if "/" in name or "." in name]
        folders[depth + 1 :] = [paths[-1]] if names else []
    return paths


@of_this_project
def test_the_tree_in_the_readme_is_that_of_the_repository() -> None:
    listed = listed_in_the_readme()
    assert [path for path in listed if not [*ROOT.glob(path)]] == []
    files = {file for path in listed for file in ROOT.glob(path)}
    for folder in (ROOT / NAME, ROOT / NAME / "learning", ROOT / NAME / "algos", ROOT / "runlab"):
        parts = {path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        parts -= {folder / "__init__.py", ROOT / NAME / "algos"}
        assert {path.name for path in parts - files} == set()
