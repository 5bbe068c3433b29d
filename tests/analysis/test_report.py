"""The report says what the run folders say, of the runs that it says, and trusts none of their words."""

from __future__ import annotations

import csv
import re
from base64 import b64decode
from html import unescape
from pathlib import Path

import pytest
from conftest import write_run

from rltemplate.__main__ import main
from rltemplate.analysis import figures, stats
from rltemplate.analysis.commands.report import Report, make_report, write_curves
from rltemplate.analysis.figures import Panel
from rltemplate.run import paths
from rltemplate.types import ConfigError

EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"


def reported(runs_dir: Path) -> Report:
    """The report about all runs in a folder."""
    return make_report(sorted(runs_dir.glob("*/*")), "runs/*/*")


def text_of(html: str) -> str:
    """What a reader sees: without styles and tags, entities resolved."""
    html = re.sub(r"<style>.*?</style>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))


def panels(report: Report, key: str) -> dict[str, Panel]:
    """The panels of the chart of a name, by title."""
    found = next(chart for chart in report.charts if chart.key == key)
    return {panel.title: panel for panel in found.panels}


def test_curves_are_of_all_runs_and_statistics_of_those_that_count(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [9.0, 9.0], tag="-old", started_at="2025-01-01T00:00:00.000Z")
    for seed in (1, 2, 3):
        write_run(tmp_path, seed, [0.0, 10.0 * seed])
    write_run(tmp_path, 4, [7.0, 7.0], status="failed", error="no luck")
    report = reported(tmp_path)
    drawn = {line.name: line for line in panels(report, "001-ppo-Thing")["eval/return"].lines}
    assert drawn["IQM of 3 seeds"].points == [(100, 0.0), (200, 20.0)]
    assert drawn["seed 2"].points == [(100, 0.0), (200, 20.0)]
    assert {"seed 4, not counted: failed", "seed 1, not counted: finished"} < set(drawn)
    losses = panels(report, "001-ppo-Thing-metrics")["loss/policy"].lines
    assert [line.points[-1][1] for line in losses] == [-9.0, -10.0, -20.0, -30.0, -7.0]
    text = text_of(report.html)
    assert str(stats.interval([10.0, 20.0, 30.0])) in text
    assert "3 seeds: too few to tell" in text
    assert "no luck" in text


def test_experiments_of_one_environment_are_drawn_together(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [1.0, 2.0])
    write_run(tmp_path, 1, [1.0, 8.0], tag="-b", config={"algo": {"gamma": 0.5}})
    lines = panels(reported(tmp_path), "all-Thing-eval-return")["eval/return"].lines
    assert [(line.name, line.points[-1][1]) for line in lines] == [
        ("1. ppo (n=1)", 2.0),
        ("2. ppo gamma=0.5 (n=1)", 8.0),
    ]


def test_published_returns_are_drawn_and_named(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [0.0] * 999 + [400.0], env="CartPole", config={"env": {"id": "CartPole-v1"}})
    report = reported(tmp_path)
    assert [*panels(report, "001-ppo-CartPole")["eval/return"].levels] == ["published, PPO", "random policy"]
    assert "published for PPO" in text_of(report.html)
    (curve,) = panels(report, "001-ppo-CartPole")["eval/return"].lines
    assert (len(curve.points), curve.points[-1]) == (251, (100_000, 400.0))  # thinned, with its end
    assert b"published, PPO" in figures.svg(report.charts[0])


def test_figures_are_sharp_vector_too_and_the_same_each_time(tmp_path: Path) -> None:
    from PIL import Image

    for seed in (1, 2):
        write_run(tmp_path / "runs", seed, [1.0, 2.0 * seed], config={"algo": {"name": "$x"}})
    report = reported(tmp_path / "runs")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        figures.write(report.charts, folder)
        write_curves(report.experiments, folder / "curves.csv")
    files = sorted(path.name for path in folders[0].iterdir())
    name = "001--x-Thing-v0"
    assert {f"{name}.png", f"{name}.svg", f"{name}-metrics.svg", "curves.csv"} <= set(files)
    assert all((folders[0] / file).read_bytes() == (folders[1] / file).read_bytes() for file in files)
    with Image.open(folders[0] / f"{name}.png") as image:
        assert round(image.info["dpi"][0]) == 300
    with (folders[0] / "curves.csv").open(newline="") as file:
        points = [(row["seed"], row["env_steps"], row["return"]) for row in csv.DictReader(file)]
    assert points == [("1", "100", "1.0"), ("1", "200", "2.0"), ("2", "100", "1.0"), ("2", "200", "4.0")]


def test_the_command_puts_the_page_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"), 1)
    (write_run(Path("runs"), 3) / paths.RECORD).write_text("{")
    assert main(["report", "figures=papers"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("written: runs/report.html (")
    assert "figures as PNG and SVG, and curves.csv, in papers" in said.out
    assert "run-3" in said.err
    assert Path("runs/report.html").read_text().startswith("<!doctype html>")
    for wrong in ("figures=runs/report.html", "out=none/page.html"):
        assert main(["report", wrong]) == 2
        assert wrong.partition("=")[0] in capsys.readouterr().err


def test_text_of_run_folders_is_text_and_the_page_asks_no_server(tmp_path: Path) -> None:
    write_run(tmp_path, 1, id=EVIL, status=EVIL, error=EVIL, config={"note": EVIL, "algo": {"name": EVIL}})
    write_run(tmp_path, 2, error="\ud800 \x00 \u202e")
    report = reported(tmp_path)
    html = report.html
    assert html.encode("utf-8")
    assert "owned" in html
    assert not re.search(r"<script|<img (?!loading)|https?:", html)
    assert "default-src 'none'" in html
    drawn = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert len(drawn) == len(report.charts) > 2
    assert all(b"<script" not in b64decode(each) for each in drawn)


def test_damaged_metrics_are_named(tmp_path: Path) -> None:
    (write_run(tmp_path, 1) / paths.METRICS).write_text("[]\n")
    with pytest.raises(ConfigError, match=r"none of 1 run folders can be read; .*: line 1 is damaged"):
        reported(tmp_path)
