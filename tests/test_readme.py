"""The numbers in README and docs/ are those of the files that commands of this repository made."""

from __future__ import annotations

import csv
import json
import re

import pytest
from conftest import ROOT

PAGES = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
README = "\n".join(PAGES.values())
RESULTS = ROOT / "results"


# A fork may have another README, or no results.
quotes = pytest.mark.skipif(
    not RESULTS.exists() or "results/curves.csv" not in README, reason="this README quotes no results"
)


def rows(text: str) -> list[str]:
    """The lines of Markdown tables."""
    return [line for line in text.splitlines() if line.startswith("|")]


@quotes
def test_tables_of_the_benchmark_are_those_of_results() -> None:
    """Whole rows of it, whichever of them are shown here."""
    speeds = (RESULTS / "bench.md").read_text()
    columns = ("steps/s", "steps per CPU second, median (all)", "time added")
    heads = [line for line in rows(README) if any(f"| {name} " in line for name in columns)]
    assert heads
    for head in heads:
        table = rows(README[README.index(head) :].partition("\n\n")[0])
        assert len(table) > 3
        assert [row for row in table if row not in speeds] == []


@quotes
def test_proofs_and_kills_are_those_of_results() -> None:
    """Each certificate leads with its result, and the README quotes it."""
    proofs = sorted((RESULTS / "proofs").glob("*.txt"))
    assert len(proofs) == 6
    for path in proofs:
        assert re.sub(r", one digest.*", "", path.read_text().splitlines()[0]) in README
    results = [json.loads(line) for line in (RESULTS / "resume.jsonl").read_text().splitlines()]
    assert f"{sum(result['kills'] for result in results):,} kills in {len(results)} cases" in README
    assert all(result["identical"] for result in results)


@quotes
def test_the_table_of_returns_is_that_of_results_and_follows_from_every_seeds_evaluations() -> None:
    table = rows((RESULTS / "curves.md").read_text())
    assert "\n".join(table) in README
    last: dict[str, float] = {}
    with (RESULTS / "curves.csv").open(newline="") as file:
        for row in sorted(csv.DictReader(file), key=lambda row: int(row["env_steps"])):
            last[f"{row['algo']} {row['env']} {row['seed']}"] = float(row["eval_return"])
    assert len(table) > 3
    for line in table[2:]:
        algo, env, _, mean, seeds, _ = line.strip("| ").split(" | ")
        returns = [value for name, value in last.items() if name.startswith(f"{algo} {env} ")]
        assert len(returns) == int(seeds)
        assert float(mean.replace(",", "")) == pytest.approx(sum(returns) / len(returns), abs=0.051)


def test_every_file_and_make_target_that_the_readme_names_is_there() -> None:
    links = [
        str((path.parent / link).resolve().relative_to(ROOT))
        for path, text in PAGES.items()
        for link in re.findall(r"\]\(([^)#:]+)[)#]", text)
    ]
    named = re.findall(r"`((?:conf|rltemplate|scripts|tests|results)/[\w./-]*\w)`", README)
    assert [path for path in [*links, *named] if not (ROOT / path).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)) <= targets
