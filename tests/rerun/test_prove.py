"""A proof holds where the level does, is broken by one flipped bit, and says what it did.

Runs are started in a copy of the project whose `rltemplate/train.py` first writes down what reached the
process; after that it is the real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, SHRUNK, program, run_train

from rltemplate.determinism.variables import ROW_GROUPS
from rltemplate.launch import process
from rltemplate.rerun import certificate, prove
from rltemplate.rerun.perturbations import (
    COLD,
    ELSEWHERE,
    GROUPS,
    HASH_SEED,
    LOAD,
    PADDING,
    THREADS,
    UNWATCHED,
    VARIABLES,
    WATCHED,
    plan_runs,
)
from rltemplate.rerun.series import snapshot_text
from rltemplate.run import paths
from rltemplate.run.git.exclusions import SkippedFile
from rltemplate.run.git.snapshot import Snapshot
from rltemplate.types import ConfigError

TINY = [*SHRUNK["ppo"], "total_env_steps=96", "eval_episodes=1"]  # three iterations
FAULT = "RLTEMPLATE_FAULT"
RATIO = "policy/first_ratio_max_error"

# In front of the real process: what the process was given, and whom else its parent has started.
WITNESS = """
import json, os, pathlib, sys, time
job = json.loads(os.environ["RLTEMPLATE_JOB"])
folder = pathlib.Path(job["run_dir"])
children = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
facts = {"environment": dict(os.environ), "cwd": os.getcwd(), "snapshot": job["snapshot"],
         "pids": children.read_text().split() if children.exists() else None}
(folder.parent / f"{folder.name}.facts").write_text(json.dumps(facts))
if os.environ.get("WAIT_IN") == folder.name:
    time.sleep(100)
if "RATIO" in os.environ:
    from rltemplate.run import logger
    as_json, name = logger.strict_json, "policy/first_ratio_max_error"
    wrong = {name: float(os.environ["RATIO"])}
    logger.strict_json = lambda row: as_json({**row, **wrong} if name in row else row)
"""


@pytest.fixture(scope="module")
def project(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("project") / "copy"
    shutil.copytree(fork, copy)
    process = copy / "rltemplate" / "train.py"
    future = "from __future__ import annotations\n"
    docstring, rest = process.read_text().split(future, 1)
    guarded = "if __name__ == '__main__':" + textwrap.indent(WITNESS, "    ")
    process.write_text(f"{docstring}{future}{guarded}{rest}")
    return copy


Prove = Callable[..., dict[str, Any]]


@contextlib.contextmanager
def proving(project: Path, folder: Path) -> Iterator[Prove]:
    """A function that asks and proves as the command does, in `folder`."""

    def run(*words: str, extra: Mapping[str, Mapping[str, str]] | None = None) -> dict[str, Any]:
        question = prove.ask([*TINY, *words])
        return prove.Proof(question, ["prove"], say=lambda line: None, extra=extra).run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "PROJECT", project)
        patch.chdir(folder)
        yield run


@pytest.fixture
def prove_it(project: Path, tmp_path: Path) -> Iterator[Prove]:
    with proving(project, tmp_path) as run:
        yield run


@pytest.fixture(scope="module")
def repeat(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The certificate of a proof that holds."""
    with proving(project, tmp_path_factory.mktemp("repeat")) as run:
        return run("determinism=repeat", "times=3", "trace=step")


@pytest.fixture(scope="module")
def invariant(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The certificate of a proof of the level above."""
    with proving(project, tmp_path_factory.mktemp("invariant")) as run:
        return run("determinism=invariant", "times=2")


def facts_of(run: Mapping[str, Any]) -> dict[str, Any]:
    folder = Path(run["run_dir"])
    facts: dict[str, Any] = json.loads((folder.parent / f"{folder.name}.facts").read_text())
    return facts


def record_of(run: Mapping[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((Path(run["run_dir"]) / paths.RECORD).read_text())
    return record


def config_of(run: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((Path(run["run_dir"]) / paths.CONFIG).read_text())
    return config


def rows_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run["run_dir"]) / paths.METRICS).read_text().splitlines()]


# --- A level that holds ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_proof_that_holds_says_so_with_the_digest_that_all_runs_have(repeat: dict[str, Any]) -> None:
    assert repeat["verdict"] == "holds"
    assert repeat["problems"] == []
    traces = {(Path(run["run_dir"]) / paths.TRACE).read_bytes() for run in repeat["runs"]}
    assert len(traces) == 1
    assert [record_of(run)["trace"]["digest"] for run in repeat["runs"]] == [repeat["runs"][0]["digest"]] * 3
    sentence = (
        "repeat holds for ppo on CartPole-v1: 3 runs, 2 of them disturbed, 3 iterations each, one digest "
    )
    assert repeat["sentence"] == sentence + repeat["runs"][0]["digest"]


@pytest.mark.slow
def test_the_certificate_tells_what_was_asked_run_and_seen(repeat: dict[str, Any]) -> None:
    assert repeat["asked"]["config"]["total_env_steps"] == 96
    assert repeat["asked"]["level"] == "repeat"
    assert repeat["asked"]["shortened_from"] is None
    assert "trace=step" in repeat["asked"]["overrides"]
    for run in repeat["runs"]:
        assert (run["status"], run["exit_status"], run["env_steps"]) == ("finished", 0, 96)
        assert run["seconds"] > 0
        assert run["checks"]["repeats"]["holds"] is True
        assert config_of(run)["video_every"] == 0
    assert repeat["checks"]["repeats"]["holds"] is True
    assert repeat["settings"]["deterministic_algorithms"] is True
    assert repeat["versions"]["torch"] == record_of(repeat["runs"][0])["versions"]["torch"]
    assert repeat["machine"]["cpu_flags"] == record_of(repeat["runs"][0])["machine"]["cpu_flags"]
    assert repeat["git"]["commit"] == record_of(repeat["runs"][0])["git"]["commit"] is not None


@pytest.mark.slow
def test_the_certificate_lies_with_the_proof_and_with_each_run(repeat: dict[str, Any]) -> None:
    for folder in [repeat["folder"], *(run["run_dir"] for run in repeat["runs"])]:
        assert json.loads((Path(folder) / certificate.JSON).read_text()) == repeat
        text = (Path(folder) / certificate.TEXT).read_text()
        assert text.splitlines()[0] == repeat["sentence"]
        assert all(run["name"] in text for run in repeat["runs"])
        assert "hash seed 7" in text
        assert f"torch {repeat['versions']['torch']}" in text
    assert Path(repeat["folder"]).parent.name == prove.FOLDER
    assert Path(repeat["folder"]).parents[1].name == "runs"


@pytest.mark.slow
def test_every_disturbance_reached_its_process(repeat: dict[str, Any]) -> None:
    alone, first, second = repeat["runs"]
    calm, moved, loaded = (facts_of(run) for run in repeat["runs"])
    assert alone["disturbances"] == []
    assert [calm["environment"]["PYTHONHASHSEED"], config_of(alone)["determinism"]["hash_seed"]] == ["0", 0]
    assert [moved["environment"]["PYTHONHASHSEED"], config_of(first)["determinism"]["hash_seed"]] == ["7", 7]
    assert loaded["environment"]["PYTHONHASHSEED"] == "14"
    assert {calm["cwd"], loaded["cwd"]} == {str(Path(repeat["folder"]).parents[2])}
    assert moved["cwd"] not in calm["cwd"]
    assert record_of(first)["working_directory"] == first["working_directory"] == moved["cwd"]
    for name in ("LANG", "LC_ALL", "TZ", "COLUMNS", "PYTHONDONTWRITEBYTECODE"):
        assert moved["environment"].get(name) == first["environment"][name]
        assert moved["environment"].get(name) != calm["environment"].get(name)
    assert len(moved["environment"][PADDING]) > 4096
    for name in ("PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert calm["environment"].get(name) != loaded["environment"][name] == second["environment"][name]
        assert not Path(loaded["environment"][name]).exists(), "left behind"
    if calm["pids"] is not None:
        assert [len(facts["pids"]) for facts in (calm, moved, loaded)] == [1, 1, 2]
        assert not any(alive(pid) for pid in loaded["pids"])
    # The observers: as configured, none, and all.
    assert [len(rows_of(run)) for run in repeat["runs"]] == [1, 1, 3]
    assert [(Path(run["run_dir"]) / paths.CHECKPOINTS).exists() for run in (first, second)] == [False, True]
    assert [(Path(run["run_dir"]) / paths.TENSORBOARD).exists() for run in (first, second)] == [False, True]
    assert ["eval/return" in rows_of(run)[-1] for run in (first, second)] == [False, True]


@pytest.mark.slow
def test_all_runs_have_the_one_snapshot_of_the_code(repeat: dict[str, Any]) -> None:
    runs = [*repeat["runs"], *repeat["inverse"]["runs"]]
    snapshots = {facts_of(run)["snapshot"] for run in runs}
    assert len(snapshots) == 1
    assert json.loads(snapshots.pop())["tree"] is not None
    ids = [record_of(run)["id"] for run in runs]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith(repeat["id"]) for name in ids)


def alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_the_inverse_of_repeat_runs_without_its_switches(repeat: dict[str, Any]) -> None:
    inverse = repeat["inverse"]
    assert [each["what"] for each in inverse["seen"]] == ["check repeats", "traces"]
    for run in inverse["runs"]:
        assert run["status"] == "finished"
        assert config_of(run)["determinism"]["level"] == "fast"
        assert record_of(run)["determinism"]["settings"]["deterministic_algorithms"] is False
        assert record_of(run)["determinism"]["settings"]["torch_num_threads"] == 2
    assert inverse["tells_apart"] == any(each["fails"] for each in inverse["seen"])
    assert ("cannot tell them apart" in inverse["sentence"]) != inverse["tells_apart"]


@pytest.mark.slow
def test_the_check_of_repeat_fails_without_its_switches(repeat: dict[str, Any]) -> None:
    seen = {each["what"]: each for each in repeat["inverse"]["seen"]}
    assert seen["check repeats"]["fails"]
    assert "a gradient of indexing gives different bits" in seen["check repeats"]["seen"]


@pytest.mark.slow
def test_invariant_holds_with_other_threads_and_rows_in_groups(invariant: dict[str, Any]) -> None:
    alone, disturbed = invariant["runs"]
    assert invariant["verdict"] == "holds"
    assert alone["digest"] == disturbed["digest"] is not None
    assert {"2 threads", "rows in groups of 7"} <= set(disturbed["disturbances"])
    assert [record_of(run)["determinism"]["settings"]["torch_num_threads"] for run in (alone, disturbed)] == [
        1,
        2,
    ]
    assert [record_of(run)["determinism"]["settings"]["row_groups"] for run in (alone, disturbed)] == [0, 7]
    assert {name: found["holds"] for name, found in invariant["checks"].items()} == {
        "repeats": True,
        "rows": True,
    }
    # Every iteration was logged in one of the runs, and only what is exactly zero holds.
    assert [row[RATIO] for row in rows_of(disturbed)] == [0.0] * 3
    assert invariant["ratio"] == {"metric": RATIO, "values": 4, "largest": 0.0}


@pytest.mark.slow
def test_without_what_invariant_adds_a_check_fails(invariant: dict[str, Any]) -> None:
    inverse = invariant["inverse"]
    assert inverse["tells_apart"]
    assert "check rows" in [each["what"] for each in inverse["seen"] if each["fails"]]
    for run in inverse["runs"]:
        assert config_of(run)["determinism"]["products"] == "plain"
        assert config_of(run)["determinism"]["level"] == "repeat"
        assert run["status"] == "finished"
    groups = [record_of(run)["determinism"]["settings"]["row_groups"] for run in inverse["runs"]]
    assert groups == [0, 7]


# --- A level that does not -------------------------------------------------------------------------------


def test_one_flipped_bit_in_one_run_breaks_the_proof(prove_it: Prove) -> None:
    found = prove_it("times=2", "trace=step", extra={"run_1": {FAULT: "action@1:3"}})
    assert found["verdict"] == "broken"
    assert found["sentence"].startswith("repeat is broken for ppo on CartPole-v1: run_1 (hash seed 7, ")
    assert "in iteration 1 (environment steps 33 to 64), step 3: action" in found["sentence"]
    at = found["comparison"]["divergence"]
    assert (at["iteration"], at["index"], at["item"]) == (1, 3, "action")
    text = (Path(found["folder"]) / certificate.TEXT).read_text()
    assert text.splitlines()[0] == found["sentence"]
    assert "action  a " in text, "the report of the comparison"
    assert found["inverse"] is None


@pytest.mark.slow
def test_a_ratio_that_is_not_one_breaks_the_level_invariant(prove_it: Prove) -> None:
    found = prove_it("times=2", "determinism=invariant", extra={"run_1": {"RATIO": "6e-8"}})
    assert found["comparison"] is None, "the traces are equal, the ratio alone is wrong"
    assert found["verdict"] == "broken"
    assert found["problems"] == [
        f"run_1 ({', '.join(found['runs'][1]['disturbances'])}): {RATIO} is 6e-08 and must be 0"
    ]
    assert found["ratio"] == {"metric": RATIO, "values": 4, "largest": 6e-8}


@pytest.mark.slow
def test_a_run_that_crashes_is_named_with_its_error(prove_it: Prove) -> None:
    found = prove_it("times=2", extra={"run_1": {FAULT: "nonsense"}})
    assert found["verdict"] == "broken"
    error = f"ConfigError: {FAULT}=nonsense: expected ITEM@ITERATION or ITEM@ITERATION:INDEX"
    assert found["sentence"].startswith("repeat is broken for ppo on CartPole-v1: run_1 (")
    assert found["sentence"].endswith(f"failed: {error}")
    assert [run["status"] for run in found["runs"]] == ["finished", "failed"]
    assert (Path(found["runs"][1]["run_dir"]) / certificate.JSON).exists()


def test_a_run_that_never_came_to_its_record_is_named_with_its_last_words(prove_it: Prove) -> None:
    found = prove_it("times=3", extra={"run_0": {ROW_GROUPS: "many"}})
    assert found["verdict"] == "broken"
    said = f"run_0 (undisturbed) refused: {ROW_GROUPS}=many: expected a number of rows, or 0 for no groups"
    assert found["problems"] == [said]
    assert len(found["runs"]) == 1, "the others have nothing to be compared with"


def test_a_check_that_fails_breaks_the_proof_before_any_run(project: Path, tmp_path: Path) -> None:
    words = [*TINY, "determinism=invariant", "determinism.products=plain", "times=2", "--json"]
    done = command(project, tmp_path, *words)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "broken"
    assert found["runs"] == []
    assert found["checks"]["rows"]["holds"] is False
    # Not stopped at the first: the other check was tried as well.
    assert found["checks"]["repeats"]["holds"] is True
    assert found["sentence"].startswith(
        "invariant is broken for ppo on CartPole-v1: the check rows: determinism: with products=plain"
    )


# --- What is refused -------------------------------------------------------------------------------------


def command(project: Path, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command of the project, run in a folder."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "PYTHON"))}
    return subprocess.run(
        [*program(project, "prove"), *words],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["determinism=fast"], "determinism=fast: promises nothing that could be proved; use invariant"),
        (["times=1"], "times=1: expected a whole number, at least 2"),
        (["times=many"], "times=many: expected a whole number"),
        (["times="], "times=: expected a whole number"),
        (["time=3"], "time=3: no such key; did you mean times=3?"),
        (["seed=1,2"], "seed=1,2: a proof is about one configuration"),
        (["algo.hidden_sizes=[8,8]", "seed=range(3)"], "seed=range(3): a proof is about one configuration"),
        (["--multirun"], "--multirun: no such option"),
        (["run_dir=x"], "run_dir=x: each run of a proof has its own folder; use runs_dir"),
        (["trace=off"], "trace=off: a proof compares traces; use trace=iteration or trace=step"),
        (["sede=3"], "sede=3: no such key; did you mean seed?"),
        (["env=Hoper"], "did you mean Hopper"),
        (["algo=sac", "env=CartPole"], "sac"),
        (["total_env_steps=0"], "total_env_steps=0: must be at least 1"),
    ],
)
def test_what_cannot_be_proved_is_refused_in_a_line_or_two(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        prove.ask(words)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_has_status_2_and_creates_nothing(project: Path, tmp_path: Path) -> None:
    done = command(project, tmp_path, "times=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: times=1: ")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_only_the_process_of_a_run_can_refuse_is_refused_alike(prove_it: Prove) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=r"^device=cuda: torch finds no CUDA device here"):
        prove_it("device=cuda")
    assert list(Path.cwd().iterdir()) == []


def test_training_refuses_in_the_same_words(project: Path, tmp_path: Path) -> None:
    words = ["algo.learning_rat=1"]
    assert command(project, tmp_path, *words).stderr == run_train(project, tmp_path, *words).stderr


# --- What is planned -------------------------------------------------------------------------------------


def kinds(words: list[str]) -> set[str]:
    """The kinds of disturbances that these are."""
    names = (HASH_SEED, ELSEWHERE, VARIABLES, COLD, LOAD, THREADS, GROUPS, UNWATCHED, WATCHED)
    return {name for name in names for word in words if word.startswith(name) or word.endswith(f" {name}")}


@pytest.mark.parametrize("times", [2, 3, 4, 5, 9])
def test_every_disturbance_is_in_some_run_but_the_first(times: int) -> None:
    common = {HASH_SEED, ELSEWHERE, VARIABLES, COLD, LOAD}
    for level, wanted in (("repeat", common), ("invariant", common | {THREADS, GROUPS})):
        question = prove.ask([*TINY, f"determinism={level}"])
        runs = plan_runs(question.config, times, {})
        assert len({run.name for run in runs}) == times
        assert runs[0].disturbances == []
        assert runs[0].changes == {}
        assert all(run.disturbances for run in runs[1:])
        seen = set().union(*(kinds(run.disturbances) for run in runs))
        assert seen - {UNWATCHED} == wanted | {WATCHED}
        assert (UNWATCHED in seen) == (times > 2)
        seeds = [run.changes["determinism.hash_seed"] for run in runs[1:]]
        assert len({0, *seeds}) == times


def test_a_variable_that_is_there_already_gets_another_value() -> None:
    config = prove.ask(TINY).config
    empty = plan_runs(config, 2, {})[1].environment
    assert empty["PYTHONDONTWRITEBYTECODE"] == "1"
    again = plan_runs(config, 2, {name: value for name, value in empty.items() if value is not None})
    for name in ("LANG", "LC_ALL", "TZ", "COLUMNS", "PYTHONDONTWRITEBYTECODE"):
        assert again[1].environment[name] != empty[name]
    # Somebody's own groups of rows would be in all runs.
    assert plan_runs(config, 2, {ROW_GROUPS: "3"})[0].environment == {ROW_GROUPS: None}


def test_runs_are_short_unless_the_user_says_how_long() -> None:
    question = prove.ask(["env=CartPole"])
    assert (question.config.total_env_steps, question.shortened_from) == (10_000, 100_000)
    assert "total_env_steps=10000" in question.overrides
    question = prove.ask(["env=CartPole", "total_env_steps=50000"])
    assert (question.config.total_env_steps, question.shortened_from) == (50_000, None)
    assert prove.ask(["env=CartPole", "debug=fast"]).config.total_env_steps == 2048


def test_runs_are_long_enough_to_learn_something() -> None:
    question = prove.ask(["algo=sac", "env=BipedalWalker"])
    assert question.config.total_env_steps == 20_000
    assert list(question.config.algo.notes(question.config.env.num_envs, 20_000)) == []


def test_a_snapshot_of_many_files_fits_into_a_variable_and_is_one_still() -> None:
    long = [f"{i}-{'x' * 240}" for i in range(200)]
    skipped = [SkippedFile(path=name, bytes=10, reason="large") for name in long]
    snapshot = Snapshot(tree="abc", changed=long, changed_count=900, skipped=skipped, skipped_count=900)
    text = snapshot_text(snapshot)
    assert len(text) < 100_000 < len(snapshot.to_json())
    back = Snapshot.from_json(text)
    assert (back.tree, back.changed_count, back.skipped_count) == ("abc", 900, 900)
    assert back.changed == long[: len(back.changed)] != []
    assert (
        snapshot_text(Snapshot(tree="abc", changed=["a.py"]))
        == Snapshot(tree="abc", changed=["a.py"]).to_json()
    )


# --- Signals, and make -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_run_and_what_was_started_beside_it(
    number: signal.Signals, project: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*program(project, "prove"), *TINY, "times=2"],
        cwd=tmp_path,
        env=os.environ | {"WAIT_IN": "run_1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 120
        while not (found := list(tmp_path.glob("runs/prove/*/run_1.facts"))):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(0.2)  # the file is being written
        pids = json.loads(found[0].read_text())["pids"]
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert "run_0, 1 of 2 (undisturbed): 96 steps" in out
    assert err.splitlines() == [
        f"interrupted, so there is no answer; what was made until then is in {found[0].parent}"
    ]
    if pids is not None:
        assert len(pids) == 2, "the run and the load"
        assert not any(alive(pid) for pid in pids)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_hands_over_overrides_and_the_number_of_runs() -> None:
    words = ["make", "-n", "prove", "algo=sac", "times=3", "json=1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    # Started by another make, make also says which folder it enters and leaves.
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert any(line.endswith("-m rltemplate prove 'algo=sac' 'times=3' --json") for line in lines)
