"""Intervals hold the truth as often as they say, also with few seeds; `make stats` says what runs show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import git, write_run
from scipy import stats as scipy_stats

from runlab.__main__ import main
from runlab.analysis import experiments, stats
from runlab.analysis.commands.stats import compare
from runlab.analysis.experiments import Experiment, find_experiments
from runlab.analysis.runs import load_runs
from runlab.run import paths


@pytest.mark.parametrize("count", [3, 5])
def test_intervals_cover_and_the_percentile_bootstrap_does_not(count: int) -> None:
    rng = np.random.default_rng(0)
    ours = plain = 0
    for i in range(300):
        scores = rng.standard_normal(count)
        measured = stats.interval(list(scores))
        ours += measured.low <= 0 <= measured.high
        drawn, of = np.random.default_rng(i), stats.STATISTICS["iqm"]
        low, high = scipy_stats.bootstrap(
            (scores,), of, n_resamples=500, method="percentile", rng=drawn
        ).confidence_interval
        plain += low <= 0 <= high
    assert 0.92 <= ours / 300 <= 0.98
    assert plain / 300 < 0.925
    assert plain < ours - 8


def test_intervals_of_means_are_students_and_welchs() -> None:
    a, b = [3.0, 5.0, 4.5, 9.0], [1.0, 1.5, 0.0]
    one = scipy_stats.ttest_1samp(a, 0.0).confidence_interval(0.95)
    assert stats.interval(a, "mean")[1:] == pytest.approx(tuple(one))
    two = scipy_stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert stats.interval(a, "mean", minus=b)[1:] == pytest.approx(tuple(two))
    assert stats.interval([4.0, 1.0, 100.0, 2.0, 3.0]).value == 3.0  # one of five goes on each side
    assert stats.interval([1.0, 2.0, 9.0], "median").value == 2.0


@pytest.mark.parametrize("statistic", stats.STATISTICS)
def test_a_difference_is_covered(statistic: str) -> None:
    rng, held = np.random.default_rng(3), 0
    for _ in range(100):
        a, b = list(rng.normal(2.0, 1.0, 5)), list(rng.normal(0.0, 2.0, 6))
        measured = stats.interval(a, statistic, minus=b)
        held += measured.low <= 2.0 <= measured.high
    assert 0.92 < held / 100 < 0.995


@pytest.mark.parametrize("statistic", ["iqm", "median"])
@pytest.mark.parametrize("count", [2, 5, 10, 37])
def test_resamples_are_those_of_scipy(monkeypatch: pytest.MonkeyPatch, statistic: str, count: int) -> None:
    """Bit for bit: intervals stay what they were in older versions."""
    groups = np.random.default_rng(count).normal(1000, 300, (2, count))
    of, drawn = stats.STATISTICS[statistic], list[Any]()

    def seen(scores: Any, **axis: Any) -> Any:
        drawn.append(of(scores, **axis))
        return drawn[-1]

    monkeypatch.setitem(stats.STATISTICS, statistic, seen)
    stats.interval([*groups[0]], statistic, minus=[*groups[1]])
    for number, resampled in enumerate(drawn[2:]):
        rng = np.random.default_rng(number)
        wanted = scipy_stats.bootstrap((groups[number],), of, n_resamples=2000, method="percentile", rng=rng)
        assert np.array_equal(resampled, wanted.bootstrap_distribution)
    assert len(drawn) == 4


def test_no_spread_one_seed_and_no_scores() -> None:
    assert stats.interval([500.0] * 5) == (500.0, 500.0, 500.0)
    assert str(stats.interval([3.0])) == "3 (no interval)"
    for wrong in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="scores"):
            stats.interval(wrong)


@pytest.mark.parametrize("statistic", stats.STATISTICS)
@pytest.mark.parametrize("score", [0.1, 0.95, 9.3, -161.9])
def test_equal_scores_differ_in_nothing_however_many_they_are(statistic: str, score: float) -> None:
    """Sums of ten and of five would be rounded differently, and a difference of 2e-16 would be a verdict."""
    for one, other in itertools.permutations((2, 3, 5, 7, 10), 2):
        assert stats.interval([score] * one, statistic, minus=[score] * other) == (0.0, 0.0, 0.0)
    spread = [1.0, 2.0, 4.0, 7.0, 9.0, 12.0]
    ends = stats.interval(spread, statistic, minus=[score] * 3)
    assert ends.high - ends.value == pytest.approx(
        (plain := stats.interval(spread, statistic, minus=[0.125] * 3)).high - plain.value
    )


def write_group(root: Path, finals: Sequence[float], tag: str = "", **kinds: Any) -> None:
    for seed, final in enumerate(finals, start=1):
        write_run(root, seed, [0.0, final], tag=tag, **kinds)


def found_in(root: Path, by: str | None = None) -> list[Experiment]:
    runs, problems = load_runs(sorted(root.glob("*/*")))
    assert problems == []
    return find_experiments(runs, by)


def test_the_command_says_seeds_intervals_target_and_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hopper: Any = {"env": "Hopper", "config": {"env": {"id": "Hopper-v5"}}}
    write_group(Path("runs"), [2000.0, 2500.0, 2600.0, 2700.0, 3000.0], **hopper)
    write_group(Path("runs"), [3100.0, 3300.0, 3400.0, 3450.0, 3500.0], algo="sac", tag="-s", **hopper)
    write_run(Path("runs"), 9, status="interrupted", **hopper)
    (write_run(Path("runs"), 11, **hopper) / paths.RECORD).write_text("{")
    assert main(["stats"]) == 0
    output = capsys.readouterr()
    for text in (
        "ppo on Hopper: 5 seeds, return after 200 steps",
        "IQM     2,600 (2,",
        "range   2,000 to 3,000",
        "others  random policy 17",
        "sac is better than ppo: IQM higher by 783.3 (",
    ):
        assert text in output.out
    assert output.err.count("left out: ") == 2
    assert "run-9: interrupted" in output.err
    assert main(["stats", "statistic=mean"]) == 0
    assert "sac is better than ppo: mean higher by 790.0 (" in capsys.readouterr().out
    for chosen, first in (("runs/*/*", "ppo against sac"), ("runs/sac-*/*,runs/*/*", "sac against ppo")):
        assert main(["stats", f"runs={chosen}"]) == 0
        assert f"\n{first} on Hopper\n" in capsys.readouterr().out


def test_a_difference_is_told_where_it_is_and_not_where_it_is_luck(tmp_path: Path) -> None:
    scores = {
        "x": [1.0, 2.0, 3.0, 4.0, 5.0],
        "y": [11.0, 12.0, 13.0, 14.0, 15.0],
        "luck": [1.5, 2.5, 3.5, 3.9, 4.0],
        "few": [9.0, 9.1, 9.2],
        "same": [500.0] * 5,
        "once": [500.0] * 29 + [20.0],
        "single": [1.0],
    }
    for name, returns in scores.items():
        write_group(tmp_path, returns, algo=name)
    experiments = {each.name: each for each in found_in(tmp_path)}
    for a, b, verdict in (
        ("x", "y", "  y is better than x: IQM higher by 10 ("),
        ("x", "luck", "  undecided: IQM of x minus IQM of luck is"),
        ("x", "few", "  few looks better than x: "),
        ("single", "x", "  undecided: a single seed has no spread"),
        ("same", "once", "  undecided: IQM of same and once is the same, and single seeds differ"),
        ("same", "same", "  every run of same and same has the same score"),
    ):
        lines = compare(experiments[a], experiments[b])
        assert lines[1].startswith(verdict)
        assert len(lines) == 2
    assert lines[-1].endswith("; 5 against 5 seeds")


def test_runs_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    """Resumed with other code, made with other libraries; evaluations beside training episodes."""
    write_run(tmp_path, 1, versions={"torch": "2.0", "rich": "1"})
    write_run(
        tmp_path, 2, versions={"torch": "1.9", "rich": "2"}, resumed=[{"changed": {"code": [], "cpu": []}}]
    )
    write_run(tmp_path, 1, [], algo="sac", final_metrics={"episode/return": 4.5})
    both, training = found_in(tmp_path)
    assert list(both.cautions())[1:] == [
        "run-2 was resumed with other code than before",
        "the runs have different versions of torch",
    ]
    assert compare(both, training)[2] == (
        "  caution: returns of evaluations are compared with those of training episodes"
    )


def test_single_seeds_are_told_in_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for algo, value in (("x", 1.0), ("y", 2.5)):
        write_run(tmp_path, returns=[0.0, value], algo=algo)
    assert main(["stats", f"runs={tmp_path}/*/*"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "x on Thing: 1 seed, return 1 after 200 steps",
        "",
        "y on Thing: 1 seed, return 2.5 after 200 steps",
        "",
        "x against y on Thing",
        "  undecided: a single seed has no spread; IQM differs by -1.5; 1 against 1 seeds",
        "",
        "caution: with fewer than 5 seeds the spread itself is little more than a guess",
    ]


def test_runs_that_differ_in_the_seed_and_in_observers_are_one_experiment(tmp_path: Path) -> None:
    write_group(tmp_path, [1.0, 2.0])
    write_run(tmp_path, 3, config={"note": "another", "logger": {"console": False}, "trace": "step"})
    write_group(tmp_path, [3.0, 4.0], tag="-b", config={"algo": {"gamma": 0.9}})
    write_run(tmp_path, 1, tag="-c", config={"eval_every": 50})
    assert [(each.name, each.returns) for each in found_in(tmp_path)] == [
        ("ppo", [1.0, 2.0, 1.0]),
        ("ppo gamma=0.9", [3.0, 4.0]),
        ("ppo eval_every=50", [1.0]),
    ]
    assert [each.name for each in found_in(tmp_path, "algo.gamma")][:2] == ["ppo gamma=0.99", "ppo gamma=0.9"]


@pytest.mark.parametrize("by", [None, "env.kwargs.x"])
def test_a_text_that_looks_like_a_number_is_another_value(tmp_path: Path, by: str | None) -> None:
    for seed, (tag, value) in enumerate({"-a": 1, "-b": "1", "-c": True, "-d": "true"}.items()):
        write_run(tmp_path, seed, tag=tag, config={"env": {"kwargs": {"x": value, "y": "a 'b"}}})
    found = found_in(tmp_path, by)
    assert [len(each.runs) for each in found] == [1] * 4
    assert ["x=1" in each.name for each in found[1:3]] == [True, False]


def test_other_code_is_another_experiment_unless_it_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, runs = tmp_path / "project", tmp_path / "runs"
    (project / "runlab").mkdir(parents=True)
    git(project, "init", "-q")
    trees = []
    for seed, file in enumerate(("runlab/a.py", "README.md", "runlab/b.py"), start=1):
        (project / file).write_text("text\n")
        git(project, "add", "-A")
        trees.append(git(project, "write-tree").strip())
        write_run(runs, seed, git={"tree": trees[-1], "base_commit": f"{seed}" * 40, "dirty": False})
    assert len(found_in(runs)) == 3  # unknown code is other code
    monkeypatch.setattr(experiments, "PROJECT", project)
    parts = [(each.by, [run.id for run in each.runs]) for each in found_in(runs)]
    assert parts == [("code 1111111111", ["run-1", "run-2"]), ("code 3333333333", ["run-3"])]
    for seed, digest in ((4, "x"), (5, "y")):  # the same tree, and beside it other files that it lacks
        skipped = [{"path": "runlab/c.py", "bytes": 1, "digest": digest}]
        write_run(runs, seed, git={"tree": trees[-1], "base_commit": "3" * 40, "skipped": skipped})
    names = [each.name for each in found_in(runs)]
    assert len({*names}) == len(names) == 4


@pytest.mark.parametrize(
    ("used", "outside", "expected"),
    [
        (("a.py", "a.py", "a.py"), "111", [["run-1", "run-2", "run-3"]]),
        (("a.py", "a.py", "b.py"), "111", [["run-1", "run-2"], ["run-3"]]),
        (("c.py", "a.py", "a.py"), "111", [["run-1"], ["run-2", "run-3"]]),
        (("a.py", "a.py", "a.py"), "112", [["run-1", "run-2"], ["run-3"]]),
        (("a.py", "a.py", None), "111", [["run-1"], ["run-2"], ["run-3"]]),  # recorded by an earlier version
    ],
)
def test_only_code_that_a_run_used_makes_another_experiment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    used: tuple[str | None, ...],
    outside: str,
    expected: list[list[str]],
) -> None:
    project, runs = tmp_path / "project", tmp_path / "runs"
    project.mkdir()
    git(project, "init", "-q")
    for seed, (name, added) in enumerate(zip(used, ("a.py", "c.py", "b.py"), strict=True), start=1):
        (project / added).write_text("text\n")
        git(project, "add", "-A")
        facts = {"tree": git(project, "write-tree").strip(), "base_commit": "b" * 40, "dirty": True}
        files = name and {"files": [name], "outside": {"pack": outside[seed - 1]}}
        write_run(runs, seed, git=facts, used=files)
    monkeypatch.setattr(experiments, "PROJECT", project)
    parts = found_in(runs)
    assert [[run.id for run in each.runs] for each in parts] == expected
    assert len({each.name for each in parts}) == len(parts)


def test_the_newest_finished_run_of_each_seed_counts(tmp_path: Path) -> None:
    write_group(tmp_path, [1.0, 2.0])
    write_run(tmp_path, 2, [0.0, 5.0], tag="-again", started_at="2026-01-02T00:00:00.000Z")
    write_run(tmp_path, 3, [1e6, 1e6], status="failed")
    (experiment,) = found_in(tmp_path)
    assert experiment.returns == [1.0, 5.0]
    assert experiment.curve == [(100, (0.0, 0.0, 0.0)), (200, stats.interval([1.0, 5.0]))]
    assert list(experiment.left_out()) == ["run-2: its seed was run again, as run-2-again", "run-3: failed"]
    write_run(tmp_path, 4, [], config={"total_env_steps": 200}, final_metrics={"episode/return": 4.5})
    (experiment,) = found_in(tmp_path)
    assert "returns of training episodes" in list(experiment.cautions())[-1]
