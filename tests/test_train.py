"""Whole runs through the command: what is written, that observers change nothing, how runs end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    ON_LEARNING,
    RECORDED,
    Configure,
    RecordedRun,
    build,
    differences,
    git,
    job_in,
    newest_state,
    record,
    rows,
    small,
)
from gymnasium.envs.classic_control import CartPoleEnv
from wandb.sdk.lib.exit_hooks import ExitHooks

from rltemplate.algos.ppo import PPO
from runlab.__main__ import main as command
from runlab.config.loading import complete
from runlab.config.project import ALGORITHMS
from runlab.determinism import computations
from runlab.determinism.programs import CACHE_DIR, NoCompilerError, cache_folder
from runlab.determinism.switches import resolve_device
from runlab.engine import CompilerError
from runlab.envs.codec import FlatCodec
from runlab.errors import ConfigError, RunError
from runlab.interfaces import IterationResult
from runlab.launch.worker import main, run
from runlab.run import paths
from runlab.run.checkpoint import Checkpoints, load_checkpoint
from runlab.run.evaluation import evaluate
from runlab.run.files import to_stderr
from runlab.run.git import snapshot
from runlab.run.git.snapshot import GitRecord
from runlab.run.job import JOB_VARIABLE
from runlab.run.manifest import list_checkpoints
from runlab.run.read import raw_config
from runlab.run.record import RunRecord
from runlab.run.trace import digest, entries
from runlab.signals import Stop
from runlab.trial import WrongProgramError, try_programs

SHORT = {algo: small(algo, "env.max_episode_steps=40", "total_env_steps=256") for algo in ALGORITHMS}
OBSERVED = ["logger=wandb", "log_every=32", "eval_every=64", "eval_episodes=2"]
OBSERVED += ["video_every=128", "checkpoint_every=64"]
UNOBSERVED = ["logger=none", "log_every=0", "eval_every=0", "video_every=0", "checkpoint_every=100000"]
STEP = "gymnasium.envs.classic_control.CartPoleEnv.step"
EVERYWHERE = {"episode/return", "episode/length", "eval/return", "eval/length"}


def keep_exit_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back after a test what W&B replaces."""
    for name in ("exit", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))


def learned(run_dir: Path, number: int = -1) -> list[str]:
    """Names and digests of all that a checkpoint holds, but of where the observers stand."""
    state = load_checkpoint(list_checkpoints(run_dir)[number]).state
    del state["run"]
    return [name + digest(value) for name, value in entries(state, "")]


def test_the_record_names_the_device_that_auto_chose(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine a resume would go on with another one."""
    keep_exit_hooks(monkeypatch)
    assert run(job_in(tmp_path / "run", configure, "device=auto", "eval_every=0")) == 0
    assert raw_config(tmp_path / "run")["device"] == resolve_device("auto").type


@pytest.mark.parametrize(
    "algo", ["ppo", *(pytest.param(name, marks=pytest.mark.long) for name in SHORT if name != "ppo")]
)
def test_observers_change_no_bit_of_training(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str
) -> None:
    """Everything on against everything off; an earlier checkpoint shows that the comparison can fail."""
    keep_exit_hooks(monkeypatch)
    observed, alone = tmp_path / "on", tmp_path / "off"
    for run_dir, words in {observed: OBSERVED, alone: UNOBSERVED}.items():
        config = configure(*SHORT[algo], "determinism=fast", *words)
        assert run(replace(job_in(run_dir, configure), config=config)) == 0
    assert learned(observed) == learned(alone) != learned(observed, -2)
    assert (observed / paths.TRACE).read_text() == (alone / paths.TRACE).read_text()
    assert len(list((observed / paths.VIDEOS).glob("step_*.mp4"))) == 2
    assert list((observed / paths.TENSORBOARD).glob("events*"))
    assert list((observed / paths.WANDB).glob("offline-run-*/*.wandb"))
    assert set().union(*rows(observed)) >= EVERYWHERE
    assert algo not in ON_LEARNING or "optim/learning_rate" in rows(observed)[-1]
    assert '"time/steps_per_second"' in (observed / paths.METRICS).read_text()
    assert rows(observed)[-1]["env_steps"] == rows(alone)[-1]["env_steps"]


def test_a_run_folder_holds_what_it_promises(recorded_run: RecordedRun) -> None:
    project, run_dir = recorded_run
    assert run_dir.parent.name == "ppo-CartPole"
    config = complete(raw_config(run_dir))[0]
    assert (config.total_env_steps, config.recipe, config.env.id) == (192, "ppo-CartPole", "CartPole-v1")

    ended = record(run_dir)
    assert (ended["id"], ended["status"]) == (run_dir.name, "finished")
    assert ended["command_line"] == ["python", "-m", "runlab", "train", *RECORDED]
    assert ended["determinism"]["settings"]["deterministic_algorithms"] is True
    assert ended["determinism"]["checks"]["repeats"]["holds"] is True
    assert ended["final_metrics"]["eval/return"] == rows(run_dir)[-1]["eval/return"]
    assert ended["started_at"] < ended["ended_at"]

    # How it ended lies on top of what was started, and that on top of the user's commit.
    ref = ended["git"]["ref"]
    assert ref == f"refs/runs/{run_dir.name}"
    started, before, head = git(project, "rev-parse", f"{ref}^", f"{ref}~2", "HEAD").split()
    assert (started, before) == (ended["git"]["commit"], head)
    assert git(project, "status", "--porcelain") == ""
    outcome = json.loads(git(project, "show", f"{ref}:.runlab/run/outcome.json"))
    last_line = (run_dir / paths.TRACE).read_text().splitlines()[-1]
    assert (outcome["status"], outcome["git"]) == ("finished", ended["git"])
    assert outcome["trace"] == ended["trace"] == {"digest": json.loads(last_line)[-1], "iterations": 6}
    for name in (paths.CONFIG, paths.TRACE, paths.METRICS):
        assert git(project, "show", f"{ref}:.runlab/run/{name}") == (run_dir / name).read_text()

    steps = [row["env_steps"] for row in rows(run_dir)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 192


def test_a_saved_run_is_evaluated_on_separate_episodes(
    recorded_run: RecordedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = recorded_run.run_dir
    monkeypatch.chdir(finished.parents[2])

    def evaluate(*words: str) -> Any:
        assert command(["evaluate", *words, "episodes=5", "json=true"]) == 0
        return json.loads(capsys.readouterr().out)

    first = evaluate(f"run={finished}")
    assert evaluate(f"run={finished.name[-6:]}") == first
    other = evaluate(f"run={finished}", "seed=1")
    assert len(other["returns"]) == 5
    assert other["returns"] != first["returns"]


@pytest.mark.parametrize("end", [lambda: sys.exit(0), lambda: os._exit(0)], ids=["sys.exit", "os._exit"])
def test_a_run_that_was_ended_by_its_environment_is_no_success(
    end: Callable[[], None],
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(STEP, lambda *_: end())
    keep_exit_hooks(monkeypatch)
    ExitHooks().hook()  # as in a run that W&B logs
    monkeypatch.setenv(JOB_VARIABLE, job_in(tmp_path / "run", configure, "eval_every=0").to_json())
    assert main() == 1
    output = capfd.readouterr().err.splitlines()[-1].removeprefix("error: ")
    assert output.startswith(f"{__file__}, line ")
    assert output.endswith("ended the process, status 0")
    ended = record(tmp_path / "run")
    assert (ended["status"], ended["error"]) == ("failed", f"RunError: {output}")


def test_a_fork_of_an_environment_neither_ends_nor_doubles_a_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training and in evaluations; the child goes on, raises, or leaves with `sys.exit`."""
    run(job_in(tmp_path / "alone", configure, "eval_every=64"))
    process, step, taken = os.getpid(), cast(Any, CartPoleEnv.step), itertools.count()
    statuses = list[int]()

    def forks(env: CartPoleEnv, action: Any) -> Any:
        number = next(taken)
        if number % 50 == 7:
            if (child := os.fork()) == 0:
                signal.alarm(60)
                if number % 3 == 1:
                    sys.exit(0)
                return step(env, np.int64(7) if number % 3 else action)  # no action: it raises
            statuses.append(os.waitpid(child, 0)[1])
        return step(env, action)

    monkeypatch.setattr(STEP, forks)
    try:
        run(job_in(tmp_path / "run", configure, "eval_every=64"))
    finally:
        if os.getpid() != process:  # without the guard, it would go on as a second pytest
            os._exit(99)
    assert {*statuses} == {0, 1 << 8}
    traces = [(tmp_path / name / paths.TRACE).read_bytes() for name in ("run", "alone")]
    assert traces[0] == traces[1]
    ended = record(tmp_path / "run")
    assert (ended["status"], ended["pid"]) == ("finished", process)
    assert rows(tmp_path / "run") == rows(tmp_path / "alone")


@pytest.mark.parametrize(
    ("every", "number", "again"), [(0, signal.SIGINT, "Ctrl-C"), (1000, signal.SIGTERM, "SIGTERM")]
)
def test_a_signal_is_answered_and_says_if_nothing_is_kept(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    every: int,
    number: signal.Signals,
    again: str,
) -> None:
    step, taken, output = cast(Any, CartPoleEnv.step), itertools.count(), list[str]()

    def pressed(env: CartPoleEnv, action: Any) -> Any:
        if next(taken) == 40:
            os.kill(os.getpid(), number)
            output.append(capfd.readouterr().err.splitlines()[-1])
        return step(env, action)

    monkeypatch.setattr(STEP, pressed)
    words = ["eval_every=0", f"checkpoint_every={every}"]
    assert run(job_in(tmp_path / "run", configure, *words)) == 128 + number
    assert output == [f"{number.name}: the run ends after this iteration; another {again} ends it at once"]
    note = "checkpoint_every=0: nothing was saved, so a resume begins again\n"
    assert capfd.readouterr().err == ("" if every else note)
    assert bool(list_checkpoints(tmp_path / "run")) is bool(every)


def test_a_signal_that_waits_for_the_compiler_is_told_once() -> None:
    output = list[str]()
    stop = Stop(output.append)
    stop.answer(signal.SIGTERM)
    assert not stop.requested()
    stop.handle(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run of its own would end at the next one
    assert stop.requested()
    assert output == ["SIGTERM: the run ends once it is compiled"]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no message either")


def test_an_exception_without_a_message_leaves_a_record(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise Unspeakable

    monkeypatch.setattr(STEP, breaks)
    with pytest.raises(Unspeakable):
        run(job_in(tmp_path / "run", configure, "eval_every=0"))
    ended = record(tmp_path / "run")
    assert (ended["status"], ended["error"]) == ("failed", "Unspeakable: ")


def test_a_loss_that_becomes_infinite_costs_the_work_since_the_last_checkpoint(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, step = itertools.count(), cast(Any, CartPoleEnv.step)

    def fragile(env: CartPoleEnv, action: Any) -> Any:
        obs, reward, *rest = step(env, action)
        return obs, 1e25 if next(taken) == 100 else reward, *rest  # its square is infinite in 32 bits

    monkeypatch.setattr(STEP, fragile)
    words = ["eval_every=0", "checkpoint_every=32", "algo.normalize_reward=false"]
    with pytest.raises(RunError) as caught:
        run(job_in(tmp_path / "run", configure, *words))
    first, second = str(caught.value).splitlines()
    assert " became inf at [" in first
    assert first.endswith("in iteration 3, environment steps 96 to 128")
    assert second == "the last checkpoint is step_96.pt; its fingerprints are the last line of trace.jsonl"
    ended = record(tmp_path / "run")
    assert (ended["status"], ended["error"]) == ("failed", f"RunError: {first}")


def test_an_algorithm_that_makes_no_step_is_stopped(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle(algorithm: PPO) -> IterationResult:
        algorithm.begin_iteration()
        return IterationResult({})

    monkeypatch.setattr(PPO, "train_iteration", idle)
    with pytest.raises(RunError, match=r"train_iteration\(\) made no step: env_steps is 0 still"):
        run(job_in(tmp_path / "run", configure, "eval_every=0"))
    assert record(tmp_path / "run")["status"] == "failed"


def test_evaluations_are_checked_and_end_with_the_limit_of_the_environment_if_it_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = gym.make("Pendulum-v1", max_episode_steps=-1)
    codec = FlatCodec("Pendulum-v1", endless.observation_space, endless.action_space)

    def lengths(limit: int, broken_at: int | None = None) -> list[int]:
        def make() -> gym.Env[Any, Any]:
            env, steps = gym.make("Pendulum-v1", max_episode_steps=limit), itertools.count(1)
            return gym.wrappers.TransformReward(env, lambda _: math.nan if next(steps) == broken_at else 1.0)

        def act(obs: np.ndarray, _memory: Any, _rngs: Any = None) -> tuple[np.ndarray, None]:
            return np.zeros((len(obs), 1), np.float32), None

        episodes = evaluate(make, codec, act, [1, 2])
        return [episode.length for episode in episodes]

    monkeypatch.setattr("runlab.run.evaluation._LONGEST_EPISODE", 5)
    assert [lengths(limit) for limit in (-1, 3, 8)] == [[5, 5], [3, 3], [8, 8]]
    with pytest.raises(RunError, match=r"Pendulum-v1, step 3 of its episode: the reward is nan"):
        lengths(-1, broken_at=3)


def test_the_last_row_outlives_an_interruption_and_a_longer_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal cuts the evaluation at the end short, a resume makes it, and a longer run keeps it."""

    def interrupted(*arguments: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments, **more)

    words = ["eval_every=1000", "checkpoint_every=100000"]
    with monkeypatch.context() as patch:
        patch.setattr("runlab.run.observers.evaluate", interrupted)
        assert run(job_in(tmp_path, configure, *words)) == 128 + signal.SIGTERM
    ended = record(tmp_path)
    assert (ended["status"], ended["outcome_not_recorded"]) == ("interrupted", "no snapshot in this test")
    assert run(job_in(tmp_path, configure, *words, resume=True)) == 0
    assert run(job_in(tmp_path, configure, *words, "total_env_steps=320", resume=True)) == 0
    assert [row["env_steps"] for row in rows(tmp_path) if "eval/return" in row] == [256, 320]


def test_every_run_records_its_known_computations_and_a_resume_tells_the_first_that_differs(
    configure: Configure, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        assert run(job_in(tmp_path / name, configure)) == 0
    computed, again = (record(tmp_path / name)["determinism"]["computed"] for name in ("a", "b"))
    assert computed == again
    assert [*computed["digests"]][:7] == [*[*computations.PARTS][:6], "convolution"]
    assert "torch's oneDNN" in computed["libraries"] or not torch.backends.mkldnn.is_available()

    # The beginning of b was made elsewhere.
    values = record(tmp_path / "b")
    values["determinism"]["computed"]["digests"] |= {"sums": "0" * 16, "update": "0" * 16}
    (tmp_path / "b" / paths.RECORD).write_text(json.dumps(values))
    for name, changed in (("a", set()), ("b", {"computation"})):
        assert run(job_in(tmp_path / name, configure, "total_env_steps=320", resume=True)) == 0
        (part,) = record(tmp_path / name)["resumed"]
        assert {*part["changed"]} - {"total_env_steps"} == changed
    assert part["changed"]["computation"] == [f"sums {'0' * 16}", f"sums {again['digests']['sums']}"]
    printed = capfd.readouterr().err
    assert printed.count('than at its start (a): differently from "sums" on (digest a 0000') == 1
    assert differences(tmp_path / "a", tmp_path / "b") == []


def test_a_full_disk_costs_a_note_and_at_either_end_of_a_run_an_error(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save = Checkpoints.save

    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def now_and_then(checkpoints: Checkpoints, env_steps: int, *state: Any) -> Any:
        return full() if env_steps in (64, 256) else save(checkpoints, env_steps, *state)

    monkeypatch.setattr(Checkpoints, "save", now_and_then)
    problem = "could not be written, No space left on device; the last checkpoint is step_"
    words = ["eval_every=0", "checkpoint_every=32", "trace=step"]
    job = job_in(tmp_path / "run", configure, *words)
    with pytest.raises(RunError, match=f"after 256 steps {problem}224"):
        run(job)
    assert f"after 64 steps {problem}32" in capfd.readouterr().err
    assert record(tmp_path / "run")["status"] == "failed"
    monkeypatch.setattr(Checkpoints, "save", save)
    assert run(replace(job, resume=True)) == run(job_in(tmp_path / "alone", configure, *words)) == 0
    assert differences(tmp_path / "run", tmp_path / "alone") == []
    monkeypatch.setattr(RunRecord, "write", full)
    with pytest.raises(RunError, match="No space left on device; nothing was begun"):
        run(job_in(tmp_path / "new" / "run", configure))
    assert not (tmp_path / "new").exists()
    # Before the run has a ref of its own, that of its sweep is not taken for it.
    withdrawn, of_sweep = list[str | None](), GitRecord(ref="refs/runs/sweep", commit="1" * 40)
    monkeypatch.setattr("runlab.run.training_run.to_yaml", full)
    monkeypatch.setattr(snapshot, "withdraw_run", lambda _, git: withdrawn.append(git.ref))
    with pytest.raises(RunError, match="nothing was begun"):
        run(replace(job_in(tmp_path / "new" / "run", configure), snapshot=json.dumps(asdict(of_sweep))))
    assert withdrawn == [None]


def test_a_run_that_cannot_begin_leaves_no_ref(
    configure: Configure, fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Any:
        assert git(fork, "for-each-ref", "refs/runs/run") != ""  # it has its code already
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("runlab.run.training_run.PROJECT", fork)
    monkeypatch.setattr(RunRecord, "write", full)
    with pytest.raises(RunError, match="nothing was begun"):
        run(replace(job_in(tmp_path / "run", configure), snapshot=None))
    assert git(fork, "for-each-ref", "refs/runs/run") == ""


def test_a_run_whose_folder_is_moved_ends_and_begins_no_other(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"

    def meanwhile(*arguments: Any, **more: Any) -> Any:
        runs.rename(elsewhere)
        return evaluate(*arguments, **more)

    monkeypatch.setattr("runlab.run.observers.evaluate", meanwhile)
    with pytest.raises(RunError, match="was moved or deleted under the run"):
        run(job_in(runs / "a", configure, "eval_every=64", "checkpoint_every=32"))
    assert not runs.exists()
    assert newest_state(elsewhere / "a")["env_steps"] == 32


def test_compiling_is_refused_without_a_compiler(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    lacking = r"^compile=true: a C\+\+ compiler or Python's headers are missing .*; use compile=false$"
    with pytest.raises(ConfigError, match=lacking):
        run(job_in(tmp_path / "run", configure, "compile=true"))


def test_auto_goes_on_without_the_compiler_and_true_ends_with_the_cause(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The cache cannot be made. The run is the one with compile=false, and recorded as such."""
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "file" / "cache"))
    (tmp_path / "file").touch()
    monkeypatch.setattr("runlab.determinism.programs.cpp_compiler", lambda: "g++")
    plain, auto, refused = (tmp_path / name for name in ("plain", "auto", "refused"))
    assert run(job_in(plain, configure, "total_env_steps=64", "eval_every=0")) == 0
    job = job_in(auto, configure, "total_env_steps=64", "eval_every=0", "compile=true")
    capfd.readouterr()
    assert run(replace(job, auto_compile=True)) == 0
    (line,) = (each for each in capfd.readouterr().err.splitlines() if "compile" in each)
    assert line.startswith(f"compile=auto: this run is not compiled, since {tmp_path}/file/cache cannot be")
    assert raw_config(auto) == raw_config(plain)
    assert (auto / paths.TRACE).read_bytes() == (plain / paths.TRACE).read_bytes()
    assert record(auto)["determinism"] == record(plain)["determinism"]
    cause = rf"compile=true: {tmp_path}/file/cache cannot be written \(Not a directory\)"
    with pytest.raises(ConfigError, match=cause):
        run(replace(job, run_dir=str(refused)))
    assert not refused.exists()


def test_damaged_programs_are_made_again_and_wrong_ones_stop_the_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr("runlab.determinism.programs.cpp_compiler", lambda: "g++")
    program = cache_folder(os.environ) / "ab" / "damaged.so"
    trials = list[bool]()  # whether there were programs

    def trial(_: object, stepwise: bool) -> None:
        assert not stepwise
        trials.append(program.exists())
        if trials[-1] or not mended:
            raise CompilerError("update: no symbol")

    monkeypatch.setattr("runlab.trial.compare_programs", trial)
    monkeypatch.setattr("runlab.determinism.programs.vector_instructions", lambda: "avx2")
    config = configure(*SHORT["ppo"], "determinism=fast", "compile=true")
    for mended in (True, False):
        program.parent.mkdir(parents=True)
        program.write_text("no program")
        with contextlib.nullcontext() if mended else pytest.raises(NoCompilerError, match="no symbol"):
            try_programs(build(config)[0], False, to_stderr)
        assert trials[-2:] == [True, False]
        assert ("were removed and made again (update: no symbol)" in capfd.readouterr().err) == mended

    def wrong(*_: object) -> None:
        raise WrongProgramError("PPO.update: its compiled program is wrong")

    monkeypatch.setattr("runlab.trial.compare_programs", wrong)
    job = job_in(tmp_path / "run", configure, "compile=true")
    with pytest.raises(ConfigError, match=r"PPO\.update: its compiled program is wrong"):
        run(replace(job, auto_compile=True))
    assert not (tmp_path / "run").exists()


def test_evaluations_and_videos_draw_from_no_global_generator_of_the_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = cast(Any, CartPoleEnv.step)

    def noisy(env: CartPoleEnv, action: Any) -> Any:
        obs, reward, *rest = step(env, action)
        return obs, reward + float(np.random.normal()), *rest  # noqa: NPY002  the case

    monkeypatch.setattr(STEP, noisy)
    for every in (0, 64):
        words = [f"eval_every={every}", f"video_every={every}", "total_env_steps=128", "eval_episodes=1"]
        assert run(job_in(tmp_path / f"{every}", configure, *words)) == 0
    traces = [(tmp_path / f"{every}" / paths.TRACE).read_bytes() for every in (0, 64)]
    assert traces[0] == traces[1]
