"""Searches with Optuna: interrupted, resumed and pruned."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import optuna.importance
import pytest
from conftest import Start, full_disk, plain, write_run

from runlab.config.cli.preflight import Plan, preflight
from runlab.config.command_args import parse
from runlab.config.loading import to_yaml
from runlab.errors import ConfigError, RunError
from runlab.launch import search, study, trials
from runlab.launch.search import main
from runlab.launch.search_args import Args
from runlab.launch.study import open_database, open_journal
from runlab.launch.subprocesses import Children
from runlab.run import paths
from runlab.run.job import JOB_VARIABLE
from runlab.run.read import raw_config

WORDS = [
    "sweep=ppo-rates",
    "env=CartPole",
    "trials=7",
    "workers=1",
    "total_env_steps=8192",
    "eval_every=256",
    "algo.update_epochs=1",
]
WORDS += ["eval_episodes=1", "video_every=0", "logger=none", "checkpoint_every=256", *plain([])]
BETTER = 1000.0  # than any return of CartPole


@functools.cache
def plan_of(words: tuple[str, ...], jobs: int) -> Plan:
    return preflight(words, jobs)


@pytest.fixture(autouse=True)
def each_end_of_a_range_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not again for each folder: the seven checks of the usual ranges take longer than such a search."""

    def in_a_folder(words: Sequence[str], jobs: int) -> Plan:
        (folder,) = (word for word in words if word.startswith("runs_dir="))
        plan = plan_of(tuple(word for word in words if word != folder), jobs)
        runs_dir = folder.partition("=")[2]
        return replace(plan, configs=[replace(each, runs_dir=runs_dir) for each in plan.configs])

    monkeypatch.setattr(search, "preflight", in_a_folder)


@pytest.mark.long
def test_a_search_goes_on_with_its_runs_and_prunes_the_hopeless(start: Start, tmp_path: Path) -> None:
    first = start("search", *WORDS)
    first.until(lambda: any(tmp_path.glob("runs/*/*/checkpoints/*.json")))
    first.process.send_signal(signal.SIGINT)
    first.end(130)
    assert "interrupted; the same command goes on with the search" in first.said
    (folder,) = tmp_path.glob("runs/sweeps/search-ppo-rates-*")
    (cut,) = tmp_path.glob("runs/ppo-CartPole/*")
    rows = (cut / paths.METRICS).read_text().splitlines()
    going = optuna.load_study(study_name=folder.name, storage=open_journal(folder / "study.journal"))
    space: dict[str, optuna.distributions.BaseDistribution] = {
        "algo.learning_rate": optuna.distributions.FloatDistribution(3e-5, 3e-3, log=True)
    }
    good = optuna.trial.create_trial(
        params={"algo.learning_rate": 1e-3},
        distributions=space,
        value=BETTER,
        intermediate_values=dict.fromkeys(range(2048, 8193, 256), BETTER),
    )
    going.add_trials([good] * 5)  # as many as the pruner waits for
    done = start("search", *WORDS, status=0)
    assert "resumed" in done.said
    assert (cut / paths.METRICS).read_text().splitlines()[: len(rows)] == rows
    record = json.loads((cut / paths.RECORD).read_text())
    assert (record["status"], len(record["resumed"])) == ("interrupted", 1)  # and pruned
    assert "pruned after" in done.said
    trials = search_record(tmp_path / "runs")["trials"]
    pruned = [each for each in trials if each["state"] == "PRUNED"]
    assert (len(pruned), len(trials)) == (2, 7)
    used = {raw_config(run)["algo"]["learning_rate"] for run in cut.parent.iterdir()}
    assert used == {each["params"]["algo.learning_rate"] for each in pruned}
    again = start("search", *WORDS, status=0)
    assert re.search(r"best of 7 trials: return 1,000, of trials [0-9, ]+ and 2 more alike\n", again.said)


@dataclass
class Trials:
    """The runs of trials, which end at once: their returns, and their configurations once they have run."""

    returns: Iterator[float] = field(default_factory=itertools.count)  # each is better than the one before
    configs: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Trials:
    trials = Trials()

    def run(_: Any, __: Any, environment: Mapping[str, str], *___: Any, **____: Any) -> int:
        job = json.loads(environment[JOB_VARIABLE])
        trials.configs.append(job["config"])
        Path(job["run_dir"]).mkdir(parents=True)
        row = {"env_steps": 1, "eval/return": float(next(trials.returns))}
        (Path(job["run_dir"]) / paths.METRICS).write_text(f"{json.dumps(row)}\n")
        return 0

    monkeypatch.setattr(Children, "run", run)
    return trials


def search_in(folder: Path, *words: str) -> int:
    """Search in a folder, one trial after another unless `words` say otherwise; the exit status."""
    given = {word.partition("=")[0] for word in words}
    usual = {"runs_dir": f"{folder}", "sweep": "ppo-rates", "env": "CartPole", "workers": "1"}
    return main(parse([*(f"{key}={usual[key]}" for key in usual if key not in given), *words], Args))


def own_ranges(folder: Path, text: str) -> list[str]:
    """The arguments for a search in the ranges of a file of one's own."""
    (folder / "sweep").mkdir()
    (folder / "sweep" / "mine.yaml").write_text(text)
    return ["sweep=mine", f"--config-dir={folder}"]


def search_record(folder: Path) -> dict[str, Any]:
    """The record of the only search in a folder."""
    (file,) = folder.glob(f"sweeps/*/{paths.SEARCH}")
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def test_how_much_keys_matter_is_computed_at_the_end_and_nothing_is_drawn_twice(
    quick: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importances = Mock(return_value={"x": 1.0})
    monkeypatch.setattr(optuna.importance, "get_param_importances", importances)
    for number in (3, 6):
        assert search_in(tmp_path, f"trials={number}") == 0
    record = search_record(tmp_path)
    assert (importances.call_count, record["importances"]) == (2, {"x": 1.0})
    assert len({str(each["params"]) for each in record["trials"]}) == 6


def test_a_search_keeps_no_file_open_for_a_trial_that_has_ended(quick: Trials, tmp_path: Path) -> None:
    open_files = list[int]()

    def next_return() -> Iterator[float]:
        for number in itertools.count():
            open_files.append(len([*Path("/proc/self/fd").iterdir()]))
            yield number

    quick.returns = next_return()
    assert search_in(tmp_path, "trials=6") == 0
    assert len({*open_files}) == 1
    # A command that read of the trials while they ran, and now finds them unlocked.
    args = parse(["sweep=ppo-rates", "env=CartPole", f"runs_dir={tmp_path}"], Args)
    (folder,) = tmp_path.glob("sweeps/*")
    late = trials.Search(args, search.read_space("ppo-rates", []), folder, [1], 1)
    ended = late._study.trials
    with patch.object(late, "_trials", lambda *_: ended):
        late._take_up()
    assert (len(late._own), late._study.trials) == (6, ended)
    assert len([*Path("/proc/self/fd").iterdir()]) <= open_files[0]


def test_trials_with_other_code_join_no_search_unasked(quick: Trials, tmp_path: Path) -> None:
    assert search_in(tmp_path, "trials=2") == 0
    (run_dir, _) = tmp_path.glob("ppo-CartPole/*")
    # Of no commit that is here.
    write_run(tmp_path / "other", seed=1).joinpath(paths.RECORD).rename(run_dir / paths.RECORD)
    for number in (2, 3):
        with pytest.raises(ConfigError, match=r"(?s)the search began with other code: .* accept=changes"):
            search_in(tmp_path, f"trials={number}")
    assert search_in(tmp_path, "trials=3", "accept=changes") == 0
    assert len(search_record(tmp_path)["trials"]) == 3
    (run_dir / paths.RECORD).write_text("{")
    assert search_in(tmp_path, "trials=4") == 0


def test_equal_trials_are_not_called_best_and_no_key_matters(
    quick: Trials, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick.returns = iter([7.0] * 4 + [9.0] * 2)
    assert search_in(tmp_path, "trials=4") == 0
    out = capsys.readouterr().out
    assert "(best 7, trial 0)" in out  # while it was alone
    assert "(best 7, 4 trials alike)" in out
    assert "all 4 trials have the return 7, so none is best: try more steps" in out
    assert "next: " not in out
    assert search_record(tmp_path)["importances"] == {}
    assert search_in(tmp_path, "trials=6") == 0
    out = capsys.readouterr().out
    assert "best of 6 trials: return 9, of trials 4, 5 alike\nnext: make train" in out
    record = search_record(tmp_path)
    assert len(record["importances"]) == 3
    # Few digits, in the words, the record and the configurations alike.
    for text in (out, str(record["trials"])):
        assert not re.search(r"[0-9.e-]{12,}", re.sub(str(tmp_path), "", text))
    params = [each["params"] for each in record["trials"]]
    drawn = {(each["algo.learning_rate"], each["algo.ent_coef"]) for each in params}
    assert drawn == {(each["algo"]["learning_rate"], each["algo"]["ent_coef"]) for each in quick.configs}


@pytest.mark.parametrize(
    ("value", "rule", "rounded"),
    [
        (0.00031234567, {"low": 3e-5, "high": 3e-3, "log": True}, 0.0003123),
        (0.00299999999, {"low": 3e-5, "high": 0.002999, "log": True}, 0.002999),
        (0.99123456789, {"low": 0.99, "high": 0.9999}, 0.991235),
        (123.456789, {"low": 0, "high": 1000.0}, 123.0),
        (0.0625, {"low": 0.0, "high": 1.0, "step": 0.0625}, 0.0625),
        (0.1 + 0.2, {"low": 0.1, "high": 0.5, "step": 0.1}, 0.3),
        (7.5, {"low": 0, "high": 10, "step": 2.5}, 7.5),
        (64, {"low": 2, "high": 99}, 64),
        (0.123456789, {"choices": [0.123456789]}, 0.123456789),
    ],
)
def test_drawn_numbers_have_the_digits_that_matter(
    value: float, rule: dict[str, Any], rounded: float
) -> None:
    assert trials._rounded(value, study.distribution(rule)) == rounded


def test_a_trial_that_has_saved_nothing_begins_anew(tmp_path: Path) -> None:
    """In another folder: its run cannot be resumed, and shows what it did."""
    for every in (0, 100):
        run_dir = write_run(tmp_path, seed=every, status="interrupted", env="CartPole")
        config = preflight(["env=CartPole", f"checkpoint_every={every}"]).configs[0]
        (run_dir / paths.CONFIG).write_text(to_yaml(config))
        one = object.__new__(trials.Search)
        one._args = parse(["sweep=ppo-rates", "env=CartPole", f"runs_dir={tmp_path}"], Args)
        one._workers = 1
        folder, job = one._find_run(Mock(user_attrs={"run-seed1": run_dir.name}), [], 1)
        assert job is not None
        assert (job.resume, folder == run_dir) == (every > 0, every > 0)


def test_lists_may_be_drawn(quick: Trials, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranges = own_ranges(tmp_path, "algo.hidden_sizes: {choices: [[64, 64], [256, 256]]}")
    assert search_in(tmp_path, *ranges, "trials=4") == 0
    assert re.search(r"'algo\.hidden_sizes=\[(64, 64|256, 256)\]' seed=1,2,3,4,5", capsys.readouterr().out)


def test_a_received_search_writes_through_no_link(quick: Trials, tmp_path: Path) -> None:
    assert search_in(tmp_path, "trials=1") == 0
    (folder,) = tmp_path.glob("sweeps/*")
    outside = tmp_path / "outside"
    for name in ("study.journal.lock", "trial_1-seed1.log"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)
        with pytest.raises(ConfigError, match=f"{name} is a link to {outside}"):
            search_in(tmp_path, "trials=1")
        (folder / name).unlink()


def test_a_disk_that_refuses_the_study_ends_a_search_in_a_line(quick: Trials, tmp_path: Path) -> None:
    for number in (1, 3):  # without a study, and with one
        refused = pytest.raises(RunError, match=r"has stopped: .*too large; the same command goes on")
        with full_disk(700), refused:
            search_in(tmp_path, f"trials={number}")
        assert search_in(tmp_path, f"trials={number}") == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *(
            (f"algo.gamma: {rule}", "sweep=mine: algo.gamma: expected {low: 0.1, high: 0.4}")
            for rule in (
                "0.9",
                "{low: 0.9, high: 0.8}",
                "{low: 0, high: 1, log: true}",
                "{choices: []}",
                "{choices: [{a: 1}]}",
            )
        ),
        *(
            (f"env.kwargs.x: {{low: 0, high: {high}}}", "sweep=mine: env.kwargs.x: expected {low:")
            for high in (".inf", ".nan", "1e308")
        ),
        ("seed: {low: 1, high: 9}", "sweep=mine: seed: all trials of a search have the same"),
        ("run_dir: {choices: [a, b]}", "run_dir=a: is for training and not for a search"),
        ("# nothing yet", "sweep=mine: {file}: expected keys with values"),
        ("algo.gamma: {low: 0.9]", "sweep=mine: {file}, line 1: did not find expected ',' or '}}'"),
        ("algo.gamma: {choices: [0.9, '0.8,0.9']}", "a search draws its own values"),
        *(
            (f"algo.gamma: {{low: 0, high: 1, step: {step}}}", "sweep=mine: algo.gamma: expected {low: 0.1, ")
            for step in ("0", ".inf")
        ),
        ("algo.gama: {low: 0.9, high: 1.0}", "algo.gama=0.9: no such key; did you mean algo.gamma?"),
        ("algo.gamma: {low: 0.9, high: 2.0}", "algo.gamma=2.0: must be at least 0.0 and at most 1.0"),
    ],
)
def test_a_wrong_range_is_refused_also_of_another_folder(text: str, answer: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        search_in(tmp_path, *own_ranges(tmp_path, text))
    file = tmp_path / "sweep" / "mine.yaml"
    assert str(refused.value).startswith(answer.replace("{file}", str(file)).replace("}}", "}"))


def test_numbers_in_scientific_notation_and_null_may_be_drawn(tmp_path: Path) -> None:
    text = "algo.learning_rate: {low: 1e-5, high: 1e-2, log: true}\nalgo.target_kl: {choices: [null, 0.02]}"
    with pytest.raises(ConfigError, match="a search compares the returns"):  # after all words were tried
        search_in(tmp_path, *own_ranges(tmp_path, text), "eval_every=0")
    assert search.read_space("mine", [tmp_path])["algo.learning_rate"]["low"] == 1e-5


def test_whole_ends_of_a_range_of_other_numbers_are_no_range_of_whole_numbers(
    quick: Trials, tmp_path: Path
) -> None:
    text = "algo.ent_coef: {low: 0, high: 1}\nalgo.update_epochs: {low: 1, high: 9}"
    assert search_in(tmp_path, *own_ranges(tmp_path, text), "trials=3") == 0
    drawn = [config["algo"] for config in quick.configs]
    assert all(0 < each["ent_coef"] < 1 for each in drawn)
    assert all(isinstance(each["update_epochs"], int) for each in drawn)


def rows_of(monkeypatch: pytest.MonkeyPatch, *rows: Callable[[int, int], dict[str, float | None]]) -> None:
    """Let runs write these rows, each made from the number of the trial and the seed, until it is enough."""

    def run(_: Any, __: Any, environment: Mapping[str, str], log: Path, **more: Any) -> int:
        trial, seed = map(int, re.findall(r"\d+", log.stem))
        run_dir = Path(json.loads(environment[JOB_VARIABLE])["run_dir"])
        run_dir.mkdir(parents=True)
        for number, row in enumerate(rows):
            with (run_dir / paths.METRICS).open("a") as file:
                file.write(f"{json.dumps({'env_steps': number, **row(trial, seed)})}\n")
            if more["enough"]():
                return 143
        return 0

    monkeypatch.setattr(Children, "run", run)


@pytest.mark.parametrize("workers", [1, 4])
def test_the_value_of_a_trial_is_the_mean_over_its_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    rows_of(monkeypatch, *[lambda trial, seed: {"eval/return": trial + 10.0**seed}] * 2)
    assert search_in(tmp_path, "trials=3", "seed=range(1,4)", "prune=false", f"workers={workers}") == 0
    values = {each["number"]: each["value"] for each in search_record(tmp_path)["trials"]}
    assert values == {0: 370.0, 1: 371.0, 2: 372.0}
    assert len([*tmp_path.glob("ppo-CartPole/*-seed[123]-*")]) == 9


def test_a_trial_is_pruned_by_the_mean_over_its_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of its seeds is better than all trials before."""
    rows_of(monkeypatch, *[lambda trial, seed: {"eval/return": (100.0, -200.0)[seed - 1] * (trial > 4)}] * 3)
    assert search_in(tmp_path, "trials=6", "seed=1,2") == 0
    assert "trial 5: pruned after 0 steps" in capsys.readouterr().out
    assert [each["state"] for each in search_record(tmp_path)["trials"]] == ["COMPLETE"] * 5 + ["PRUNED"]
    lengths = sorted(len(file.read_text().splitlines()) for file in tmp_path.glob("*/*/metrics.jsonl"))
    assert lengths == [1] + [3] * 11


def test_the_objective_is_any_metric_of_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_of(monkeypatch, lambda trial, _: {"loss/value": 1.0 + trial, "eval/return": 7.0}, lambda *_: {})
    for objective, best in (("loss/value", 3), ("-loss/value", 1)):
        assert search_in(tmp_path, "trials=3", f"objective={objective}", "eval_every=0") == 0
        out = capsys.readouterr().out
        assert f"best of 3 trials: loss/value {best}" in out
        assert f", loss/value 3 (best {best}, trial " in out
    with pytest.raises(RunError, match=r"objective=loss/values: no row has it; did you mean loss/value\?"):
        search_in(tmp_path, "trials=3", "objective=loss/values")
    out, err = capsys.readouterr()
    assert "trial 1" not in out
    note = "note: objective=loss/values: no row has it so far; did you mean loss/value? "
    assert err.count("no row has it") == err.count(note) == 1  # while the first trial goes on


def test_a_trial_without_a_number_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_of(monkeypatch, lambda trial, _: {"eval/return": 1.0 if trial else None})
    assert search_in(tmp_path, "trials=2") == 1
    assert "trial 0: failed, its eval/return is not a number" in capsys.readouterr().err


def test_samplers_and_pruners_are_chosen_by_name(quick: Trials, tmp_path: Path) -> None:
    def drawn(folder: str, *words: str) -> list[dict[str, Any]]:
        assert search_in(tmp_path / folder, "trials=2", *words) == 0
        return [each["params"] for each in search_record(tmp_path / folder)["trials"]]

    seeded = drawn("a", "sampler=RandomSampler", "sampler.seed=3")
    assert drawn("b", "sampler=RandomSampler", "sampler.seed=3") == seeded
    assert drawn("c", "sampler=RandomSampler", "sampler.seed=4") != seeded
    assert drawn("d", "sampler=RandomSampler", "pruner=HyperbandPruner", "pruner.max_resource=9") != seeded


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["sampler=TPEsampler"], "sampler=TPEsampler: no such sampler; did you mean TPESampler? allowed: "),
        (["sampler=GridSampler"], "sampler=GridSampler: GridSampler.__init__() missing 1 required"),
        (["sampler=os:system"], "sampler=os:system: no such sampler; "),
        (["sampler.sed=3"], "sampler=TPESampler: TPESampler.__init__() got an unexpected keyword argument"),
        (["sampler.gamma=3"], "sampler=TPESampler: 'int' object is not callable"),
        (["sampler.seed=[1"], "sampler=TPESampler: while parsing"),
        (
            ["sampler=BruteForceSampler"],
            "sampler=BruteForceSampler: a sweep over several values of each key ",
        ),
        (["sampler=CmaEsSampler"], "sampler=CmaEsSampler: runs code that a study holds; "),
        (["pruner=PercentilePruner", "pruner.percentile=200"], "pruner=PercentilePruner: Percentile must be"),
        *(
            ([f"storage={url}"], "storage: expected a URL of SQLAlchemy as in postgresql://USER@HOST/NAME")
            for url in ("here", "postgres://me:PW@host/lab", "mysql://me:PW@host:PW/lab")
        ),
        (["storage=mssql+pyodbc://me:PW@host/lab"], "storage: No module named 'pyodbc'"),
        (
            ["algo.gamma=0.9,0.99", "seed=1,2"],
            "a search draws its own values: leave out lists, except for seeds",
        ),
    ],
)
def test_a_wrong_study_is_refused_before_anything_is_made(
    tmp_path: Path, words: list[str], answer: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        search_in(tmp_path, *words)
    assert str(refused.value).startswith(answer)
    assert "PW" not in str(refused.value)
    assert not any(tmp_path.iterdir())


def test_a_database_that_is_none_of_this_optuna_is_refused(tmp_path: Path) -> None:
    """As one that is damaged or of another version."""
    file = tmp_path / "study.db"

    def refuse(answer: str) -> None:
        with pytest.raises(ConfigError, match=f"storage: cannot be opened: .*{answer}"):
            search_in(tmp_path / "runs", "trials=1", f"storage=sqlite:///{file}")
        assert not (tmp_path / "runs").exists()

    file.write_bytes(b"x" * 4096)
    refuse("file is not a database")
    file.unlink()
    open_database(f"sqlite:///{file}")
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("update alembic_version set version_num = 'v0'")
        database.execute("update version_info set schema_version = 1, library_version = '9.9.9'")
        database.commit()
    refuse("set up by optuna 9.9.9")


def test_a_journal_that_was_cut_in_a_line_goes_on_and_another_file_is_refused(
    quick: Trials, tmp_path: Path
) -> None:
    assert search_in(tmp_path, "trials=1") == 0
    (file,) = tmp_path.glob("sweeps/*/study.journal")
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"op_code":')
    assert search_in(tmp_path, "trials=2") == 0
    assert file.read_bytes().startswith(whole + b'{"op_code":0')
    assert [each["number"] for each in search_record(tmp_path)["trials"]] == [0, 1]
    file.write_text("[]\n")
    with pytest.raises(ConfigError, match=r"study\.journal is no journal of Optuna: "):
        search_in(tmp_path, "trials=2")


def test_a_line_that_another_command_left_is_cut_before_the_next(tmp_path: Path) -> None:
    """As of a full disk, while this command goes on."""
    file = tmp_path / "study.journal"
    mine = optuna.create_study(study_name="x", storage=open_journal(file))
    mine.ask()
    for torn in ("{", f'{{"op_code":5,{" " * 100_000}'):
        with file.open("a") as journal:
            journal.write(torn)
        mine.tell(mine.ask(), 1.0)
    others = optuna.load_study(study_name="x", storage=open_journal(file)).trials
    assert [each.state.name for each in others] == ["RUNNING", "COMPLETE", "COMPLETE"]
    assert [*map(json.loads, file.read_text().splitlines())]
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(("beats", "numbers"), [(0.2, [0]), (1000.0, [1])])
def test_a_long_trial_in_a_database_shows_life_and_a_silent_one_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: float, numbers: list[int]
) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    monkeypatch.setattr(study, "SILENT_S", 2)
    for module in (study, trials):
        monkeypatch.setattr(module, "BEAT_EVERY_S", beats)

    def slow(trial: int, _: int) -> dict[str, float | None]:
        time.sleep(0.5 if trial == 0 else 0)
        return {"eval/return": 1.0}

    def seen(trial: int, _: int) -> dict[str, float | None]:
        """Another command looks while the first trial runs."""
        if trial == 0:
            (name,) = optuna.get_all_study_names(storage)
            database = open_database(storage)
            optuna.storages.fail_stale_trials(optuna.load_study(study_name=name, storage=database))
        return {"eval/return": 1.0}

    rows_of(monkeypatch, *[slow] * 8, seen)
    assert search_in(tmp_path, "trials=1", f"storage={storage}") == 0
    assert [each["number"] for each in search_record(tmp_path)["trials"]] == numbers


@pytest.mark.parametrize(("ends_after", "number"), [(1.0, 0), (15.0, 1)])
def test_a_trial_of_another_folder_is_taken_up_after_silence_alone(
    quick: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_after: float, number: int
) -> None:
    """Also if it never showed life, and not for the lock of a trial that had its number in another study."""
    monkeypatch.setattr(study, "SILENT_S", 3)
    assert search_in(tmp_path, "trials=1") == 0
    (folder,) = tmp_path.glob("sweeps/*")
    storage = f"sqlite:///{tmp_path}/study.db"
    database = open_database(storage)
    other = optuna.create_study(study_name=folder.name, storage=database, direction="maximize")
    trial = other.ask()
    ends = threading.Timer(ends_after, lambda: other.tell(trial, 0.0, skip_if_finished=True))
    monkeypatch.setattr(trials, "say", lambda text: ends.start() if text.startswith("waiting") else None)
    assert search_in(tmp_path, "trials=1", f"storage={storage}") == 0
    ends.cancel()
    assert [each["number"] for each in search_record(tmp_path)["trials"]] == [number]


def test_a_received_study_names_no_folder(quick: Trials, tmp_path: Path) -> None:
    """A name of a run that leads elsewhere is another name, and so there is no such run."""
    outside = write_run(tmp_path / "outside", status="interrupted", env="CartPole")
    assert search_in(tmp_path / "runs", "trials=1") == 0
    (file,) = tmp_path.glob("runs/sweeps/*/study.journal")
    received = optuna.load_study(study_name=file.parent.name, storage=open_journal(file))
    for name in (str(outside), f"../../outside/ppo-CartPole/{outside.name}"):
        received.enqueue_trial(
            received.trials[0].params | {"algo.ent_coef": 0.0}, user_attrs={"run-seed1": name}
        )
    assert search_in(tmp_path / "runs", "trials=3") == 0
    assert len([*tmp_path.glob("runs/ppo-CartPole/*-seed1-*")]) == 3
    assert not (outside / paths.LOCK).exists()


CHOICES = optuna.distributions.CategoricalDistribution(["elsewhere"])
STRANGE: list[dict[str, Any]] = [
    {"params": {"run_dir": "elsewhere"}, "distributions": {"run_dir": CHOICES}},  # an argument of the runs
    {"params": {"algo.ent_coef": "elsewhere"}, "distributions": {"algo.ent_coef": CHOICES}},
    {"system_attrs": {"fixed_params": {"algo.ent_coef": "elsewhere"}}},
    {"system_attrs": {"retry_history": 7}, "state": optuna.trial.TrialState.RUNNING},
    {"intermediate_values": {0: "elsewhere"}},
]


@pytest.mark.parametrize("trial", STRANGE)
def test_a_received_study_with_other_arguments_or_types_is_refused(
    quick: Trials, tmp_path: Path, trial: dict[str, Any]
) -> None:
    assert search_in(tmp_path, "trials=1") == 0
    (file,) = tmp_path.glob("sweeps/*/study.journal")
    received = optuna.load_study(study_name=file.parent.name, storage=open_journal(file))
    received.add_trial(optuna.create_trial(**{"state": optuna.trial.TrialState.WAITING} | trial))
    with pytest.raises(ConfigError, match="has what this search cannot have written"):
        search_in(tmp_path, "trials=2")
    assert len(quick.configs) == 1
    file.write_text(file.read_text().splitlines()[0].replace("[2]", "[1]") + "\n")  # the lowest is best
    with pytest.raises(ConfigError, match="has what this search cannot have written"):
        search_in(tmp_path, "trials=2")


@pytest.mark.parametrize(
    ("words", "at_once"), [([], 4), (["num_threads=2"], 2), (["num_threads=1", "env.num_workers=1"], 2)]
)
def test_trials_at_once_take_no_more_than_the_cores(
    quick: Trials, tmp_path: Path, monkeypatch: Any, capsys: Any, words: list[str], at_once: int
) -> None:
    """A trial takes a core for each thread and each worker of its environments, if it has any."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    ranges = own_ranges(tmp_path, "algo.ent_coef: {choices: [0.0]}")
    place = [f"runs_dir={tmp_path}", "eval_every=1000", "trials=1"]
    main(parse([*ranges, "algo=ppo", "env=Hopper", *place, *words], Args))
    assert f", trials at once: {at_once}\n" in capsys.readouterr().out
