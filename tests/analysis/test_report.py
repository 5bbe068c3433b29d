"""The report says what the run folders say, of the runs that it says, and trusts none of their words."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from conftest import RecordedRun, write_run

from rltemplate.__main__ import main
from rltemplate.analysis import stats
from rltemplate.analysis.report import export
from rltemplate.analysis.report.experiments import Experiment, find_experiments, load_metrics
from rltemplate.analysis.report.figures import Chart, thinned
from rltemplate.analysis.report.page import Report, make_report
from rltemplate.analysis.report.repeats import find_repeats
from rltemplate.analysis.runs import load_runs
from rltemplate.run import paths
from rltemplate.types import ConfigError

EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
SLOW: dict[str, Any] = {"algo": {"gamma": 0.5}}


def same_code(a: Any, b: Any) -> list[str]:
    """As if the code of all runs were equal."""
    return []


def reported(runs_dir: Path, **options: Any) -> Report:
    """The report about all runs in a folder."""
    given: dict[str, Any] = {
        "pattern": "runs/*/*",
        "written": "today",
        "changed_files": same_code,
    }
    return make_report(sorted(runs_dir.glob("*/*")), **(given | options))


def experiments_in(runs_dir: Path, changed_files: Any = same_code) -> list[Experiment]:
    runs, problems = load_runs(sorted(runs_dir.glob("*/*")))
    assert problems == []
    experiments = find_experiments(runs, changed_files)
    assert list(load_metrics(experiments)) == []
    return experiments


def text_of(html: str) -> str:
    """What a reader sees: without scripts, styles and tags, entities resolved."""
    html = re.sub(r"<(script|style)[^>]*>.*?</\1>", " ", html, flags=re.DOTALL)
    text = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))
    return re.sub(r" ([,.)])|(\() ", r"\1\2", text)


def chart(report: Report, key: str) -> Any:
    """The figure of a name."""
    return next(each.figure for each in report.charts if each.key == key)


# --- Runs that belong together ---------------------------------------------------------------------------


def test_runs_that_differ_in_seed_and_in_observers_are_one_experiment(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    write_run(tmp_path, 2, config={"note": "another", "logger": {"console": False}, "trace": "step"})
    write_run(tmp_path, 3, config=SLOW)
    found = experiments_in(tmp_path)
    assert [[run.id for run in each.runs] for each in found] == [["run-1", "run-2"], ["run-3"]]
    assert [each.group.by for each in found] == [None, "algo.gamma=0.5"]


def test_other_code_is_another_experiment_unless_it_computes_the_same(tmp_path: Path) -> None:
    for seed, tree in ((1, "a"), (2, "c"), (3, "d")):
        code = {"ref": "r", "tree": tree * 40, "base_commit": tree * 40, "dirty": False}
        write_run(tmp_path, seed, git=code)

    def changed(a: Any, b: Any) -> list[str]:
        trees = {run.value("git.tree")[0] for run in (a, b)}
        return ["README.md"] if trees == {"a", "c"} else ["rltemplate/algos/ppo.py"]

    found = experiments_in(tmp_path, changed)
    assert [[run.id for run in each.runs] for each in found] == [["run-1", "run-2"], ["run-3"]]
    assert [each.group.by for each in found] == ["code aaaaaaaaaa", "code dddddddddd"]
    assert (
        "2 things differ"
        in text_of(reported(tmp_path, changed_files=lambda a, b: ["rltemplate/algos/ppo.py"]).html)
        or len(experiments_in(tmp_path, lambda a, b: None)) == 3
    )  # unknown code is other code


def test_statistics_are_of_the_newest_finished_run_of_each_seed(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [9.0, 9.0], tag="-old", started_at="2025-01-01T00:00:00.000Z")
    for seed in (1, 2, 3):
        write_run(tmp_path, seed, [0.0, 10.0 * seed])
    write_run(tmp_path, 4, [1e6, 1e6], status="failed")
    report = reported(tmp_path)
    (experiment,) = report.experiments
    assert [run.id for run in experiment.group.runs] == ["run-1", "run-2", "run-3"]
    assert experiment.curve == [(100, (0.0, 0.0, 0.0)), (200, stats.interval([10.0, 20.0, 30.0]))]
    drawn = {line.name: line for line in chart(report, "001-ppo-Thing").data if line.name}
    assert list(drawn["IQM of 3 seeds"].y) == [0.0, 20.0]
    assert list(drawn["seed 2"].x) == [100, 200]
    assert {"seed 4, failed", "seed 1, not counted (-1-old)"} < set(drawn)
    text = text_of(report.html)
    assert f"{stats.interval([10.0, 20.0, 30.0])}, n = 3" in text
    assert "3 seeds: too few to tell" in text


def test_every_metric_is_drawn_and_training_returns_stand_in_for_evaluations(tmp_path: Path) -> None:
    (write_run(tmp_path, 1, []) / paths.METRICS).write_text(
        '{"env_steps": 5, "wall_time_s": 1, "episode/return": 3.5, "loss/policy": 0.25}\n'
    )
    record: dict[str, Any] = {"final_metrics": {"episode/return": 3.5}}
    (write_run(tmp_path, 2, [], **record) / paths.METRICS).write_text(
        '{"env_steps": 5, "wall_time_s": 1, "episode/return": 4.5, "loss/policy": -0.5}\n'
    )
    report = reported(tmp_path)
    metrics = chart(report, "001-ppo-Thing-metrics")
    assert [title.text for title in metrics.layout.annotations] == ["loss/policy"]
    assert [list(line.y) for line in metrics.data] == [[0.25], [-0.5]]
    assert "returns of training episodes" in text_of(report.html)


def test_experiments_of_one_environment_are_drawn_together_and_what_differs_is_named(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path, seed, [1.0, 2.0])
        write_run(tmp_path, seed, [1.0, 8.0], tag="-b", config=SLOW, started_at=f"2026-01-02T00:0{seed}")
    report = reported(tmp_path)
    lines = [line for line in chart(report, "all-Thing-eval-return").data if line.showlegend is not False]
    assert [line.name for line in lines] == ["1. PPO (n=2)", "2. PPO, algo.gamma=0.5 (n=2)"]
    assert [line.y[-1] for line in lines] == [2.0, 8.0]
    assert len(chart(report, "overview").layout.annotations) == 2
    assert "Against experiment 1: 1 thing differs: algo.gamma 0.99 -> 0.5" in text_of(report.html)


def test_published_returns_are_drawn_and_named(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [0.0] * 999 + [400.0], env="CartPole", config={"env": {"id": "CartPole-v1"}})
    report = reported(tmp_path)
    names = [note.text for note in chart(report, "001-ppo-CartPole").layout.annotations]
    assert names == ["published, PPO", "random policy"]
    assert "published for PPO" in text_of(report.html)
    write_run(tmp_path / "unknown", 1)
    assert not chart(reported(tmp_path / "unknown"), "001-ppo-Thing").layout.annotations


def test_a_thinned_curve_keeps_its_spikes_and_its_ends() -> None:
    points = [(i, float(i % 7)) for i in range(10_000)]
    points[5_003], points[7_777] = (5_003, 1e9), (7_777, -1e9)
    kept = thinned(points, 500)
    assert len(kept) <= 500
    assert {points[0], points[5_003], points[7_777], points[-1]} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(points[:5], 500) == points[:5]


# --- Files ------------------------------------------------------------------------------------------------


def test_figures_are_sharp_vector_too_and_the_same_each_time(tmp_path: Path) -> None:
    from PIL import Image

    for seed in (1, 2):
        write_run(tmp_path / "runs", seed, [1.0, 2.0 * seed], config={"note": "$x"})
    report = reported(tmp_path / "runs")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        export.write_figures(report.charts, folder)
        export.write_tables(report.experiments, folder)
    files = sorted(path.name for path in folders[0].iterdir())
    name = "001-ppo-Thing"
    assert {f"{name}.png", f"{name}.svg", f"{name}-metrics.svg", "experiments.csv", "curves.csv"} < set(files)
    assert all((folders[0] / file).read_bytes() == (folders[1] / file).read_bytes() for file in files)
    with Image.open(folders[0] / f"{name}.png") as image:
        assert round(image.info["dpi"][0]) == 300
    assert "<text" not in (folders[0] / f"{name}.svg").read_text()  # letters are outlines
    with (folders[0] / "curves.csv").open(newline="") as file:
        points = [(row["seed"], row["env_steps"], row["eval_return"]) for row in csv.DictReader(file)]
    assert points == [("1", "100", "1.0"), ("1", "200", "2.0"), ("2", "100", "1.0"), ("2", "200", "4.0")]


def test_the_command_puts_the_page_beside_the_runs_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"), 1)
    (write_run(Path("runs"), 3) / paths.RECORD).write_text("{")
    old, link = Path("runs/report.html"), Path("link")
    old.write_text("old")
    link.hardlink_to(old)
    assert main(["report", "figures=papers"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("written: runs/report.html (")
    assert "figures in papers, each as PNG and SVG" in said.out
    assert "run-3" in said.err
    assert old.read_text().startswith("<!doctype html>")
    assert link.read_text() == "old"  # replaced, and not written over
    assert Path("papers/001-ppo-Thing.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", "runs=runs/ppo-Thing/run-1", "out=page.html"]) == 0
    for wrong in ("runs=none/*", "out=runs", "figures=page.html", "out=none/page.html"):
        assert main(["report", wrong]) == 2
        assert wrong.partition("=")[0] in capsys.readouterr().err


# --- Words that are not to be trusted -----------------------------------------------------------------------


def test_text_of_run_folders_is_text_and_the_policy_lets_in_two_scripts(tmp_path: Path) -> None:
    write_run(tmp_path, 1, id=EVIL, status=EVIL, error=EVIL, config={"note": EVIL, "algo": {"name": EVIL}})
    write_run(tmp_path, 2, error="\ud800 \x00 \u202e")
    html = reported(tmp_path).html
    assert html.encode("utf-8")
    assert "owned" in html
    assert not re.search(r"<script>document|<img", html)
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    ]
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert found is not None
    policy = unescape(found[1])
    assert len(hashes) == 2
    assert f"script-src {' '.join(hashes)};" in policy
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (paths.RECORD, "{", "cannot be read"),
        (paths.RECORD, '{"schema": 1, "id": "x", "status": "failed", "git": "x"}', "git"),
        (paths.CONFIG, "algo: [", "config.yaml cannot be read"),
        (
            paths.CONFIG,
            '{"algo": {"name": "a"}, "env": {"id": "e"}, "determinism": {"level": "l"}, "seed": "x"}',
            "seed",
        ),
        (paths.METRICS, "[]\n", "line 1 of metrics.jsonl is damaged"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    write_run(tmp_path, 1, [1.0, 42.5])
    (write_run(tmp_path, 2, tag="-odd") / name).write_text(content)
    huge = f'{{"env_steps": 1{"0" * 400}, "x": 1}}\n{{"env_steps": 1, "x": 1{"0" * 400}}}\n'
    (write_run(tmp_path, 3, []) / paths.METRICS).write_text(huge)
    report = reported(tmp_path)
    assert len(report.problems) == 1
    assert said in report.problems[0]
    assert "42.5" in text_of(report.html)
    (write_run(tmp_path / "alone") / paths.RECORD).write_text("{")
    with pytest.raises(ConfigError, match="none of 1 run folders can be read"):
        reported(tmp_path / "alone")


# --- Runs that should be equal ------------------------------------------------------------------------------


def test_equal_runs_are_called_equal_and_others_are_compared(
    recorded_run: Callable[[str], RecordedRun], tmp_path: Path
) -> None:
    first = Path(shutil.copytree(recorded_run("ppo").run_dir, tmp_path / "ppo-CartPole" / "first"))

    def another(name: str, **changes: Any) -> Path:
        copy = Path(shutil.copytree(first, first.with_name(name)))
        record = json.loads((copy / paths.RECORD).read_text())
        (copy / paths.RECORD).write_text(json.dumps(record | changes))
        return copy

    another("a-copy")  # the same run once more says nothing
    assert find_repeats(experiments_in(tmp_path)) == ([], [], 0)
    another("again", id="again")
    trace = json.loads((first / paths.RECORD).read_text())["trace"]
    odd = another("odd", id="odd", trace=trace | {"digest": "0" * 32})
    lines = (odd / paths.TRACE).read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith('["iteration",1,'))
    row = json.loads(lines[at])
    row[3] = row[3][:-16] + "f" * 16  # the parameters at the end of the second iteration
    lines[at] = json.dumps(row, separators=(",", ":"))
    (odd / paths.TRACE).write_text("\n".join(lines) + "\n")
    found = find_repeats(experiments_in(tmp_path))
    assert [len(runs) for runs in found.equal] == [2]
    ((_, b, headline, _),) = found.pairs
    assert b.id == "odd"
    assert headline.startswith("diverged in iteration 1 ")
    text = text_of(reported(tmp_path).html)
    assert headline in text
    assert "Identical to the last bit: 2 runs of seed" in text


# --- A real browser -----------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def shown(page: Path, html: str) -> str:
    """The document in a window that is high enough for all charts, after its scripts have run."""
    page.write_text(html)
    words = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,9000", "--dump-dom")
    profile = f"--user-data-dir={page.with_suffix('.profile')}"
    command = [str(BROWSER), *words, profile, "--virtual-time-budget=20000", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
def test_a_browser_draws_every_chart_and_runs_no_word_of_a_run_folder(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / "runs", seed, [0.0, 5.0 * seed, 3.0 * seed])
        write_run(tmp_path / "runs", seed, [1.0, 8.0 * seed], tag="-b", config=SLOW)
    evil = write_run(tmp_path / "runs", 7, id=EVIL, error=EVIL, config={"note": EVIL, "algo": {"name": EVIL}})
    (evil / paths.METRICS).write_text(f'{{"env_steps": 1, "{EVIL.replace(chr(34), "")}": 1}}\n')
    report = reported(tmp_path / "runs")
    seen = shown(tmp_path / "page.html", report.html)
    assert seen.count('data-drawn="true"') == len(report.charts) > 5
    assert len(re.findall(r'class="js-line"[^>]* d="M[^"]*L', seen)) > 15
    assert "<title>Report of runs</title>" in seen
    # Were a word of it not escaped, the policy of the page would not let it run; without the policy it would.
    hurt = report.html.replace("<h1>", f"{EVIL}<h1>", 1)
    assert "<title>Report of runs</title>" in shown(tmp_path / "hurt.html", hurt)
    assert "<title>owned</title>" in shown(tmp_path / "open.html", hurt.replace("Content-Security-", "X-"))


@pytest.mark.slow
def test_five_hundred_runs_of_a_million_steps_take_seconds_and_fit_into_a_mail(tmp_path: Path) -> None:
    for i in range(500):
        experiment, seed = divmod(i, 5)
        gamma = {"algo": {"gamma": 0.9 + experiment / 2000}}
        run_dir = write_run(tmp_path, seed, tag=f"-{experiment}", config=gamma)
        noise = ((i * 7919) % 10_007) / 10_007
        rows = [
            {
                "env_steps": 2000 * (nr + 1),
                "wall_time_s": nr,
                **{f"loss/{k}": noise * nr + k for k in range(13)},
            }
            | ({"eval/return": nr + 100 * noise} if nr % 10 == 9 else {})
            for nr in range(500)
        ]
        (run_dir / paths.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    began = time.process_time()
    report = reported(tmp_path)
    assert time.process_time() - began < 60
    assert len(report.html.encode()) < 60_000_000
    charts: list[Chart] = report.charts
    assert len(charts) == 202
