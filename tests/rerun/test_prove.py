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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SHRUNK, alive, program, run_train

from rltemplate.config.schema import Level
from rltemplate.determinism.variables import ROW_GROUPS
from rltemplate.launch import process
from rltemplate.rerun import prove
from rltemplate.rerun.certificate import JSON, RATIO, TEXT, Certificate, RunResult
from rltemplate.rerun.perturbations import (
    COLD,
    ELSEWHERE,
    GROUPS,
    HASH_SEED,
    LOAD,
    OBSERVED,
    PADDING,
    THREADS,
    UNOBSERVED,
    VARIABLES,
    plan_runs,
)
from rltemplate.rerun.proof_config import parse
from rltemplate.run import paths
from rltemplate.run.record import RunRecord
from rltemplate.types import ConfigError

TINY = [*SHRUNK["ppo"], "total_env_steps=96", "eval_episodes=1"]  # three iterations
FAULT, ONLY_IN = "ATEN_TEST_FAULT", "ONLY_IN"

# In front of the real process: what the process was given, and the processes beside it. `ONLY_IN` holds
# further variables by the name of a run.
WITNESS = """
import json, os, pathlib, sys, time
job = json.loads(os.environ["RLTEMPLATE_JOB"])
folder = pathlib.Path(job["run_dir"])
children = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
facts = {"environment": dict(os.environ), "cwd": os.getcwd(), "snapshot": job["snapshot"],
         "pids": children.read_text().split() if children.exists() else None}
(folder.parent / f"{folder.name}.facts").write_text(json.dumps(facts))
os.environ |= json.loads(os.environ.get("ONLY_IN", "{}")).get(folder.name, {})
if "WAIT" in os.environ:
    time.sleep(100)
if "ATEN_TEST_FAULT" in os.environ:
    import flipped_bits
"""


@pytest.fixture(scope="module")
def project(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("project") / "copy"
    shutil.copytree(fork, copy)
    train = copy / "rltemplate" / "train.py"
    future = "from __future__ import annotations\n"
    docstring, rest = train.read_text().split(future, 1)
    guarded = "if __name__ == '__main__':" + textwrap.indent(WITNESS, "    ")
    train.write_text(f"{docstring}{future}{guarded}{rest}")
    return copy


Prove = Callable[..., Certificate]


@contextlib.contextmanager
def proving(project: Path, folder: Path) -> Iterator[Prove]:
    """A function that proves as the command does, in `folder`; variables are for one run alone."""
    with pytest.MonkeyPatch.context() as patch:

        def run(*words: str, **only_in: dict[str, str]) -> Certificate:
            patch.setenv(ONLY_IN, json.dumps(only_in))
            return prove.Proof(parse([*TINY, *words]), ["prove"], say=lambda line: None).run()

        patch.setattr(process, "PROJECT", project)
        patch.chdir(folder)
        yield run


@pytest.fixture
def prove_it(project: Path, tmp_path: Path) -> Iterator[Prove]:
    with proving(project, tmp_path) as run:
        yield run


@pytest.fixture(scope="module")
def repeat(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """The certificate of a proof that holds."""
    with proving(project, tmp_path_factory.mktemp("repeat")) as run:
        return run("determinism=repeat", "times=3", "trace=step")


def facts_of(run: RunResult) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(f"{run.run_dir}.facts").read_text())
    return facts


def record_of(run: RunResult) -> RunRecord:
    return RunRecord.read(Path(run.run_dir))


def config_of(run: RunResult) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((Path(run.run_dir) / paths.CONFIG).read_text())
    return config


def rows_of(run: RunResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.run_dir) / paths.METRICS).read_text().splitlines()]


# --- A level that holds ----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_proof_that_holds_says_so_with_the_digest_that_all_runs_have(repeat: Certificate) -> None:
    assert (repeat.verdict, repeat.problems) == ("holds", [])
    assert len({(Path(run.run_dir) / paths.TRACE).read_bytes() for run in repeat.runs}) == 1
    digest = repeat.runs[0].digest
    facts = "3 runs, 2 of them disturbed, 3 iterations each"
    assert repeat.sentence == f"repeat holds for ppo on CartPole-v1: {facts}, one digest {digest}"
    assert (repeat.asked["config"]["total_env_steps"], repeat.asked["shortened_from"]) == (96, None)
    for run in repeat.runs:
        assert (run.status, run.exit_status, run.env_steps, run.digest) == ("finished", 0, 96, digest)
        assert run.checks["repeats"]["holds"] is True
    assert repeat.checks["repeats"]["holds"] is True
    assert repeat.settings["deterministic_algorithms"] is True
    assert repeat.git.commit is not None
    # The files lie with the proof and with each run.
    assert Path(repeat.folder).parent == Path(repeat.folder).parents[1] / prove.FOLDER
    for folder in [repeat.folder, *(run.run_dir for run in repeat.runs)]:
        assert json.loads((Path(folder) / JSON).read_text()) == json.loads(repeat.to_json())
        text = (Path(folder) / TEXT).read_text()
        assert text.splitlines()[0] == repeat.sentence
        assert all(run.name in text for run in repeat.runs)
        assert f"torch {repeat.versions['torch']}" in text
        assert "hash seed 7" in text


@pytest.mark.long
def test_every_perturbation_reached_its_process(repeat: Certificate) -> None:
    alone, first, second = repeat.runs
    calm, moved, loaded = (facts_of(run) for run in repeat.runs)
    assert alone.perturbations == []
    seeds = [facts["environment"]["PYTHONHASHSEED"] for facts in (calm, moved, loaded)]
    assert seeds == ["0", "7", "14"]
    assert {calm["cwd"], loaded["cwd"]} == {str(Path(repeat.folder).parents[2])}
    assert record_of(first).working_directory == first.working_directory == moved["cwd"] != calm["cwd"]
    for name in ("LANG", "LC_ALL", "TZ", "COLUMNS", "PYTHONDONTWRITEBYTECODE"):
        assert moved["environment"].get(name) == first.environment[name]
        assert moved["environment"].get(name) != calm["environment"].get(name)
    assert len(moved["environment"][PADDING]) > 4096
    for name in ("PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert calm["environment"].get(name) != loaded["environment"][name] == second.environment[name]
        assert not Path(loaded["environment"][name]).exists(), "left behind"
    if calm["pids"] is not None:
        others = {*calm["pids"]} & {*moved["pids"]}  # children of the test's own process
        assert [len({*facts["pids"]} - others) for facts in (calm, moved, loaded)] == [1, 1, 2]
        assert not any(alive(pid) for pid in {*loaded["pids"]} - others)
    # The observers: as configured, none, and all.
    assert [len(rows_of(run)) for run in repeat.runs] == [1, 1, 3]
    for name in (paths.CHECKPOINTS, paths.TENSORBOARD):
        assert [(Path(run.run_dir) / name).exists() for run in (first, second)] == [False, True]
    # One snapshot of the code, and an id for each run.
    assert repeat.inverse is not None
    runs = [*repeat.runs, *repeat.inverse.runs]
    snapshots = {facts_of(run)["snapshot"] for run in runs}
    assert [json.loads(text)["tree"] is None for text in snapshots] == [False]
    ids = {record_of(run).id for run in runs}
    assert len(ids) == len(runs)
    assert all(name.startswith(repeat.id) for name in ids)


@pytest.mark.long
def test_the_inverse_of_repeat_runs_without_its_switches_and_its_check_fails(repeat: Certificate) -> None:
    assert repeat.inverse is not None
    for run in repeat.inverse.runs:
        assert (run.status, config_of(run)["determinism"]["level"]) == ("finished", "fast")
        assert (run.settings["deterministic_algorithms"], run.settings["torch_num_threads"]) == (False, 2)
    check, traces = repeat.inverse.seen
    assert (check["what"], traces["what"]) == ("check repeats", "traces")
    assert check["fails"]
    assert "a gradient of indexing gives different bits" in check["seen"]
    assert repeat.inverse.tells_apart
    assert "cannot tell them apart" not in repeat.inverse.sentence


@pytest.mark.long
def test_invariant_holds_with_other_threads_and_rows_in_groups_and_not_without(prove_it: Prove) -> None:
    found = prove_it("determinism=invariant", "times=2")
    alone, perturbed = found.runs
    assert found.verdict == "holds"
    assert alone.digest == perturbed.digest is not None
    assert {"2 threads", "rows in groups of 7"} <= set(perturbed.perturbations)
    assert [run.settings["torch_num_threads"] for run in found.runs] == [1, 2]
    assert [run.settings["row_groups"] for run in found.runs] == [0, 7]
    assert {name: each["holds"] for name, each in found.checks.items()} == {"repeats": True, "rows": True}
    # Every iteration was logged in one of the runs, and only an error of exactly zero holds.
    assert [row[RATIO] for row in rows_of(perturbed)] == [0.0] * 3
    assert found.ratio == {"metric": RATIO, "values": 4, "largest": 0.0}
    assert found.inverse is not None
    assert "check rows" in [each["what"] for each in found.inverse.seen if each["fails"]]
    for run in found.inverse.runs:
        level = config_of(run)["determinism"]
        assert (level["products"], level["level"], run.status) == ("plain", "repeat", "finished")
    assert [run.settings["row_groups"] for run in found.inverse.runs] == [0, 7]


@pytest.mark.long
def test_a_profile_holds_and_not_without_its_switches(prove_it: Prove) -> None:
    found = prove_it("determinism=profile", "times=2")
    assert found.verdict == "holds", found.sentence
    assert found.inverse is not None
    assert found.inverse.runs == []
    assert "check golden" in [each["what"] for each in found.inverse.seen if each["fails"]]


# --- A level that does not -------------------------------------------------------------------------------


@pytest.mark.long
def test_one_flipped_bit_in_one_run_breaks_the_proof(prove_it: Prove) -> None:
    found = prove_it("times=2", "trace=step", run_1={FAULT: "action@1:3"})
    assert found.verdict == "broken"
    assert found.sentence.startswith("repeat is broken for ppo on CartPole-v1: run_1 (hash seed 7, ")
    assert "in iteration 1 (environment steps 33 to 64), step 3: action" in found.sentence
    assert found.comparison is not None
    at = found.comparison.divergence
    assert at is not None
    assert (at.iteration, at.index, at.item) == (1, 3, "action")
    text = (Path(found.folder) / TEXT).read_text()
    assert text.splitlines()[0] == found.sentence
    assert "action  a " in text, "the report of the comparison"
    assert found.inverse is None


def test_a_ratio_that_is_not_one_breaks_the_level_invariant(tmp_path: Path) -> None:
    run_dir = tmp_path / "run_1"
    run_dir.mkdir()
    rows = [{"env_steps": 32, RATIO: 0.0}, {"env_steps": 64, RATIO: 6e-8}, {"env_steps": 96}]
    (run_dir / paths.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    RunRecord(id="run_1", status="finished").write(run_dir)
    run = prove._result("run_1", run_dir, 0, tmp_path / "log")
    said = f"run_1 (undisturbed): {RATIO} is 6e-08 and must be 0"
    assert list(prove._problems(run, Level.invariant)) == [said]
    assert list(prove._problems(run, Level.repeat)) == []


@pytest.mark.long
def test_a_run_that_fails_or_is_refused_is_named_with_its_error(prove_it: Prove) -> None:
    found = prove_it("times=2", run_1={FAULT: "nonsense"})
    assert found.verdict == "broken"
    assert found.sentence.startswith("repeat is broken for ppo on CartPole-v1: run_1 (")
    assert f"{FAULT}=nonsense: expected ITEM@ITERATION" in found.sentence
    assert [run.status for run in found.runs] == ["finished", "failed"]
    assert (Path(found.runs[1].run_dir) / JSON).exists()
    found = prove_it("times=3", run_0={ROW_GROUPS: "many"})
    said = f"run_0 (undisturbed) refused: {ROW_GROUPS}=many: expected a number of rows, or 0 for no groups"
    assert found.problems == [said]
    assert len(found.runs) == 1, "the others cannot be compared with it"


@pytest.mark.long
def test_a_check_that_fails_breaks_the_proof_before_any_run(project: Path, tmp_path: Path) -> None:
    words = [*TINY, "determinism=invariant", "determinism.products=plain", "times=2", "--json"]
    done = command(project, tmp_path, *words)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["runs"]) == ("broken", [])
    # Not stopped at the first: the other check was tried as well.
    assert {name: each["holds"] for name, each in found["checks"].items()} == {"repeats": True, "rows": False}
    assert "ppo on CartPole-v1: the check rows: determinism: with products=plain" in found["sentence"]


# --- What is refused -------------------------------------------------------------------------------------


def command(project: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`prove` of the project, in a folder."""
    line = [*program(project, "prove"), *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["determinism=fast"], "determinism=fast: promises nothing that could be proved; use invariant"),
        (["times=1"], "times=1: expected a whole number, at least 2"),
        (["times=many"], "times=many: expected a whole number"),
        (["time=3"], "time=3: no such key; did you mean times=3?"),
        (["algo.hidden_sizes=[8,8]", "seed=range(3)"], "seed=range(3): a proof is about one configuration"),
        (["--multirun"], "--multirun: no such option"),
        (["run_dir=x"], "run_dir=x: each run of a proof has its own folder; use runs_dir"),
        (["trace=off"], "trace=off: a proof compares traces; use trace=iteration or trace=step"),
        (["sede=3"], "sede=3: no such key; did you mean seed?"),
        (["algo=sac", "env=CartPole"], "sac"),
    ],
)
def test_what_cannot_be_proved_is_refused_in_a_line_or_two(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_what_only_a_process_can_refuse_is_refused_alike(fork: Path, tmp_path: Path) -> None:
    import torch

    words = ["algo.learning_rat=1"] if torch.cuda.is_available() else ["device=cuda"]
    done = command(fork, tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == run_train(fork, tmp_path, *words).stderr
    assert list(tmp_path.iterdir()) == []


# --- The plan --------------------------------------------------------------------------------------------


def kinds(words: list[str]) -> set[str]:
    names = (HASH_SEED, ELSEWHERE, VARIABLES, COLD, LOAD, THREADS, GROUPS, UNOBSERVED, OBSERVED)
    return {name for name in names for word in words if word.startswith(name) or word.endswith(f" {name}")}


@pytest.mark.parametrize("times", [2, 3, 5])
def test_every_perturbation_is_in_some_run_but_the_first(times: int) -> None:
    common = {HASH_SEED, ELSEWHERE, VARIABLES, COLD, LOAD, OBSERVED}
    for level, wanted in (("repeat", common), ("invariant", common | {THREADS, GROUPS})):
        runs = plan_runs(parse([*TINY, f"determinism={level}"]).config, times, {})
        assert len({run.name for run in runs}) == times
        assert (runs[0].perturbations, runs[0].changes) == ([], {})
        seen = set().union(*(kinds(run.perturbations) for run in runs))
        assert seen - {UNOBSERVED} == wanted
        assert (UNOBSERVED in seen) == (times > 2)
        seeds = [run.changes["determinism.hash_seed"] for run in runs[1:]]
        assert len({0, *seeds}) == times


def test_a_variable_that_is_there_already_gets_another_value() -> None:
    config = parse(TINY).config
    empty = plan_runs(config, 2, {})[1].environment
    again = plan_runs(config, 2, {name: value for name, value in empty.items() if value is not None})
    for name in ("LANG", "LC_ALL", "TZ", "COLUMNS", "PYTHONDONTWRITEBYTECODE"):
        assert again[1].environment[name] != empty[name]
    # Somebody's own groups of rows would be in all runs.
    assert plan_runs(config, 2, {ROW_GROUPS: "3"})[0].environment == {ROW_GROUPS: None}


def test_runs_are_short_unless_the_user_says_how_long_and_learn_something() -> None:
    asked = parse(["env=CartPole"])
    assert (asked.config.total_env_steps, asked.shortened_from, asked.times) == (10_000, 100_000, 5)
    assert "total_env_steps=10000" in asked.overrides
    asked = parse(["env=CartPole", "total_env_steps=50000"])
    assert (asked.config.total_env_steps, asked.shortened_from) == (50_000, None)
    asked = parse(["algo=sac", "env=BipedalWalker"])
    assert asked.config.total_env_steps == 20_000
    assert list(asked.config.algo.notes(asked.config.env.num_envs, 20_000)) == []


# --- Signals ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_signal_ends_the_run_and_what_was_started_beside_it(project: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*program(project, "prove"), *TINY, "times=2"],
        cwd=tmp_path,
        env=os.environ | {ONLY_IN: json.dumps({"run_1": {"WAIT": ""}})},
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
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, err
    assert "run_0, 1 of 2 (undisturbed): 96 steps" in out
    assert err.startswith("interrupted")
    assert f"what was made until then is in {found[0].parent}" in err
    if pids is not None:
        assert len(pids) == 2, "the run and the load"
        assert not any(alive(pid) for pid in pids)
