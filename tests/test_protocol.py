"""An algorithm with the six members of the protocol and nothing else: no network, nothing of learning/."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import Configure, build, differences, job_in, killed_at, record, rows

from runlab.__main__ import main
from runlab.analysis.compare import DIVERGED, IDENTICAL, compare_runs, report
from runlab.config.algorithms import AlgoConfig, Entry, count, positive
from runlab.config.cli.preflight import preflight
from runlab.config.project import ALGORITHMS, project
from runlab.config.schema import Config
from runlab.errors import ConfigError, RunError
from runlab.interfaces import IterationResult, Probe
from runlab.launch import worker
from runlab.rerun.policy_file import export_policy
from runlab.run import paths
from runlab.run.trace import check_state


@dataclass(slots=True, kw_only=True)
class ClimbConfig(AlgoConfig):
    num_steps: int = count()
    step_size: float = positive()


class HillClimber:
    """Linear policies with random changes, of which the better ones are kept; an iteration tries one."""

    def __init__(self, config: ClimbConfig, envs: Any, streams: Any, _total: int, _engine: Any) -> None:
        self.config, self.envs, self.env_steps = config, envs, 0
        self.rng = np.random.default_rng(streams.seed)
        self.obs: np.ndarray | None = None
        self.best, self.score = np.zeros((envs.codec.obs_size, envs.codec.nvec[0])), -np.inf

    def train_iteration(self) -> IterationResult:
        self.obs = self.envs.reset() if self.obs is None else self.obs
        tried = self.best + self.config.step_size * self.rng.normal(size=self.best.shape)
        episodes, score = [], 0.0
        for _ in range(self.config.num_steps):
            step = self.envs.step(np.argmax(self.obs @ tried, 1)[:, None])
            self.env_steps += self.envs.num_envs
            self.obs, score = step.obs, score + float(step.reward.sum() - 10 * step.terminated.sum())
            episodes += step.episodes
        if score >= self.score:
            self.best, self.score = tried, score
        return IterationResult({"climb/score": torch.tensor(score)}, episodes)

    def act(self, obs: np.ndarray) -> np.ndarray:
        actions: np.ndarray = np.argmax(obs @ self.best, 1)[:, None]
        return actions

    def state_dict(self) -> dict[str, Any]:
        state = {"best": torch.from_numpy(self.best.copy()), "score": self.score, "env_steps": self.env_steps}
        state |= {"rng": self.rng.bit_generator.state}
        if self.obs is not None:
            state |= {"obs": torch.from_numpy(self.obs.copy()), "envs": self.envs.state_dict()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.score, self.env_steps = state["best"].numpy(), state["score"], state["env_steps"]
        self.rng.bit_generator.state = state["rng"]
        if "envs" in state:
            self.envs.load_state_dict(state["envs"])
            self.obs = state["obs"].numpy()

    def close(self) -> None:
        self.envs.close()


class Probed(HillClimber):
    """One with the optional probe, which gets steps of environments, and values in evaluations as well."""

    @property
    def probe(self) -> Probe:
        probe: Probe = self.envs.probe
        return probe

    @probe.setter
    def probe(self, probe: Probe) -> None:
        self.envs.probe = probe

    def act(self, obs: np.ndarray) -> np.ndarray:
        self.probe.results("act", {"obs": obs}, whole=True)  # of an evaluation, and so not of the run
        return super().act(obs)


class Forgetful(HillClimber):
    """One that goes on with new random numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "rng": self.rng.bit_generator.state})


class Unkept(HillClimber):
    """One with an array in its state, which torch writes and does not read."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"best": self.best.copy()}


class UnkeptLater(HillClimber):
    """One whose state is right until the first iteration."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({} if self.obs is None else {"obs": [*self.obs[0]]})


class Odd(HillClimber):
    """One with further entries in its state."""

    more: ClassVar[dict[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.more


class Counting(HillClimber):
    """One that has the number of steps under another name."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"steps": state.pop("env_steps")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "env_steps": state["steps"]})


class Averaging(HillClimber):
    """One whose numbers begin as whole ones, and continue as a fraction and as a tensor."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rate: Any = 1
        self.mean: Any = 0

    def train_iteration(self) -> IterationResult:
        result = super().train_iteration()
        self.rate, self.mean = 0.9 * self.rate, 0.9 * self.mean + result.metrics["climb/score"]
        return result

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"rate": self.rate, "mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.rate, self.mean = state["rate"], state["mean"]


class Centred(HillClimber):
    """One whose entry `obs` is the mean of observations, which acting reads."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.mean = np.zeros(len(self.best), np.float32)

    def train_iteration(self) -> IterationResult:
        result = super().train_iteration()
        assert self.obs is not None
        self.mean = self.obs.mean(0)
        return result

    def act(self, obs: np.ndarray) -> np.ndarray:
        return super().act(obs - self.mean)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        last = {"last": state.pop("obs")} if "obs" in state else {}
        return state | last | {"obs": torch.from_numpy(self.mean)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "obs": state.get("last")})
        self.mean = state["obs"].numpy()


ALGO = {"name": "climb", "num_steps": 8, "step_size": 1.0}
VALUES = {"defaults": ["_climb@algo"], "env": {"num_envs": 2}, "algo": ALGO}
WORDS = ["total_env_steps=320", "checkpoint_every=64", "eval_every=64", "eval_episodes=2", "log_every=64"]
WORDS += ["algo=climb", "env=CartPole", "env.max_episode_steps=40", "logger=none", "video_every=0"]
WORDS += ["determinism=fast"]  # which needs no process of its own


@pytest.fixture(autouse=True)
def _the_table_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more algorithm, as an installed package would bring it."""
    use(monkeypatch, HillClimber)


def use(monkeypatch: pytest.MonkeyPatch, kind: type[HillClimber]) -> None:
    """Let a class be the algorithm `climb`."""
    entry = Entry(ClimbConfig, f"{__name__}:{kind.__name__}", needs_discrete=True, values=VALUES)
    monkeypatch.setitem(ALGORITHMS, "climb", entry)


def train(configure: Configure, run_dir: Path, *words: str, resume: bool = False) -> Path:
    """Train or resume a run in this process; its folder."""
    job = replace(job_in(run_dir, configure), config=configure(*WORDS, *words), resume=resume)
    assert worker.run(job) == 0
    return run_dir


@pytest.mark.parametrize("detail", ["iteration", "step"])
def test_it_is_traced_and_resumes_exactly(configure: Configure, tmp_path: Path, detail: str) -> None:
    trace = f"trace={detail}"
    straight, again = (train(configure, tmp_path / name, trace) for name in ("straight", "again"))
    with killed_at(HillClimber, 208):
        train(configure, tmp_path / "resumed", trace)
    resumed = train(configure, tmp_path / "resumed", trace, resume=True)
    assert differences(straight, again) == differences(straight, resumed) == []
    assert compare_runs(straight, resumed).verdict == IDENTICAL
    assert rows(straight)[-1].keys() >= {"climb/score", "eval/return", "episode/return"}
    seed_2 = train(configure, tmp_path / "seed_2", trace, "seed=2")
    assert "first  start/rng/state/inc" in report(compare_runs(straight, seed_2))


def test_a_forgotten_part_of_the_state_is_seen(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, resumed = train(configure, tmp_path / "straight"), tmp_path / "resumed"
    with killed_at(HillClimber, 208):
        train(configure, resumed)
    use(monkeypatch, Forgetful)
    train(configure, resumed, resume=True)
    comparison = compare_runs(straight, resumed)
    assert comparison.verdict == DIVERGED
    first = "diverged in iteration 12 (environment steps 193 to 208): start/rng/state/state"
    assert report(comparison).splitlines()[0] == first


@pytest.mark.parametrize("trace", ["off", "iteration"])
@pytest.mark.parametrize(
    ("kind", "error", "problem"),
    [
        (Unkept, ConfigError, "state/best .* is a numpy.ndarray"),
        (UnkeptLater, RunError, "end/obs/0 .* is a numpy.float32"),
    ],
)
def test_a_state_that_no_checkpoint_keeps_is_refused_at_once(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[HillClimber],
    error: type[Exception],
    problem: str,
    trace: str,
) -> None:
    use(monkeypatch, kind)
    with pytest.raises(error, match=f"{problem}, which a checkpoint does not keep"):
        train(configure, tmp_path / "run", f"trace={trace}")
    assert (tmp_path / "run").exists() == (kind is UnkeptLater)


CYCLE: dict[str, Any] = {}
CYCLE["again"] = CYCLE


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"mixed": {1: 1.0, "a": 2.0}}, ""),
        ({"half of a pair": "\ud800"}, ""),
        ({"odd": {(1, 2): 0}}, r"state/odd .* has the key \(1, 2\), expected a text"),
        ({"cycle": CYCLE}, "is nested too deeply"),
        ({"run": 1}, "has run, an entry of the checkpoint itself"),
        ({"env_steps": 7}, "env_steps in .* is another number"),
    ],
)
def test_odd_states_are_kept_or_refused_in_a_line(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], problem: str
) -> None:
    monkeypatch.setattr(Odd, "more", more)
    use(monkeypatch, Odd)
    algorithm, _ = build(configure(*WORDS))
    try:
        if not problem:
            return check_state(algorithm)
        with pytest.raises(ConfigError, match=problem) as refused:
            check_state(algorithm)
        assert len(str(refused.value).splitlines()) == 1
    finally:
        algorithm.close()


def test_the_number_of_steps_is_kept_for_an_algorithm_that_has_it_under_another_name(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Counting)
    straight = train(configure, tmp_path / "straight")
    resumed = train(configure, tmp_path / "resumed", "total_env_steps=128")
    train(configure, resumed, resume=True)
    assert compare_runs(straight, resumed).verdict == IDENTICAL


def test_a_number_may_become_a_fraction_or_a_tensor(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Averaging)
    straight, resumed = train(configure, tmp_path / "straight"), tmp_path / "resumed"
    with killed_at(HillClimber, 208):
        train(configure, resumed)
    train(configure, resumed, resume=True)
    assert differences(straight, resumed) == []
    assert main(["evaluate", f"run={resumed}", "episodes=1"]) == 0
    assert "1 episodes" in capsys.readouterr().out


def test_a_policy_file_keeps_what_acting_reads_whatever_its_name(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Centred)
    run_dir, file = train(configure, tmp_path / "run"), tmp_path / "policy.zip"
    export_policy(run_dir, file)
    returns = []
    for source in f"run={run_dir}", f"policy={file}":
        assert main(["evaluate", source, "episodes=2", "json=1"]) == 0
        returns.append(json.loads(capsys.readouterr().out)["returns"])
    assert returns[0] == returns[1]
    # One that is not written to its end leaves the earlier one.
    before = file.read_bytes()
    monkeypatch.setattr(zipfile.ZipFile, "writestr", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export_policy(run_dir, file)
    assert file.read_bytes() == before
    assert {*tmp_path.iterdir()} == {file, run_dir}


def test_a_loop_that_ends_by_itself_leaves_a_run_that_resumes(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    loop = project().train

    def early(config: Config, algorithm: Any, observers: Any) -> None:
        loop(replace(config, total_env_steps=64), algorithm, observers)

    with monkeypatch.context() as patch:
        patch.setattr(project(), "train", early)
        run_dir = train(configure, tmp_path / "run")
    assert record(run_dir)["status"] == "interrupted"
    assert "the project's loop has ended after 64 steps by itself" in capfd.readouterr().err
    train(configure, run_dir, resume=True)
    assert record(run_dir)["status"] == "finished"


def test_iterations_take_equal_space_in_a_trace_without_evaluations(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Probed)
    for detail in "iteration", "step":
        run_dir = train(configure, tmp_path / detail, f"trace={detail}")
        lines = (run_dir / paths.TRACE).read_bytes().splitlines()
        ends = [len(line) for line in lines if line.startswith(b'["iteration",')]
        assert len(ends) == 20
        assert max(ends) < 2 * min(ends[1:]), "an iteration takes as many bytes as the one before"
        steps = [line for line in lines if line.startswith(b'["step",')]
        assert len(steps) == (160 if detail == "step" else 0)
        assert b'"act"' not in b"".join(lines)


@pytest.mark.long
def test_commands_read_it(configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "climb-CartPole"
    runs = [train(configure, folder / f"seed-{seed}", f"seed={seed}") for seed in (1, 2)]
    assert [record(run_dir)["status"] for run_dir in runs] == ["finished"] * 2
    assert main(["evaluate", f"run={runs[0]}", "episodes=3"]) == 0
    assert "3 episodes" in capsys.readouterr().out
    assert main(["stats", f"runs={folder}/*"]) == 0
    assert "climb" in capsys.readouterr().out
    assert main(["report", f"runs={folder}/*", f"out={tmp_path / 'report.html'}"]) == 0
    assert "climb" in re.sub(r"climb-CartPole/", "", (tmp_path / "report.html").read_text())


def test_auto_resolves() -> None:
    (config,) = preflight([*WORDS, "num_threads=auto", "compile=auto"]).configs
    assert (config.num_threads, config.compile) == (1, False)
