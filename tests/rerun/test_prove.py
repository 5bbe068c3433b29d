"""A proof holds where the level does, is broken by one flipped bit, and says what it did.

Runs are started in a copy of the project whose launch/worker.py first writes down what reached the process;
after that it is the real one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import SHRUNK

from runlab.config.schema import Level
from runlab.errors import ConfigError
from runlab.launch import process
from runlab.rerun import prove
from runlab.rerun.certificate import JSON, TEXT, Certificate, RunResult
from runlab.rerun.perturbations import OTHER_VALUES, PADDING, config_to_prove
from runlab.rerun.prove import Args, Proof, main, problems_of, ratio_of
from runlab.run import paths
from runlab.run.record import RunRecord

TINY = [*SHRUNK["ppo"], "total_env_steps=96", "eval_episodes=1"]  # three iterations
FAULT, ONLY_IN = "ATEN_TEST_FAULT", "ONLY_IN"

# In front of the real process: what the process was given, and the threads of its parent. `ONLY_IN` holds
# further variables by the name of a run.
WITNESS = """
import json, os, pathlib
folder = pathlib.Path(json.loads(os.environ["RUNLAB_JOB"])["run_dir"])
facts = {"environment": dict(os.environ), "cwd": os.getcwd(),
         "threads": len(os.listdir(f"/proc/{os.getppid()}/task"))}
(folder.parent / f"{folder.name}.facts").write_text(json.dumps(facts))
os.environ |= json.loads(os.environ.get("ONLY_IN", "{}")).get(folder.name, {})
import flipped_bits
"""

RATIO = "policy/first_ratio_max_error"


@pytest.fixture(scope="module")
def project(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("project") / "copy"
    shutil.copytree(fork, copy)
    train = copy / "runlab" / "launch" / "worker.py"
    future = "from __future__ import annotations\n"
    docstring, rest = train.read_text().split(future, 1)
    guarded = "if __name__ == '__main__':" + textwrap.indent(WITNESS, "    ")
    train.write_text(f"{docstring}{future}{guarded}{rest}")
    return copy


Prove = Callable[..., Certificate]


@pytest.fixture(scope="module")
def prove_it(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prove]:
    """A function that proves as the command does; variables are for one run alone."""
    with pytest.MonkeyPatch.context() as patch:

        def run(*words: str, times: int = 2, **only_in: dict[str, str]) -> Certificate:
            patch.setenv(ONLY_IN, json.dumps(only_in))
            return Proof([*TINY, *words], times).run()

        patch.setattr(process, "PROJECT", project)
        # The process of a proof uses no GPU, and so does not know those of its runs.
        patch.setattr(prove, "machine_facts", lambda: {"cpu": "of the proof", "os": "", "gpus": []})
        patch.chdir(tmp_path_factory.mktemp("proofs"))
        yield run


@pytest.fixture(scope="module")
def repeat(prove_it: Prove) -> Certificate:
    """The certificate of a proof that holds."""
    return prove_it("determinism=repeat", "trace=step", times=3)


@pytest.mark.long
def test_a_proof_that_holds_says_so_and_its_inverse_fails(repeat: Certificate) -> None:
    assert (repeat.verdict, repeat.problems) == ("holds", [])
    assert len({(Path(run.run_dir) / paths.TRACE).read_bytes() for run in repeat.runs}) == 1
    digest = repeat.runs[0].digest
    facts = "3 runs, 2 of them disturbed, 3 iterations each"
    sentence, inverse = repeat.sentence.splitlines()
    assert sentence == f"repeat holds for ppo on CartPole-v1: {facts}, one digest {digest}"
    assert [(run.error, run.digest) for run in repeat.runs] == [(None, digest)] * 3
    assert repeat.checks["repeats"]["holds"] is True
    # The files lie with the proof and with each run.
    for folder in [repeat.folder, *(run.run_dir for run in repeat.runs)]:
        assert json.loads((Path(folder) / JSON).read_text()) == json.loads(repeat.to_json())
        assert (Path(folder) / TEXT).read_text().startswith(repeat.sentence)
    assert str(repeat.inverse["repeats"]).endswith("gives different bits for equal inputs on this machine")
    assert inverse.endswith("(determinism=fast num_threads=2) 1 of 1 checks fail: repeats")


@pytest.mark.long
def test_every_perturbation_reached_its_process(repeat: Certificate) -> None:
    calm, first, second = (json.loads(Path(f"{run.run_dir}.facts").read_text()) for run in repeat.runs)
    assert [run["environment"]["PYTHONHASHSEED"] for run in (calm, first, second)] == ["0", "7", "14"]
    assert len({calm["cwd"], first["cwd"], second["cwd"]}) == 3
    caches = ("PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name in (*OTHER_VALUES, PADDING, *caches):
        assert first["environment"].get(name) != calm["environment"].get(name)
    assert not Path(first["environment"][caches[0]]).exists(), "left behind"
    assert first["threads"] == calm["threads"] + 1, "a busy core"
    # The observers: all, and none.
    for name in (paths.CHECKPOINTS, paths.TENSORBOARD):
        assert [(Path(run.run_dir) / name).exists() for run in repeat.runs[1:]] == [True, False]


@pytest.mark.long
@pytest.mark.parametrize(
    ("level", "checks", "failing"),
    [("invariant", ["repeats", "rows"], "rows"), ("profile", ["golden", "repeats", "rows"], "golden")],
)
def test_a_level_holds_with_other_threads_and_rows_in_groups_and_not_without_its_switches(
    prove_it: Prove, repeat: Certificate, level: str, checks: list[str], failing: str
) -> None:
    proof = prove_it(f"determinism={level}")
    assert proof.verdict == "holds", proof.sentence
    assert {"num_threads=2", "rows in groups of 7"} <= set(proof.runs[1].perturbations)
    for name, values in (("torch_num_threads", [1, 2]), ("row_groups", [0, 7])):
        assert [RunRecord.read(Path(run.run_dir)).determinism.settings[name] for run in proof.runs] == values
    assert {name: each["holds"] for name, each in proof.checks.items()} == dict.fromkeys(checks, True)
    # Rollouts with two rows, updates with eight.
    assert [run.ratio for run in proof.runs] == [0.0, 0.0] != [run.ratio for run in repeat.runs[:2]]
    assert proof.inverse[failing]


@pytest.mark.long
def test_one_flipped_bit_in_one_run_breaks_the_proof(prove_it: Prove) -> None:
    proof = prove_it("trace=step", run_1={FAULT: "action@1:3"})
    assert proof.verdict == "broken"
    assert proof.sentence.startswith("repeat is broken for ppo on CartPole-v1: run_1 (")
    assert "in iteration 1 (environment steps 33 to 64), policy_step 3: action" in proof.sentence
    assert proof.inverse == {}


@pytest.mark.long
def test_a_run_that_fails_decides_nothing_unless_it_was_another_run_before(
    prove_it: Prove, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = prove_it(run_1={"RUNLAB_JOB": "{}"})
    assert proof.verdict == "undecided"
    assert proof.sentence.startswith("repeat is undecided for ppo on CartPole-v1: run_1 (")
    assert (proof.problems, proof.inverse) == ([proof.sentence.partition(": ")[2]], {})
    assert " failed: " in proof.sentence
    first, failed = proof.runs
    lines = (Path(first.run_dir) / paths.TRACE).read_text().splitlines(keepends=True)
    shutil.copytree(first.run_dir, tmp_path / "again")
    again = replace(failed, run_dir=str(tmp_path / "again"))
    for whole in (lines[:-1], lines[:1]):  # up to the last iteration, and before the end of the first
        (tmp_path / "again" / paths.TRACE).write_text("".join(whole))
        assert [*problems_of([first, again], Level.repeat, None)] == []
    digest = re.findall(r"[0-9a-f]{16,}", lines[-1])[0]
    (tmp_path / "again" / paths.TRACE).write_text("".join(lines).replace(digest, digest[::-1]))
    (problem,) = problems_of([first, again], Level.repeat, None)
    assert f"{failed.title} is not run_0: " in problem


def test_a_ratio_that_is_not_one_breaks_the_level_invariant(tmp_path: Path) -> None:
    rows = [{"env_steps": 32, RATIO: 0.0}, {"env_steps": 64, RATIO: 6e-8}, {"env_steps": 96}]
    (tmp_path / paths.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended: dict[str, Any] = {"name": "run_1", "run_dir": "", "perturbations": [], "digest": "", "error": None}
    run = RunResult(**ended, seconds=1.0, iterations=3, ratio=ratio_of(tmp_path, RATIO))
    said = f"run_1 (undisturbed): {RATIO} is 6e-08 and must be 0"
    assert [*problems_of([run], Level.invariant, RATIO), *problems_of([run], Level.repeat, RATIO)] == [said]


# An environment that prints when it is imported and made, and when its process ends, as libraries of C do.
NOISY = """
import atexit, sys
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

print("imported")
if "pytest" not in sys.modules:
    atexit.register(print, "flushed at the end")

class Noisy(CartPoleEnv):
    def __init__(self, **kwargs):
        print("made")
        super().__init__(**kwargs)

gym.register("Noisy-v0", Noisy)
"""


@pytest.mark.long
def test_a_check_that_fails_breaks_the_proof_before_any_run_and_environments_may_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = [*TINY, "env=noisy:Noisy-v0", "env.max_episode_steps=40"]
    words += ["determinism=invariant", "determinism.products=plain"]
    assert main(Args(words=words, times=2, json=True)) == 1
    printed = capsys.readouterr()
    proof = json.loads(printed.out)
    assert "imported\nmade\n" in printed.err
    assert (proof["verdict"], proof["runs"]) == ("broken", [])
    assert {name: each["holds"] for name, each in proof["checks"].items()} == {"repeats": True, "rows": False}
    assert "ppo on noisy:Noisy-v0: the check rows: determinism: with products=plain" in proof["sentence"]


@pytest.mark.long
def test_a_certificate_names_the_gpus_of_its_runs(repeat: Certificate) -> None:
    assert repeat.machine == RunRecord.read(Path(repeat.runs[0].run_dir)).machine
    gpu = replace(repeat, machine=repeat.machine | {"gpus": [{"name": "a GPU"}]})
    assert f"machine   {repeat.machine['cpu']}, a GPU, Linux" in gpu.to_text()


def test_runs_are_short_unless_the_user_says_how_long_and_learn_something() -> None:
    config, overrides = config_to_prove(["env=CartPole"])
    assert (config.total_env_steps, overrides[-1]) == (10_000, "total_env_steps=10000")
    assert config_to_prove(["env=CartPole", "total_env_steps=50000"])[0].total_env_steps == 50_000
    assert config_to_prove(["algo=sac", "env=BipedalWalker"])[0].total_env_steps == 20_000


def test_an_unknown_sink_is_refused_before_the_proof() -> None:
    with pytest.raises(ConfigError, match="no such entry point of sinks"):
        config_to_prove(["logger.sinks.nowhere=true"])


def test_a_configuration_of_another_folder_is_proved(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 9\n")
    proof = Proof(["env=CartPole", f"--config-dir={tmp_path}", "experiment=mine"], 2)
    assert (proof.config.seed, proof._bare.seed) == (9, 9)
