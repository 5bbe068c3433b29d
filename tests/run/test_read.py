"""Runs are found by the words that users give."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import write_run

from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.read import find_parts, find_run, find_run_dirs, read_metrics


def test_runs_are_found_by_the_words_of_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"b=last: no run under .* has a readable record"):
        find_run("last", tmp_path, "b")
    write_run(tmp_path, 1, [5.0], status="failed")
    best = write_run(tmp_path, 2, [3.0])
    last = write_run(tmp_path, 3, [1.0], env="Other")
    for text in (str(last), "run-3", "-3", "refs/runs/run-3", "last"):
        assert find_run(text, tmp_path) == last
    for text, problem in {"run-": "in the ids of 3 runs", "c": "no such run"}.items():
        with pytest.raises(ConfigError, match=problem):
            find_run(text, tmp_path)
    assert capsys.readouterr().err == ""
    assert find_run("best", tmp_path, "a") == best
    among = "the highest final return of 2 finished runs (ppo-Other, ppo-Thing)"
    assert capsys.readouterr().err == f"note: best is run-2 with 3, {among}\n"
    other = write_run(tmp_path / "[1]", 4)
    assert find_run_dirs(f"{tmp_path}/[[]1]/*/*") == find_run_dirs(f"{tmp_path}/[1]/*/*") == [other]
    assert find_run_dirs(f"{tmp_path}/ppo-Thing/run-[12]") == [tmp_path / "ppo-Thing" / "run-1", best]
    comma = write_run(tmp_path / "a, b", 5)
    assert find_run_dirs(f"{tmp_path}/a, b/*/*") == [comma]
    assert find_parts(f"{last},{last},{best}") == [[last], [last], [best]]


def test_metrics_are_read_up_to_a_torn_line_and_damage_is_named(tmp_path: Path) -> None:
    rows = b'{"env_steps": 1, "a": null}\n{"env_steps": 2}\n'
    assert read_metrics(tmp_path) == []  # a run that failed early, or a video before the first row
    (tmp_path / paths.METRICS).write_bytes(rows + b'{"env_st')
    assert repr(read_metrics(tmp_path)) == "[{'env_steps': 1, 'a': nan}, {'env_steps': 2}]"
    for damaged in (b"\xff\n", b'{"a": 1}\n', b'{"env_steps": "1"}\n'):
        (tmp_path / paths.METRICS).write_bytes(damaged + rows)
        with pytest.raises(ConfigError, match="line 1 is damaged"):
            read_metrics(tmp_path)
