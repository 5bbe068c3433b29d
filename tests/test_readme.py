"""The numbers in README and docs/ are those of results/, and what these pages name is there."""

from __future__ import annotations

import json
import re
import runpy

import pytest
from conftest import ROOT

PAGES = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
README = "\n".join(text for path, text in PAGES.items() if path.parent.name != "stories")
RESULTS = ROOT / "results"


def tables(text: str) -> dict[str, list[str]]:
    """The rows of each Markdown table, by its first line; tables with the same first line are one."""
    found: dict[str, list[str]] = {}
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = table.splitlines()
        found.setdefault(head, []).extend(rows)
    return found


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
    assert len(proofs) == 6
    for path in proofs:
        assert re.sub(r", one digest.*", "", path.read_text().splitlines()[0]) in README
    results = [json.loads(line) for line in (RESULTS / "resume.jsonl").read_text().splitlines()]
    assert f"{sum(result['kills'] for result in results):,} kills in {len(results)} cases" in README
    assert all(result["identical"] for result in results)


@of_this_project
def test_the_page_of_results_is_made_from_the_runs() -> None:
    table = runpy.run_path(str(RESULTS / "table.py"))
    page = table["page_text"]()
    assert page == PAGES[ROOT / "docs" / "results.md"]
    (sentence,) = re.findall(r"^\* PPO: (.*)$", page, re.MULTILINE)
    assert sentence in PAGES[ROOT / "README.md"].replace("\n", " ")


@pytest.mark.skipif(not (RESULTS / "speed.svg").exists(), reason="this project has no chart of its speed")
def test_the_chart_of_speed_shows_the_measurements() -> None:
    svg = runpy.run_path(str(RESULTS / "speed_chart.py"))["svg"]
    assert svg() == (RESULTS / "speed.svg").read_bytes()


def test_every_file_and_make_target_that_the_readme_names_is_there() -> None:
    links = [
        str((path.parent / link).resolve().relative_to(ROOT))
        for path, text in PAGES.items()
        for link in re.findall(r"\]\(([^)#:]+)[)#]", text)
        if not link.startswith("../../actions/")  # of the repository's page
    ]
    named = re.findall(r"`((?:conf|rltemplate|scripts|tests|results)/[\w./-]*\w)`(?!\n\n```)", README)
    assert [path for path in [*links, *named] if not (ROOT / path).exists()] == []
    makefiles = "".join(path.read_text() for path in [ROOT / "Makefile", *ROOT.glob("bench/*.mk")])
    targets = set(re.findall(r"^([a-z-]+):", makefiles, re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)) <= targets
