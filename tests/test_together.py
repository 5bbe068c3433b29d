"""Several seeds in one process: each is the run that it would be alone, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, SHRUNK, Configure, Scripted, git, newest_state, run_train
from test_interruptions import assert_same, record, rows

from rltemplate import cli, launch
from rltemplate.analysis import compare
from rltemplate.analysis.runs import experiment_of, load_run
from rltemplate.baseline import difference
from rltemplate.config import Config, to_dict, to_yaml
from rltemplate.foreign_rng import ForeignTurns
from rltemplate.journal import write_sweep
from rltemplate.launch import Job, group_job, new_job
from rltemplate.prove import Proof, ask
from rltemplate.recorded import Recorded, check_possible
from rltemplate.reproduce import reproduce
from rltemplate.resume import resume_job
from rltemplate.rng import env_seeds
from rltemplate.run import paths
from rltemplate.run.checkpoint import list_checkpoints
from rltemplate.run.evaluate import Evaluator
from rltemplate.run.group_console import GroupConsole
from rltemplate.run.record import Record
from rltemplate.run.snapshot import Snapshot
from rltemplate.sweep import Sweep
from rltemplate.train import Observers, run
from rltemplate.types import ConfigError, RunError

TINY = {
    "ppo": ["algo=ppo", "env=CartPole", *SHRUNK["ppo"], "total_env_steps=320"],
    "sac": ["algo=sac", "env=Pendulum", *SHRUNK["sac"], "total_env_steps=192"],
}
# Environments that are simulated in threads.
RUNNERS = {"runners": ["algo=ppo", "env=Hopper", *SHRUNK["ppo"], "total_env_steps=320"]}
OBSERVED = ["log_every=32", "eval_every=160", "eval_episodes=1", "video_every=0", "checkpoint_every=64"]
QUIET = ["determinism=fast", "logger=none", *OBSERVED]
NO_CODE = Snapshot(problem="no snapshot in this test").to_json()


# --- What can be asked for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("seeds=[]", "needs at least one seed, as in seeds=[1,2,3]"),
        ("seeds=[4,1,4]", "4 is there twice"),
        ("seeds=[1,-2]", "must be at least 0"),
        ("seeds=3", "did you mean seeds=[3]"),
        ("seeds=[a]", "expected a list of whole numbers"),
        ("seeds=[[1],[2]]", "expected single values"),
        ("seeds=1,2", "as seeds=[1,2], which trains them in one process; seed=1,2 makes a sweep"),
        ("seeds=range(1,4)", "as seeds=[1,2,3]"),
        ("seeds=[1],[2]", "several lists are several commands"),
        ("seeds=interval(1,2)", "expected one list"),
        ("seeds=[1,2] seed=3", "leave seed=3 out"),
        ("seeds=[1,2] seed=3,4", "leave seed=3,4 out"),
        ("seeds=[1,2] run_dir=x", "a folder of its own"),
        ("seed=[1,2]", "in one process, as seeds=[1,2]"),
    ],
)
def test_what_cannot_be_trained_together_is_refused_in_a_line(words: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cli.preflight(words.split())
    assert says in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_seeds_make_one_job_and_with_a_list_of_values_one_for_each_value() -> None:
    assert not cli.preflight(["seeds=[1,2,3]"]).sweep
    plan = cli.preflight(["seeds=[1,2,3]", "algo.gamma=0.9,0.99"])
    assert (plan.num_jobs, [config.seeds for config in plan.configs]) == (2, [[1, 2, 3]] * 2)


def test_a_member_is_configured_as_if_it_had_been_asked_for_alone() -> None:
    group, alone = (cli.preflight([word]).configs[0] for word in ("seeds=[7,5]", "seed=5"))
    assert [member.seed for member in group.members()] == [7, 5]
    assert to_yaml(group.members()[1]) == to_yaml(alone)
    assert alone.members() == [alone]


def test_a_job_of_several_survives_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cli.preflight(["seeds=[3,1]"]).configs[0]
    job = new_job(config, ["train.py"], env_name="CartPole", overrides=["seeds=[3,1]"])
    monkeypatch.setenv(launch.JOB_VARIABLE, job.to_json())
    assert Job.from_environment() == job
    first, second = job.members()
    assert (first.config["seed"], second.config["seed"]) == (3, 1)
    assert len({job.run_id, first.run_id, second.run_id}) == 3
    assert [Path(each.run_dir) for each in (first, second)] == [
        Path(job.run_dir) / each.run_id for each in (first, second)
    ]


def test_a_single_seed_in_a_list_is_a_single_run() -> None:
    config = cli.preflight(["seeds=[3]"]).configs[0]
    job = new_job(config, [], env_name="CartPole", overrides=[])
    assert job.group is None
    assert (job.config["seed"], job.config["seeds"]) == (3, None)


# --- Each as alone ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def invariant(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Path]]:
    """The runs that a command makes at the level `invariant`, by seed; each command is carried out once."""
    done: dict[tuple[str, ...], list[Path]] = {}

    def train(algo: str, *words: str, **environment: str) -> list[Path]:
        key = (algo, *words, *environment)
        if key not in done:
            folder = tmp_path_factory.mktemp("invariant")
            more = ["determinism=invariant", "trace=step", "total_env_steps=96", *OBSERVED]
            made = run_train(fork, folder, *(TINY | RUNNERS)[algo][:-1], *more, *words, **environment)
            assert made.returncode == 0, made.stderr
            runs = [path.parent for path in folder.glob(f"runs/*/*/{paths.RECORD}")]
            done[key] = sorted(runs, key=lambda run_dir: load_run(run_dir).value("seed"))
        return done[key]

    return train


@pytest.mark.parametrize("algo", TINY | RUNNERS)
def test_at_invariant_each_is_bit_for_bit_the_run_of_its_seed(
    invariant: Callable[..., list[Path]], fork: Path, algo: str
) -> None:
    (alone,) = invariant(algo, "seed=2")
    group = invariant(algo, "seeds=[1,2,3]")
    assert len(group) == 3
    together = group[1]
    command = [sys.executable, str(fork / "scripts" / "compare.py"), f"a={alone}", f"b={together}"]
    compared = subprocess.run(command, capture_output=True, text=True, check=False, cwd=fork)
    assert compared.returncode == 0, compared.stdout
    assert_same(together, alone)
    assert (together / paths.CONFIG).read_text() == (alone / paths.CONFIG).read_text()
    traces = {(run_dir / paths.TRACE).read_bytes() for run_dir in group}
    assert len(traces) == 3  # and no two of them share what they draw


def test_a_last_bit_that_differs_in_a_group_is_noticed(invariant: Callable[..., list[Path]]) -> None:
    (alone,) = invariant("ppo", "seed=2")
    group = invariant("ppo", "seeds=[1,2,3]", RLTEMPLATE_FAULT="action@1:3")
    found = compare.compare_runs(alone, group[1])
    assert found.verdict == compare.DIVERGED
    assert found.divergence is not None
    assert (found.divergence.iteration, found.divergence.item) == (1, "action")


def test_records_commits_and_tables_are_those_of_single_runs(
    invariant: Callable[..., list[Path]], fork: Path
) -> None:
    (alone,) = invariant("ppo", "seed=2")
    group = invariant("ppo", "seeds=[1,2,3]")
    single, member = load_run(alone), load_run(group[1])
    assert set(member.record) == {*single.record, "together"}
    facts = member.record["together"]
    assert (facts["seeds"], facts["place"], facts["alone_since"]) == ([1, 2, 3], 1, None)
    assert facts["run_ids"] == [run_dir.name for run_dir in group]
    assert member.record["config_digest"] == single.record["config_digest"]
    assert experiment_of(member.config) == experiment_of(single.config)
    # The same code and configuration make the same commit, below the outcome of each.
    assert member.record["git"]["commit"] == single.record["git"]["commit"]
    for run_dir in group:
        ref = record(run_dir)["git"]["ref"]
        assert ref == f"refs/runs/{run_dir.name}"
        outcome = json.loads(git(fork, "show", f"{ref}:.rltemplate/run/outcome.json"))
        assert (outcome["status"], outcome["together"]["id"]) == ("finished", facts["id"])
        assert git(fork, "show", f"{ref}:.rltemplate/run/config.yaml") == (run_dir / paths.CONFIG).read_text()
    assert not difference(fork, single, member).factors
    assert not any("trained" in note for note in difference(fork, single, member).notes)


def test_what_was_trained_together_is_told_as_a_condition(invariant: Callable[..., list[Path]]) -> None:
    (alone,) = invariant("ppo", "seed=2")
    group = invariant("ppo", "seeds=[1,2,3]")
    told = [(each.key, each.b) for each in compare.compare_runs(alone, group[1]).differences]
    assert told == [("seeds trained together", [1, 2, 3])]
    single, member = load_run(alone), load_run(group[1])
    for each in (single, member):
        each.config["determinism"]["level"] = "repeat"  # which promises nothing about rows beside a row
    (note,) = difference(ROOT, single, member).notes
    assert "b with seeds 1, 2, 3" in note


def test_a_group_has_one_entry_in_the_journal(invariant: Callable[..., list[Path]]) -> None:
    group = invariant("ppo", "seeds=[1,2,3]")
    journal = (group[0].parents[1] / paths.JOURNAL).read_text()
    assert journal.count("<!-- entry ") == 1
    assert "seeds 1, 2, 3 together · finished" in journal
    assert all(run_dir.name in journal for run_dir in group)
    assert "interquartile mean" in journal


# --- In this process -------------------------------------------------------------------------------------


def job_of(config: Config, folder: Path, **further: Any) -> Job:
    """The job of a group whose runs lie in `folder/<seed>`."""
    assert config.seeds is not None
    runs = {f"seed{seed}": folder / f"seed{seed}" for seed in config.seeds}
    told = {"command": ["train.py"], "overrides": [], "snapshot": NO_CODE, **further}
    return group_job(config, f"group-{folder.name}", runs, **told)


def again(folder: Path, seed: int, **further: Any) -> int:
    """Go on with the group of a run, and return the exit status."""
    job = resume_job(folder / f"seed{seed}", ["resume.py"], **further)
    assert job is not None
    return run(with_snapshot(job))


def with_snapshot(job: Job) -> Job:
    from dataclasses import replace

    return replace(job, snapshot=NO_CODE, journal=False)


def status(folder: Path, seeds: Sequence[int]) -> list[str]:
    return [record(folder / f"seed{seed}")["status"] for seed in seeds]


class Drawing(Scripted):
    """Its rewards are draws from numpy's global generator, Python's and torch's, as in much older code."""

    drawn: list[float]

    def __init__(self, begins_at: int = 0, **settings: Any) -> None:
        super().__init__(length=5, **settings)
        self.begins_at, self.taken = begins_at, 0
        self.drawn = []
        DRAWING.append(self)

    def step(self, action: Any) -> Any:
        """One step."""
        import random

        import torch

        obs, reward, terminated, truncated, info = super().step(action)
        self.taken += 1
        if self.taken <= self.begins_at:
            return obs, reward, terminated, truncated, info
        reward = float(np.random.random() + random.random() + float(torch.rand(())))  # noqa: NPY002
        self.drawn.append(reward)
        return obs, reward, terminated, truncated, info


DRAWING: list[Drawing] = []


@pytest.fixture
def drawing_env() -> Iterator[str]:
    """The id under which `Drawing` is registered."""
    gym.register("Drawing-v0", entry_point="test_together:Drawing")
    DRAWING.clear()
    yield "Drawing-v0"
    del gym.registry["Drawing-v0"]


@pytest.mark.parametrize("mixed", [False, True])
def test_what_environments_draw_from_global_generators_is_their_own(
    tmp_path: Path,
    drawing_env: str,
    mixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["algo=ppo", f"env={drawing_env}", *SHRUNK["ppo"], "total_env_steps=96", *QUIET]

    def draws(name: str, *seeds: int) -> list[list[float]]:
        DRAWING.clear()
        config = cli.preflight([*words, f"seeds=[{','.join(map(str, seeds))}]"]).configs[0]
        job = job_of(config, tmp_path / name) if len(seeds) > 1 else alone(config, tmp_path / name)
        assert run(job) == 0
        return [env.drawn for env in DRAWING if env.drawn]

    first, second = draws("first", 1), draws("second", 2)
    assert first != second
    if mixed:
        monkeypatch.setattr(ForeignTurns, "turn_to", lambda self, place: None)
        monkeypatch.setattr(ForeignTurns, "end_period", lambda self: None)
    made = draws("both", 1, 2)
    for single in (first, second):
        assert all(drawn in made for drawn in single) is not mixed


def test_who_draws_from_global_generators_when_nobody_expects_it_ends_the_iteration(
    tmp_path: Path, drawing_env: str
) -> None:
    """For two iterations of 16 steps nobody draws, and from then on both do."""
    words = ["algo=ppo", f"env={drawing_env}", "+env.kwargs.begins_at=36", *SHRUNK["ppo"]]
    words += ["total_env_steps=160", *QUIET]
    config = cli.preflight([*words, "seeds=[1,2]"]).configs[0]
    with pytest.raises(RunError, match=r"for the first time after 2 iterations,\n.* with seed=1,2"):
        run(job_of(config, tmp_path / "both"))
    assert status(tmp_path / "both", [1, 2]) == ["failed", "failed"]


def alone(config: Config, folder: Path) -> Job:
    """The job of the only seed of a configuration."""
    (member,) = config.members()
    told = {"command": ["train.py"], "overrides": [], "snapshot": NO_CODE}
    return Job(config=to_dict(member), run_id=folder.name, run_dir=str(folder), **told)  # type: ignore[arg-type]


class Breaking(Scripted):
    """Breaks in its step `at` if it belongs to the run of seed `of`."""

    def __init__(self, of: int = 2, at: int = 100, **settings: Any) -> None:
        super().__init__(length=7, **settings)
        self.bad = env_seeds(of, "env", 2)
        self.at, self.taken, self.breaks = at, 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start the next episode."""
        if seed is not None:
            self.breaks = seed in self.bad
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """One step."""
        self.taken += 1
        if self.breaks and self.taken >= self.at:
            raise RuntimeError("it broke")
        return super().step(action)


@pytest.fixture
def breaking_env() -> Iterator[str]:
    """The id under which `Breaking` is registered."""
    gym.register("Breaking-v0", entry_point="test_together:Breaking")
    yield "Breaking-v0"
    del gym.registry["Breaking-v0"]


def test_a_member_that_fails_is_recorded_and_the_others_go_on(
    tmp_path: Path, breaking_env: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["algo=ppo", f"env={breaking_env}", *SHRUNK["ppo"], "total_env_steps=320", *QUIET]
    config = cli.preflight([*words, "seeds=[1,2,3]"]).configs[0]
    assert run(job_of(config, tmp_path)) == 1
    assert status(tmp_path, [1, 2, 3]) == ["finished", "failed", "finished"]
    assert record(tmp_path / "seed2")["error"] == "RuntimeError: it broke"
    told = capfd.readouterr().err
    assert "seed 2: failed, the others go on" in told
    assert "in step\n" in told  # where: an error of ours would have to be found
    assert rows(tmp_path / "seed1")[-1]["env_steps"] == 320
    assert rows(tmp_path / "seed2")[-1]["env_steps"] == 192
    # A checkpoint says with whom it was made: two environments are stepped together.
    together = [newest_state(tmp_path / f"seed{seed}")["run"]["together"] for seed in (1, 2, 3)]
    assert together == [[1, 3], [1, 2, 3], [1, 3]]


def test_an_exit_status_of_0_means_that_all_have_finished(tmp_path: Path, breaking_env: str) -> None:
    words = ["algo=ppo", f"env={breaking_env}", *SHRUNK["ppo"], "total_env_steps=64", *QUIET]
    config = cli.preflight([*words, "seeds=[1,2]"]).configs[0]
    assert run(job_of(config, tmp_path)) == 0
    assert status(tmp_path, [1, 2]) == ["finished"] * 2


def test_a_disk_that_takes_no_checkpoint_of_one_costs_the_others_nothing(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure(*TINY["ppo"], *QUIET, "seeds=[1,2,3]")
    job = job_of(config, tmp_path)
    create = Record.create

    def with_a_file_in_the_way(run_dir: Path, fields: Any) -> Record:
        if run_dir.name == "seed2":
            (run_dir / paths.CHECKPOINTS).write_text("")
        return create(run_dir, fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "create", with_a_file_in_the_way)
        assert run(job) == 1
    assert status(tmp_path, [1, 2, 3]) == ["finished", "failed", "finished"]
    assert "could not be written" in record(tmp_path / "seed2")["error"]
    assert newest_state(tmp_path / "seed3")["env_steps"] == 320


def test_runs_that_cannot_all_begin_leave_nothing(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(*TINY["ppo"], *QUIET, "seeds=[1,2,3]")
    create = Record.create

    def full(run_dir: Path, fields: Any) -> Record:
        if run_dir.name == "seed3":
            raise OSError(28, "No space left on device")
        return create(run_dir, fields)

    monkeypatch.setattr(Record, "create", full)
    with pytest.raises(RunError, match="nothing was begun"):
        run(job_of(config, tmp_path / "runs"))
    assert list(tmp_path.iterdir()) == []


# --- Interrupted and gone on -----------------------------------------------------------------------------


def interrupted(
    monkeypatch: pytest.MonkeyPatch, job: Job, number: int = signal.SIGTERM, at_evaluation: int = 1
) -> int:
    """The exit status of a group that gets a signal in one of its evaluations."""
    evaluate, calls = Evaluator.run, []

    def evaluate_and_ask(self: Evaluator, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == at_evaluation:
            os.kill(os.getpid(), number)
        return evaluate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "run", evaluate_and_ask)
        return run(job)


@pytest.mark.parametrize(
    ("algo", "number", "at"),
    [("ppo", signal.SIGINT, 3), pytest.param("sac", signal.SIGTERM, 1, marks=pytest.mark.slow)],
)
def test_a_signal_ends_all_with_a_checkpoint_and_all_go_on_exactly(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    algo: str,
    number: signal.Signals,
    at: int,
) -> None:
    config = configure(*TINY[algo], *QUIET, "seeds=[1,2,3]")
    assert run(job_of(config, tmp_path / "straight")) == 0
    folder = tmp_path / "stopped"
    assert interrupted(monkeypatch, job_of(config, folder), number, at) == 128 + number
    assert status(folder, [1, 2, 3]) == ["interrupted"] * 3
    assert len({newest_state(folder / f"seed{seed}")["env_steps"] for seed in (1, 2, 3)}) == 1
    assert again(folder, 2) == 0
    for seed in (1, 2, 3):
        assert_same(folder / f"seed{seed}", tmp_path / "straight" / f"seed{seed}")
        (part,) = record(folder / f"seed{seed}")["resumed"]
        assert (part["interruption"], part["changed"]) == ("interrupted", {})
    assert resume_job(folder / "seed1", []) is None


# Ends its process like SIGKILL does, in the middle of writing the checkpoints of a group.
KILLED = """
import os, sys
from rltemplate import train
from rltemplate.run.checkpoint import Checkpoints

save, calls = Checkpoints.save, 0

def dying(self, *arguments, **further):
    global calls
    if calls == int(sys.argv[1]):
        os.kill(os.getpid(), 9)
    calls += 1
    return save(self, *arguments, **further)

Checkpoints.save = dying
sys.exit(train.main())
"""


def killed(job: Job, config: Config, saves: int) -> None:
    """Train in a process that is killed when it begins to write one more checkpoint than `saves`."""
    environment = launch.worker_environment(job, config, os.environ)
    command = [sys.executable, "-P", "-c", KILLED, str(saves)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("algo", "saves", "at"),
    [
        ("ppo", 2, 0),  # one is without its first checkpoint, so all begin again
        ("ppo", 7, 128),  # the first has its third, and the others have not
        pytest.param("sac", 4, 72, marks=pytest.mark.slow),
        pytest.param("sac", 8, 144, marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_middle_of_writing_all_go_on_from_what_all_have(
    configure: Configure, tmp_path: Path, algo: str, saves: int, at: int
) -> None:
    """With a single checkpoint kept: the one before goes only when all have the next."""
    config = configure(*TINY[algo], *QUIET, "seeds=[1,2,3]", "checkpoints_kept=1")
    assert run(job_of(config, tmp_path / "straight")) == 0
    folder = tmp_path / "killed"
    killed(job_of(config, folder), config, saves)
    assert status(folder, [1, 2, 3]) == ["running"] * 3
    have = [len(list_checkpoints(folder / f"seed{seed}")) for seed in (1, 2, 3)]
    assert have[0] == have[-1] + 1
    assert again(folder, 3) == 0
    for seed in (1, 2, 3):
        (part,) = record(folder / f"seed{seed}")["resumed"]
        assert (part["interruption"], part["env_steps"]) == ("killed", at)
        assert_same(folder / f"seed{seed}", tmp_path / "straight" / f"seed{seed}")


def test_a_checkpoint_that_one_has_alone_is_not_taken(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rule that all must have it, what follows would not be what it was."""
    config = configure(*TINY["ppo"], *QUIET, "seeds=[1,2]")
    folder = tmp_path / "group"
    assert interrupted(monkeypatch, job_of(config, folder), at_evaluation=1) == 143
    newest = [list_checkpoints(folder / f"seed{seed}")[-1] for seed in (1, 2)]
    newest[1].with_suffix(".json").unlink()
    assert again(folder, 1) == 0
    parts = [record(folder / f"seed{seed}")["resumed"][0]["env_steps"] for seed in (1, 2)]
    assert parts == [128, 128]


def test_a_damaged_checkpoint_of_one_takes_all_to_the_one_before(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(*TINY["ppo"], *QUIET, "seeds=[1,2]")
    assert run(job_of(config, tmp_path / "straight")) == 0
    folder = tmp_path / "group"
    assert interrupted(monkeypatch, job_of(config, folder)) == 143
    damaged = list_checkpoints(folder / "seed2")[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert again(folder, 1) == 0
    for seed in (1, 2):
        (part,) = record(folder / f"seed{seed}")["resumed"]
        assert part["env_steps"] == 128
        assert any(f"{damaged} is damaged" in note for note in part["notes"])
        assert_same(folder / f"seed{seed}", tmp_path / "straight" / f"seed{seed}")


@pytest.mark.parametrize(("fails_at", "fails_again"), [(96, False), (160, True)])
def test_what_had_failed_stays_failed_and_what_failed_later_fails_again(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails_at: int,
    fails_again: bool,
) -> None:
    """So that the others find the same seeds beside them as in the run that was not interrupted."""
    config = configure(*TINY["ppo"], *QUIET, "seeds=[1,2,3]")
    take_in = Observers.take_in

    def failing(self: Observers, *arguments: Any) -> None:
        if self.config.seed == 2 and self.algorithm.env_steps == fails_at:
            raise RunError("it broke")
        take_in(self, *arguments)

    monkeypatch.setattr(Observers, "take_in", failing)
    assert run(job_of(config, tmp_path / "straight")) == 1
    folder = tmp_path / "group"
    assert interrupted(monkeypatch, job_of(config, folder)) == 143
    for seed in (1, 3):  # as if killed: the checkpoint for the signal, after 160 steps, was not written
        newest = list_checkpoints(folder / f"seed{seed}")[-1]
        newest.with_suffix(".json").unlink()
    assert status(folder, [2]) == ["failed"]
    assert again(folder, 1) == (1 if fails_again else 0)
    assert status(folder, [1, 2, 3]) == ["finished", "failed", "finished"]
    for seed in (1, 3):
        assert_same(folder / f"seed{seed}", tmp_path / "straight" / f"seed{seed}")
        assert record(folder / f"seed{seed}")["resumed"][0]["changed"] == {}
    assert len(record(folder / "seed2")["resumed"]) == fails_again
    trace = [(each / "seed2" / paths.TRACE).read_bytes() for each in (folder, tmp_path / "straight")]
    assert trace[0] == trace[1]
    with pytest.raises(ConfigError, match="alone=true goes on with it alone"):
        resume_job(folder / "seed2", [])


def test_more_steps_are_for_all(configure: Configure, tmp_path: Path) -> None:
    words = [*TINY["ppo"][:-1], *QUIET, "algo.learning_rate_schedule=constant", "seeds=[1,2]"]
    assert run(job_of(configure(*words, "total_env_steps=320"), tmp_path / "long")) == 0
    folder = tmp_path / "short"
    assert run(job_of(configure(*words, "total_env_steps=128"), folder)) == 0
    assert resume_job(folder / "seed1", []) is None
    assert again(folder, 1, total_env_steps=320) == 0
    for seed in (1, 2):
        assert record(folder / f"seed{seed}")["resumed"][0]["changed"] == {"total_env_steps": [128, 320]}
        ours, theirs = (each / f"seed{seed}" / paths.TRACE for each in (folder, tmp_path / "long"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_one_may_go_on_alone_and_the_others_without_it(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(*TINY["ppo"], *QUIET, "seeds=[1,2,3]")
    assert interrupted(monkeypatch, job_of(config, tmp_path)) == 143
    assert again(tmp_path, 2, alone=True) == 0
    assert status(tmp_path, [1, 2, 3]) == ["interrupted", "finished", "interrupted"]
    left = record(tmp_path / "seed2")
    assert left["together"]["alone_since"] == 160
    (part,) = left["resumed"]
    assert part["changed"] == {"together": [[1, 2, 3], [2]]}
    assert any("without seeds 1, 3, which may change last bits" in note for note in part["notes"])
    before = (tmp_path / "seed2" / paths.RECORD).read_bytes()
    assert again(tmp_path, 3) == 0
    assert (tmp_path / "seed2" / paths.RECORD).read_bytes() == before
    assert record(tmp_path / "seed1")["resumed"][0]["changed"] == {"together": [[1, 2, 3], [1, 3]]}
    # It has left for good: what it does from now on is its own.
    job = resume_job(tmp_path / "seed2", [], total_env_steps=640)
    assert job is not None
    assert job.group is None


def test_what_cannot_go_on_is_refused_in_a_line(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(*TINY["ppo"], *QUIET, "seeds=[1,2]")
    assert interrupted(monkeypatch, job_of(config, tmp_path / "group")) == 143
    (tmp_path / "group" / "seed2").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"together with seed2, not to be found .*alone=true"):
        resume_job(tmp_path / "group" / "seed1", [])
    (tmp_path / "elsewhere").rename(tmp_path / "group" / "another-name")
    assert resume_job(tmp_path / "group" / "seed1", []) is not None
    assert run(alone(configure(*TINY["ppo"], *QUIET, "seeds=[5]"), tmp_path / "single")) == 0
    with pytest.raises(ConfigError, match="was not trained together with others"):
        resume_job(tmp_path / "single", [], alone=True)


# --- The display -----------------------------------------------------------------------------------------


class Shown:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.notes: list[str] = []
        self.closed: list[tuple[str, dict[str, float]]] = []

    def write(self, row: Any) -> None:
        self.rows.append(dict(row))

    def video(self, path: Path, env_steps: int) -> None:
        raise AssertionError("a video is told as a note, with its seed")

    def note(self, text: str) -> bool:
        self.notes.append(text)
        return True

    def close(self, status: str, final_metrics: Any) -> None:
        self.closed.append((status, dict(final_metrics)))


def row(steps: int, value: float, **further: float) -> dict[str, float]:
    return {"env_steps": steps, "wall_time_s": 1.0, "episode/return": value, **further}


def test_the_display_shows_the_mean_of_those_that_are_going() -> None:
    shown = Shown()
    console = GroupConsole(shown, [7, 8, 9])
    sinks = [console.of(place) for place in range(3)]
    speed = {"time/steps_per_second": 100.0}
    for sink, value in zip(sinks, (1.0, 2.0, 6.0), strict=True):
        assert shown.rows == []
        sink.write(row(10, value, **speed))
    assert shown.rows == [{**row(10, 3.0), "time/steps_per_second": 300.0}]
    sinks[0].write(row(20, 1.0))
    sinks[2].write(row(20, 5.0))
    sinks[1].close("failed", {})  # for it the others have been waiting
    assert shown.rows[1:] == [row(20, 3.0)]
    sinks[0].write({"env_steps": 30, "wall_time_s": 2.0})
    sinks[2].write({"env_steps": 30, "wall_time_s": 2.0, "eval/return": 4.0})
    assert shown.rows[2]["eval/return"] == 4.0
    sinks[0].video(Path("x.mp4"), 30)
    assert shown.notes == ["seed 7: video after 30 steps: x.mp4"]
    sinks[0].close("finished", {"eval/return": 1.0})
    assert shown.closed == []
    sinks[2].close("finished", {"eval/return": 3.0})
    assert shown.closed == [("finished: seeds 7, 9; failed: seed 8;", {"eval/return": 2.0})]


def test_a_row_that_one_had_written_before_it_was_killed_delays_none() -> None:
    shown = Shown()
    console = GroupConsole(shown, [1, 2])
    sinks = [console.of(place) for place in range(2)]
    sinks[0].write(row(10, 1.0))
    for sink in sinks:
        sink.write(row(20, 5.0))
    assert shown.rows == [row(20, 5.0)]


def test_a_terminal_is_told_of_the_group_once(configure: Configure, tmp_path: Path, capfd: Any) -> None:
    words = [*QUIET, "logger=local", "logger.tensorboard=true", "logger.journal=false"]
    config = configure(*TINY["ppo"], *[word for word in words if word != "logger=none"], "seeds=[1,2]")
    assert run(job_of(config, tmp_path)) == 0
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"ppo on CartPole-v1, mean of seeds 1, 2: {tmp_path}"
    steps = [line.split()[1] for line in lines if line.startswith("step")]
    assert steps == [f"{done}/320" for done in range(32, 321, 32)]
    assert sum(line.startswith("finished after 320 steps") for line in lines) == 1
    assert sum("code not recorded" in line for line in lines) == 1
    for seed in (1, 2):
        assert len(rows(tmp_path / f"seed{seed}")) == 10
        assert list((tmp_path / f"seed{seed}" / paths.TENSORBOARD).iterdir())


# --- Sweeps, reproductions and proofs --------------------------------------------------------------------

# Writes the records of a group that ends as the file `statuses` of its sweep says.
GROUP = """
import json, sys
from pathlib import Path
from rltemplate.config import from_dict, to_yaml
from rltemplate.launch import Job

job = Job.from_environment()
statuses = json.loads(Path(job.sweep.dir, "statuses").read_text())[job.resume]
for place, (each, status) in enumerate(zip(job.members(), statuses)):
    folder = Path(each.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(from_dict(each.config)))
    record = {"schema": 1, "id": each.run_id, "status": status, "together": job.group.facts(place)}
    record["final_metrics"] = {"eval/return": 10.0 * each.config["seed"]}
    (folder / "record.json").write_text(json.dumps(record))
sys.exit(143 if "interrupted" in statuses else 1 if "failed" in statuses else 0)
"""


def sweep_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *statuses: list[str]) -> Sweep:
    """A sweep whose jobs of two seeds end with the first statuses, and when they go on with the second."""
    index = {"id": "s", "status": "running", "command": ["train.py"], "words": [], "num_jobs": 1}
    index |= {"signal": None, "resumed": [], "snapshot": {}, "jobs": []}
    folder.mkdir()
    (folder / paths.SWEEP_INDEX).write_text(json.dumps(index))
    (folder / "statuses").write_text(json.dumps(statuses))
    monkeypatch.setattr(launch, "worker_command", lambda: [sys.executable, "-P", "-c", GROUP])
    return Sweep(folder)


def run_job(sweep: Sweep) -> tuple[float | None, dict[str, Any]]:
    words = ["seeds=[2,4]", f"runs_dir={sweep.folder}"]
    config = cli.preflight(words).configs[0]
    value = sweep.run(0, config, words, env_name="CartPole", console=False)
    (job,) = sweep.read()["jobs"]
    return value, job


def next_session(sweep: Sweep) -> None:
    index = sweep.read()
    index["resumed"].append({"command": ["train.py", "sweep=resume"], "accept": False})
    (sweep.folder / paths.SWEEP_INDEX).write_text(json.dumps(index))
    sweep.session += 1


def test_a_job_of_a_sweep_lists_its_runs_and_they_go_on_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = sweep_of(tmp_path / "s", monkeypatch, ["interrupted"] * 2, ["finished"] * 2)
    value, job = run_job(sweep)
    assert (value, job["status"]) == (30.0, "interrupted")
    assert [run["seed"] for run in job["runs"]] == [2, 4]
    folders = paths.job_runs(sweep.folder, job)
    assert [load_run(folder).value("seed") for folder in folders.values()] == [2, 4]
    next_session(sweep)
    value, again = run_job(sweep)
    assert (value, again["status"], again["resumed"]) == (30.0, "finished", 1)
    assert again["runs"] == job["runs"]
    moved = tmp_path / "moved"
    sweep.folder.rename(moved)
    assert all(folder.is_dir() for folder in paths.job_runs(moved, job).values())


def test_a_job_of_which_one_failed_stays_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(tmp_path / "s", monkeypatch, ["finished", "failed"])
    assert run_job(sweep)[1]["status"] == "failed"
    next_session(sweep)
    _, job = run_job(sweep)
    assert (job["status"], job["resumed"]) == ("failed", 0)
    assert "alone=true" in job["problem"]


def test_the_entry_of_a_sweep_has_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(tmp_path / "s", monkeypatch, ["finished", "finished"])
    _, job = run_job(sweep)
    index = sweep.read() | {"start_time": "2026-11-21T10:00:00", "status": "finished"}
    write_sweep(sweep.folder, index, tmp_path, ROOT)
    journal = (tmp_path / paths.JOURNAL).read_text()
    assert "(2 seeds: 20, 40)" in journal
    assert all(run["run_id"] in journal for run in job["runs"])


def recorded(**further: Any) -> Recorded:
    """What there is of a run that was trained together with others."""
    facts = {"id": "g", "seeds": [1, 2], "run_ids": ["a", "b"], "place": 0, "alone_since": None}
    values: dict[str, Any] = {"status": "finished", "together": facts, **further}
    return Recorded(
        id="a",
        ref=None,
        commit="0",
        record=values,
        config={"trace": "iteration", "determinism": {"level": "repeat"}},
        config_file=Path("config.yaml"),
        trace=None,
        metrics=None,
        place="a",
        iterations=3,
    )


def test_what_one_group_cannot_give_is_not_made_again() -> None:
    whole = recorded()
    check_possible(whole)
    assert whole.together == [1, 2]
    assert "seeds 1, 2, which are made again as well" in whole.notes[0]
    part = {"env_steps": 96, "changed": {"together": [[1, 2], [1]]}}
    left = recorded(resumed=[part])
    with pytest.raises(ConfigError, match="trained together with seeds 1, 2, and went on with 1 after 96"):
        check_possible(left)
    left.config["determinism"]["level"] = "invariant"  # where it makes no difference
    left.record["together"]["alone_since"] = 96
    check_possible(left)
    assert left.together is None


@pytest.mark.slow
@pytest.mark.parametrize("by_ref", [False, True])
def test_one_of_a_group_is_made_again_with_all_of_them(fork: Path, tmp_path: Path, by_ref: bool) -> None:
    words = [*TINY["ppo"], *QUIET[1:], "determinism=repeat", "seeds=[1,2,3]"]
    made = run_train(fork, tmp_path, *words)
    assert made.returncode == 0, made.stderr
    (run_dir,) = tmp_path.glob("runs/*/*seed2*")
    text = f"refs/runs/{run_dir.name}" if by_ref else str(run_dir)
    kept = tmp_path / "kept"
    found = reproduce(text, project=fork, runs_dir=tmp_path / "runs", keep=kept)
    assert (found.verdict, found.error) == ("identical", None)
    assert record(kept)["together"]["seeds"] == [1, 2, 3]
    assert record(kept)["together"]["place"] == 1


@pytest.mark.slow
def test_a_proof_compares_member_by_member(tmp_path: Path) -> None:
    words = [*TINY["ppo"], *QUIET[1:], "determinism=repeat", "seeds=[1,2]", "times=2", f"runs_dir={tmp_path}"]
    question = ask(words)
    document = Proof(question, say=lambda line: None).run()
    assert document["verdict"] == "holds", document["problems"]
    assert [(run["name"], run["seed"]) for run in document["runs"]] == [
        ("run_0_seed_1", 1),
        ("run_0_seed_2", 2),
        ("run_1_seed_1", 1),
        ("run_1_seed_2", 2),
    ]
    assert len({run["digest"] for run in document["runs"]}) == 2
    # And a member that is another one in the second run is found, beside one that is not.
    broken = {"run_1": {"RLTEMPLATE_FAULT": "action@3:1"}}
    document = Proof(question, say=lambda line: None, extra=broken).run()
    assert document["verdict"] == "broken"
    assert document["problems"][0].startswith("run_1_seed_1 ")
    # Where depends on more than the fault: for it each seed is computed by itself, which rounds otherwise.
    assert " is not run_0_seed_1: diverged in iteration" in document["problems"][0]
