"""The report says what the run folders say, of the runs that it says, and trusts none of their words."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, git, program, run_train

from rltemplate.analysis import stats
from rltemplate.analysis.commands.report import commit_links
from rltemplate.analysis.figures import (
    COLORS,
    DASHES,
    MARKERS,
    Chart,
    Dot,
    Line,
    Reference,
    apart,
    thinned,
    write_figures,
)
from rltemplate.analysis.report import charts, commits, material
from rltemplate.analysis.report.divergences import find_repeats
from rltemplate.analysis.report.experiments import before, find_experiments, load_metrics
from rltemplate.analysis.report.page import Report, make_report
from rltemplate.analysis.runs import load_runs
from rltemplate.run import paths
from rltemplate.types import ConfigError

EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"


def write_run(
    runs_dir: Path,
    seed: int = 1,
    returns: Sequence[float] = (0.0, 1.0),
    *,
    tag: str = "",
    gamma: float = 0.99,
    status: str = "finished",
    started: str = "2026-01-01T00:00:00Z",
    config: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """A run folder as a run leaves it, with an evaluation every hundred steps and a loss at each."""
    run_dir = runs_dir / "ppo-Thing" / f"run-{seed}{tag}"
    run_dir.mkdir(parents=True)
    record: dict[str, Any] = {
        "schema": 1,
        "id": run_dir.name,
        "status": status,
        "started_at": started,
        "duration_s": 60.0,
        "final_metrics": {"eval/return": returns[-1]} if returns else {},
        "git": {
            "ref": f"refs/runs/{run_dir.name}",
            "tree": "a" * 40,
            "base_commit": "b" * 40,
            "dirty": False,
        },
        "determinism": {"level": "repeat", "settings": {"mkl": True}, "checks": {"repeats": {"holds": True}}},
        "trace": {"digest": f"{seed:032x}", "iterations": 3},
        "machine": {"cpu": "a processor"},
    }
    (run_dir / paths.RECORD).write_text(json.dumps(record | fields))
    values: dict[str, Any] = {
        "algo": {"name": "ppo", "gamma": gamma},
        "env": {"id": "Thing-v0", "kwargs": {}},
        "determinism": {"level": "repeat"},
        "experiment": None,
        "seed": seed,
        "trace": "iteration",
        "note": None,
        "logger": {"console": True},
    }
    (run_dir / paths.CONFIG).write_text(json.dumps(values | dict(config or {})))  # which is YAML too
    rows = [
        {"env_steps": 100 * (i + 1), "wall_time_s": i, "eval/return": value, "loss/policy": -value}
        for i, value in enumerate(returns)
    ]
    (run_dir / paths.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def same_code(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """As if the code of all runs were equal."""
    return []


def reported(runs_dir: Path, **options: Any) -> Report:
    """The report about all runs in a folder."""
    given: dict[str, Any] = {
        "pattern": "runs/*/*",
        "written": "today",
        "changed_files": same_code,
        "commit_url": lambda commit: None,
    }
    return make_report(sorted(runs_dir.glob("*/*")), runs_dir, **(given | options))


def experiments_in(runs_dir: Path, changed_files: Any = same_code) -> list[Any]:
    runs, problems = load_runs(sorted(runs_dir.glob("*/*")))
    assert problems == []
    experiments = find_experiments(runs, changed_files)
    assert list(load_metrics(experiments, 200)) == []
    return experiments


def text_of(html: str) -> str:
    """What a reader sees: without scripts, styles, packed data and tags, entities resolved."""
    from html import unescape

    html = re.sub(r"<(script|style)>.*?</\1>|<div class=\"data.*?</div>", " ", html, flags=re.DOTALL)
    text = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))
    return re.sub(r" ([,.)])|(\() ", r"\1\2", text)


def drawn_in(html: str) -> dict[str, Any]:
    """The charts packed into a page, by key, as its script finds them."""
    packed = re.findall(r'<div class="data" data-id="[^"]+">([^<]*)</div>', html)
    groups = [json.loads(gzip.decompress(base64.b64decode(text))) for text in packed]
    return {chart["k"]: chart for group in groups for chart in group}


# --- Which runs belong together -------------------------------------------------------------------------


def test_runs_that_differ_in_seed_and_in_what_only_looks_at_them_are_one_experiment(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    write_run(tmp_path, 2, config={"note": "another", "logger": {"console": False}, "trace": "step"})
    write_run(tmp_path, 3, gamma=0.5)
    found = experiments_in(tmp_path)
    assert [[run.id for run in each.runs] for each in found] == [["run-1", "run-2"], ["run-3"]]
    assert [each.label for each in found] == ["", "algo.gamma=0.5"]
    assert before(found[0], found) is None
    assert before(found[1], found) is found[0]


def test_other_code_is_another_experiment_unless_it_computes_the_same(tmp_path: Path) -> None:
    for seed, tree in ((1, "a"), (2, "c"), (3, "d")):
        commit = {"tree": tree * 40, "base_commit": tree * 40, "dirty": False}
        write_run(tmp_path, seed, git=commit, started=f"2026-01-0{seed}")

    def changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
        return ["README.md"] if {a["tree"][0], b["tree"][0]} == {"a", "c"} else ["rltemplate/algos/ppo.py"]

    found = experiments_in(tmp_path, changed)
    assert [[run.id for run in each.runs] for each in found] == [["run-1", "run-2"], ["run-3"]]
    assert [each.label for each in found] == ["code aaaaaaaaaa", "code dddddddddd"]
    # Where nobody can tell, it is other code.
    assert len(experiments_in(tmp_path, lambda a, b: None)) == 3


def test_statistics_are_of_the_newest_finished_run_of_each_seed(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [9.0, 9.0], tag="-old", started="2025-01-01")
    for seed in (1, 2, 3):
        write_run(tmp_path, seed, [0.0, 10.0 * seed])
    write_run(tmp_path, 4, [1e6, 1e6], status="failed")
    (experiment,) = experiments_in(tmp_path)
    assert [run.id for run in experiment.counted] == ["run-1", "run-2", "run-3"]
    middle = charts.middle_of(experiment)
    assert middle is not None
    expected = stats.curve([[(100, 0.0), (200, 10.0 * seed)] for seed in (1, 2, 3)], statistic="iqm")
    assert middle.steps == [100, 200]
    assert middle.values == [each.value for _, each, _ in expected]
    assert (middle.low[-1], middle.high[-1]) == expected[-1][1][1:]
    chart = charts.learning_curve(experiment, middle)
    assert chart is not None
    names = [line.name for line in chart.lines]
    assert "seed 4, failed" in names
    assert "seed 1, earlier (-1-old)" in names
    assert names[-1] == "IQM of 3 seeds"
    spread = charts.spread(experiment)
    assert spread is not None
    assert [(dot.name, dot.value) for dot in spread.dots] == [
        ("seed 1", 10.0),
        ("seed 2", 20.0),
        ("seed 3", 30.0),
    ]


def test_without_evaluations_the_returns_of_training_stand_in_and_the_page_says_so(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    (run_dir / paths.METRICS).write_text('{"env_steps": 5, "episode/return": 3.5}\n')
    (experiment,) = experiments_in(tmp_path)
    assert experiment.score == "episode/return"
    assert "returns of training episodes" in text_of(reported(tmp_path).html)


# --- What is drawn --------------------------------------------------------------------------------------


def test_a_thinned_curve_keeps_its_spikes_and_its_ends() -> None:
    values = [float(i % 7) for i in range(10_000)]
    values[5_003], values[7_777] = 1e9, -1e9
    steps, kept = thinned(list(range(10_000)), values, 500)
    assert len(kept) <= 500
    assert {1e9, -1e9} <= set(kept)
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 9_999)
    assert all(values[step] == value for step, value in zip(steps, kept, strict=True))
    assert thinned([1, 2], [5.0, 6.0], 500) == ([1, 2], [5.0, 6.0])


def test_names_beside_lines_do_not_overlap_and_keep_their_order() -> None:
    places = apart([5.0, 5.1, 5.0, 90.0, 0.0], 10.0)
    ordered = sorted(places)
    assert all(b - a >= 10.0 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert places[3] == 90.0
    assert places[4] < places[0] < places[2] < places[1] or places[4] < places[2] < places[0] < places[1]


def test_lines_are_told_apart_without_colour() -> None:
    looks = {(i % len(DASHES), i % len(MARKERS)) for i in range(len(COLORS))}
    assert len(looks) == len(COLORS)
    assert len(set(COLORS)) == len(COLORS)


def test_every_metric_of_the_rows_is_drawn_with_its_values(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path, seed, [1.5 * seed, 2.5 * seed])
    shown = drawn_in(reported(tmp_path).html)
    assert set(shown) == {f"001-ppo-Thing-v0-{what}" for what in ("curve", "seeds", "loss-policy")}
    loss = shown["001-ppo-Thing-v0-loss-policy"]["l"]
    assert [(line["n"], line["d"], line["v"]) for line in loss] == [
        ("seed 1", [100, 100], [-1.5, -2.5]),  # steps as differences
        ("seed 2", [100, 100], [-3.0, -5.0]),
    ]


def test_experiments_of_one_environment_are_drawn_together(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path, seed, [1.0, 2.0])
        write_run(tmp_path, seed, [1.0, 8.0], tag="-b", gamma=0.5)
    shown = drawn_in(reported(tmp_path).html)["all-Thing-v0-eval-return"]
    assert [line["n"] for line in shown["l"]] == ["1. PPO (n=2)", "2. PPO, algo.gamma=0.5 (n=2)"]
    assert [line["v"][-1] for line in shown["l"]] == [2.0, 8.0]


def test_the_profile_of_an_experiment_is_the_fraction_of_its_seeds_above_a_threshold(tmp_path: Path) -> None:
    for seed, last in ((1, 0.0), (2, 10.0), (3, 10.0), (4, 10.0)):
        write_run(tmp_path, seed, [1.0, last])
        write_run(tmp_path, seed, [1.0, 2.0 * last], tag="-b", gamma=0.5)
    shown = drawn_in(reported(tmp_path).html)["profile-Thing-v0-eval-return"]
    assert shown["x"] == "threshold of the last eval/return"
    for line, most in zip(shown["l"], (10.0, 20.0), strict=True):
        thresholds = list(itertools.accumulate(line["d"]))
        assert thresholds == sorted(thresholds)
        assert thresholds[0] < 0.0 < 20.0 < thresholds[-1]
        expected = [1.0 if at < 0.0 else 0.75 if at < most else 0.0 for at in thresholds]
        assert line["v"] == expected
        assert all(low <= v <= high for low, v, high in zip(line["a"], line["v"], line["b"], strict=True))


def test_without_spread_there_is_no_profile(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path, seed, [1.0, 2.0])
        write_run(tmp_path, seed, [1.0, 2.0], tag="-b", gamma=0.5)
    assert not [key for key in drawn_in(reported(tmp_path).html) if key.startswith("profile")]


CHART = Chart(
    key="a-chart",
    title="A title with $ and \x00",
    caption="",
    value_label="return",
    summary="",
    lines=[
        Line("IQM", [0, 100], [1.0, 2.0], 0, "IQM", True, [0.5, 1.5], [1.5, 2.5]),
        Line("s", [0], [1.0], 1),
    ],
    references=[Reference(1.0, "random policy")],
)
DOTS = Chart("dots", "", "", "return", "", dots=[Dot("seed 1", 1.0, 1)], middle=("IQM", 1.0, 0.5, 1.5))


def test_figures_for_papers_are_sharp_vector_too_and_the_same_each_time(tmp_path: Path) -> None:
    from PIL import Image

    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        write_figures([CHART, DOTS], folder)
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == ["a-chart.png", "a-chart.svg", "dots.png", "dots.svg"]
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    with Image.open(folders[0] / "a-chart.png") as image:
        assert round(image.info["dpi"][0]) == 300
    svg = (folders[0] / "a-chart.svg").read_text()
    assert "<text" not in svg  # letters are outlines
    assert "<dc:date>" not in svg


# --- What the page says ----------------------------------------------------------------------------------


def test_numbers_of_seeds_and_cautions_stand_with_every_result(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path, seed, [0.0, 10.0 * seed])
    text = text_of(reported(tmp_path).html)
    value = stats.interval([10.0, 20.0, 30.0], statistic="iqm")
    ends = f"{charts.number(value.low)} to {charts.number(value.high)}"
    assert f"{charts.number(value.value)} ({ends}), n = 3" in text
    assert "3 seeds: too few to tell" in text
    enough = tmp_path / "enough"
    for seed in range(6):
        write_run(enough, seed, [0.0, 10.0 * seed])
    assert "too few to tell" not in text_of(reported(enough).html)


def test_what_changed_against_the_experiment_before_is_counted(tmp_path: Path) -> None:
    write_run(tmp_path, 1, started="2026-01-01")
    write_run(tmp_path, 1, tag="-b", gamma=0.5, started="2026-01-02")
    text = text_of(reported(tmp_path).html)
    assert "1 thing differs: algo.gamma 0.99 -> 0.5" in text
    two = reported(tmp_path, changed_files=lambda a, b: ["rltemplate/algos/ppo.py"])
    assert "2 things differ" in text_of(two.html)


def test_where_a_return_stands_among_published_ones_is_drawn(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        returns=[100.0, 400.0],
        config={"env": {"id": "CartPole-v1", "kwargs": {}, "max_episode_steps": None}},
    )
    report = reported(tmp_path)
    chart = drawn_in(report.html)["001-ppo-CartPole-v1-curve"]
    assert "random policy" in [text for _, text in chart["r"]]
    assert "published for PPO" in text_of(report.html)
    unknown = tmp_path / "unknown"
    write_run(unknown)
    assert drawn_in(reported(unknown).html)["001-ppo-Thing-v0-curve"]["r"] == []


def test_levels_checks_settings_digests_and_refs_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    broken = {"level": "repeat", "checks": {"repeats": {"holds": False}}, "settings": {"mkl": False}}
    write_run(tmp_path, 2, determinism=broken)
    html = reported(tmp_path).html
    text = text_of(html)
    assert "repeats holds" in text
    assert "repeats is broken" in text
    assert f"{1:032x}" in text
    assert 'data-copy="refs/runs/run-2"' in html
    assert len(re.findall(r"S\d: settings of 1 run at repeat", text)) == 2


def test_sweeps_proofs_and_journal_are_found_beside_the_runs(tmp_path: Path) -> None:
    write_run(tmp_path)
    sweep = {"status": "failed", "words": ["seed=1,2"], "num_jobs": 2}
    jobs = [{"job": 0, "run_id": "run-1", "status": "finished", "final_return": 1.0, "overrides": ["seed=1"]}]
    proof: dict[str, Any] = {"sentence": "repeat holds for ppo", "problems": [], "inverse": None}
    for name, document in (
        ("sweeps/s1/sweep.json", sweep | {"jobs": jobs}),
        ("sweeps/s2/sweep.json", sweep | {"jobs": 7}),
        ("prove/p1/certificate.json", proof),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(json.dumps(document))
    journal = "<!-- entry x -->\n# Tuesday\n\n**bold** [here](ppo-Thing/run-1) [there](https://example.org)\n"
    (tmp_path / paths.JOURNAL).write_text(journal)
    given = sorted((tmp_path / "ppo-Thing").iterdir())
    report = make_report(
        given,
        tmp_path,
        pattern="p",
        written="now",
        changed_files=same_code,
        commit_url=lambda commit: None,
    )
    text = text_of(report.html)
    assert "make train seed=1,2" in text
    assert "repeat holds for ppo" in text
    assert "<h3>Tuesday</h3>" in report.html
    assert "<strong>bold</strong> here" in report.html  # a link to a file beside the page leads nowhere
    assert '<a href="https://example.org">there</a>' in report.html
    assert "entry x" not in report.html
    assert sorted(problem.partition(":")[0] for problem in report.problems) == ["s2"]


def test_a_commit_is_a_link_where_it_has_an_address(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert "https://example.org/" not in reported(tmp_path).html
    linked = reported(tmp_path, commit_url=lambda commit: f"https://example.org/{commit}")
    assert f'<a href="https://example.org/{"b" * 40}"' in linked.html


@pytest.mark.parametrize(
    ("remote", "web"),
    [
        ("git@github.com:anna/rl.git", "https://github.com/anna/rl"),
        ("ssh://git@gitlab.example.org:2222/group/sub/rl.git", "https://gitlab.example.org/group/sub/rl"),
        ("https://anna:secret@github.com/anna/rl.git", "https://github.com/anna/rl"),
        ("https://oauth2:token@git.example.org:8443/anna/rl", "https://git.example.org:8443/anna/rl"),
        ("/srv/git/rl.git", None),
        ("../rl", None),
        ("file:" + "///srv/git/rl.git", None),
        ("javascript:alert(1)", None),
        ("https://[", None),
        ("", None),
    ],
)
def test_the_address_of_a_remote_on_the_web_without_its_secrets(remote: str, web: str | None) -> None:
    assert commits.web_address(remote) == web


def test_addresses_of_commits() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert (
        commits.commit_address("https://github.com/a/b", commit) == f"https://github.com/a/b/commit/{commit}"
    )
    assert (
        commits.commit_address("https://gitlab.com/a/b", commit)
        == f"https://gitlab.com/a/b/-/commit/{commit}"
    )
    assert commits.commit_address("https://github.com/a/b", '"><script>') is None


def test_only_commits_that_a_remote_has_are_linked(tmp_path: Path) -> None:
    work, there = tmp_path / "work", tmp_path / "there.git"
    work.mkdir()
    git(tmp_path, "init", "-q", "--bare", str(there))
    git(work, "init", "-q", "-b", "main")
    git(work, "commit", "-q", "--allow-empty", "-m", "pushed")
    git(work, "remote", "add", "origin", str(there))
    git(work, "push", "-q", "-u", "origin", "main")
    git(work, "commit", "-q", "--allow-empty", "-m", "mine alone")
    pushed, own = git(work, "rev-parse", "HEAD~1", "HEAD").split()
    assert commit_links(work)(pushed) is None  # a folder is no place on the web
    git(work, "remote", "set-url", "origin", "git@github.com:anna/rl.git")
    links = commit_links(work)
    assert links(pushed) == f"https://github.com/anna/rl/commit/{pushed}"
    assert links(own) is None
    assert links("0" * 40) is None
    assert commit_links(tmp_path)(pushed) is None  # no repository


# --- Words that are not to be trusted ---------------------------------------------------------------------


def test_what_comes_from_run_folders_is_text(tmp_path: Path) -> None:
    write_run(tmp_path, config={"note": EVIL, "algo": {"name": EVIL}}, id=EVIL, status=EVIL, error=EVIL)
    write_run(tmp_path, 2, machine={"cpu": EVIL}, git={"ref": EVIL, "base_commit": EVIL, "tree": EVIL})
    (tmp_path / paths.JOURNAL).write_text(
        f"{EVIL}\n\n[x](javascript:alert(1)) ![y](https://example.org/y.png)\n"
    )
    html = reported(tmp_path).html
    assert "owned" in html
    assert not re.search(r"<script>document|<img|href=\"javascript", html)
    assert len(re.findall("<script>", html)) == 1


def test_the_policy_of_the_page_lets_in_its_two_scripts_and_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path)
    html = reported(tmp_path).html
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert found is not None
    policy = found[1].replace("&#39;", "'")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    library = re.search(r'id="plotly">([^<]*)<', html)
    assert script is not None
    assert library is not None
    texts = script[1].encode(), gzip.decompress(base64.b64decode(library[1]))
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts]
    assert f"script-src {' '.join(hashes)};" in policy
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_letters_that_are_none_do_not_break_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, error="\ud800 \x00 \u202e")
    report = reported(tmp_path)
    assert report.html.encode("utf-8")
    assert "\ud800" not in report.html


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (paths.RECORD, "{", "cannot be read"),
        (paths.RECORD, '{"schema": 1, "git": "x"}', "git in record.json is damaged"),
        (paths.RECORD, '{"schema": 1, "started_at": 7}', "started_at in record.json is damaged"),
        (paths.RECORD, '{"schema": 1, "final_metrics": {"eval/return": "x"}}', "a number in record.json"),
        (paths.RECORD, '{"schema": 1, "duration_s": 1' + "0" * 400 + "}", "a number in record.json"),
        (paths.CONFIG, "algo: [", "config.yaml cannot be read"),
        (paths.METRICS, "[]\n", "line 1 of metrics.jsonl is damaged"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    write_run(tmp_path, 1, [1.0, 42.5])
    (write_run(tmp_path, 2, tag="-odd") / name).write_text(content)
    report = reported(tmp_path)
    assert len(report.problems) == 1
    assert said in report.problems[0]
    assert said in text_of(report.html)
    assert "42.5" in text_of(report.html)


def test_strange_but_readable_values_are_shown_as_they_are(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, final_metrics=None, git=None, machine=None, determinism=None, trace=None)
    huge = "1" + "0" * 400
    (run_dir / paths.METRICS).write_text(
        f'{{"env_steps": {huge}, "x": 1}}\n{{"env_steps": 1, "x": {huge}}}\n'
    )
    assert "not recorded" in text_of(reported(tmp_path).html)


def test_nothing_that_can_be_read_is_refused_in_a_line(tmp_path: Path) -> None:
    (write_run(tmp_path) / paths.RECORD).write_text("{")
    with pytest.raises(ConfigError, match="none of 1 run folders can be read"):
        reported(tmp_path)


# --- Films ------------------------------------------------------------------------------------------------


def film(run_dir: Path, steps: int, content: bytes) -> None:
    path = paths.video_path(run_dir, steps)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def test_the_film_of_the_median_seed_is_shown_and_not_of_the_best(tmp_path: Path) -> None:
    for seed, value in ((1, 10.0), (2, 500.0), (3, 20.0)):
        run_dir = write_run(tmp_path, seed, [0.0, value])
        for steps in (900, 1000):
            film(run_dir, steps, f"film {seed} {steps}".encode())
    experiments = experiments_in(tmp_path)
    shown = material.choose_videos(experiments, "last").shown[1]
    assert [(each.run.id, each.env_steps) for each in shown] == [("run-3", 1000)]
    assert base64.b64decode(shown[0].data) == b"film 3 1000"
    assert len(material.choose_videos(experiments, "all").shown[1]) == 6
    assert material.choose_videos(experiments, "none").shown == {}
    assert base64.b64encode(b"film 3 1000").decode() in reported(tmp_path).html


def test_films_that_have_no_room_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path)
    film(run_dir, 5, b"x" * 2_000_000)
    assert material.choose_videos(experiments_in(tmp_path), "last").left_out == []
    with paths.video_path(run_dir, 6).open("wb") as file:
        file.truncate(13_000_000)
    report = reported(tmp_path)
    assert "run-1: step_6.mp4, 13.0 MB, has no room here" in text_of(report.html)
    assert len(report.html) < 5_000_000


# --- Runs that should be equal ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, with a trace."""
    folder = tmp_path_factory.mktemp("trained")
    words = ("env=CartPole", "total_env_steps=2048", "log_every=256", "eval_every=0", "video_every=0")
    done = run_train(fork, folder, *words)
    assert done.returncode == 0, done.stderr
    return folder / "runs"


def another(run_dir: Path, name: str, **changes: Any) -> Path:
    """A copy of a run with another id."""
    copy = run_dir.with_name(name)
    shutil.copytree(run_dir, copy)
    record = json.loads((copy / paths.RECORD).read_text())
    (copy / paths.RECORD).write_text(json.dumps(record | {"id": name} | changes))
    return copy


def test_equal_runs_are_called_equal_and_others_are_compared(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    first = sorted((tmp_path / "ppo-CartPole").iterdir())[0]
    shutil.copytree(first, first.with_name("a-copy"))  # the same run once more says nothing
    assert find_repeats(experiments_in(tmp_path)) == ([], [], 0)
    another(first, "again")
    (equal,), pairs, _ = find_repeats(experiments_in(tmp_path))
    assert len(equal) == 2
    assert pairs == []
    odd = another(first, "odd", trace={"digest": "0" * 32, "iterations": 8})
    lines = (odd / paths.TRACE).read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith('["iteration",1,'))
    row = json.loads(lines[at])
    row[3] = row[3][:-16] + "f" * 16  # the parameters at the end of the second iteration
    lines[at] = json.dumps(row, separators=(",", ":"))
    (odd / paths.TRACE).write_text("\n".join(lines) + "\n")
    (pair,) = find_repeats(experiments_in(tmp_path)).pairs
    assert pair.b.id == "odd"
    assert pair.headline.startswith("diverged in iteration 1 ")
    text = text_of(reported(tmp_path).html)
    assert pair.headline in text
    assert "Identical to the last bit: 2 runs of seed 1" in text


# --- The command --------------------------------------------------------------------------------------------


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [*program(ROOT, "report"), *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_puts_the_page_beside_the_runs_in_one_step(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / "runs", seed)
    (write_run(tmp_path / "runs", 3) / paths.RECORD).write_text("{")
    old, link = tmp_path / "runs" / "report.html", tmp_path / "link"
    old.write_text("old")
    link.hardlink_to(old)
    done = command(tmp_path, "figures=papers")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("written: runs/report.html (")
    assert "figures in papers, each as PNG and SVG" in done.stdout
    assert "run-3" in done.stderr
    assert old.read_text().startswith("<!doctype html>")
    assert link.read_text() == "old"  # replaced, and not written over
    assert (tmp_path / "papers" / "001-ppo-Thing-v0-curve.png").read_bytes().startswith(b"\x89PNG")
    elsewhere = command(tmp_path, "runs=runs/ppo-Thing/run-1", "out=page.html", "videos=none")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert "1 run of" in text_of((tmp_path / "page.html").read_text())


def test_the_command_loads_nothing_heavy() -> None:
    script = (
        "import sys; from rltemplate.__main__ import main; main(['report', 'runs=none/*'])\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {"torch", "hydra", "omegaconf", "matplotlib", "plotly", "scipy", "gymnasium"}.isdisjoint(
        done.stdout.split()
    )
    assert "rltemplate" in done.stdout.split()


@pytest.mark.slow
def test_five_hundred_runs_of_a_million_steps_take_seconds_and_fit_into_a_mail(tmp_path: Path) -> None:
    for i in range(500):
        experiment, seed = divmod(i, 5)
        run_dir = write_run(tmp_path, seed, tag=f"-{experiment}", gamma=0.9 + experiment / 2000)
        rows = []
        for nr in range(500):
            noise = ((i * 7919 + nr * 104_729) % 10_007) / 10_007
            row = {f"loss/{k}": noise * (k + 1) + nr / 77 for k in range(13)}
            if nr % 10 == 9:
                row["eval/return"] = nr + 100 * noise
            rows.append({"env_steps": 2000 * (nr + 1), "wall_time_s": nr, **row})
        (run_dir / paths.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    began = time.process_time()
    report = reported(tmp_path)
    assert time.process_time() - began < 30
    assert len(report.html.encode()) < 20_000_000
    assert len(report.charts) > 1000
