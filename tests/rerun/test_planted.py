"""Differences planted on purpose: comparing and zooming name the iteration and the item of every one.

A difference is planted while one of two runs is made, and again while zoom runs that one again. All of it
happens in this process, with the real trace, the real comparison and the real replay.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, SHRUNK, Configure

from rltemplate.analysis.compare import Comparison, compare_runs, report
from rltemplate.config.loading import to_dict
from rltemplate.config.schema import Config
from rltemplate.determinism import switches
from rltemplate.envs.global_rng import seed_foreign_code
from rltemplate.rerun import recorded_code, replay, zoom
from rltemplate.rerun.zoom import Zoom, zoom_in
from rltemplate.run.record import SCHEMA_VERSION
from rltemplate.train import build_algorithm, make_trace

FAULT = "RLTEMPLATE_FAULT"
WORDS = {
    "ppo": ["algo=ppo", "env=Pendulum", *SHRUNK["ppo"], "total_env_steps=96", "algo.hidden_sizes=[8]"],
    "sac": ["algo=sac", "env=Pendulum", *SHRUNK["sac"], "total_env_steps=72", "algo.hidden_sizes=[8]"],
}

Plant = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """No difference."""
    yield


def made(folder: Path, config: Config, plant: Plant = nothing) -> Path:
    """The folder of a run, with what comparing and zooming read of it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    with plant():
        environment = {name: os.environ[name] for name in (FAULT,) if name in os.environ}
        seed_foreign_code(config.seed)
        algorithm, _ = build_algorithm(config)
        trace = make_trace(config, folder)
        assert trace is not None
        algorithm.probe = trace
        while algorithm.env_steps < config.total_env_steps:
            result = algorithm.train_iteration()
            trace.end_iteration(algorithm, result.probes)
        algorithm.close()
        trace.close()
    record = {"schema": SCHEMA_VERSION, "status": "finished", "git": {}, "environment": environment}
    (folder / "record.json").write_text(json.dumps(record))
    return folder


class Here:
    """What starts processes, for processes that are only calls."""

    def __init__(self, plants: Mapping[str, Plant]) -> None:
        self.plants = plants

    def __call__(self) -> Here:
        return self

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        yield

    def check(self) -> None:
        pass

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        assert list(command)[-1] == replay.MODULE
        told = {name: value for name, value in environment.items() if name.startswith("RLTEMPLATE_")}
        with self.plants[log.parent.name](), pytest.MonkeyPatch.context() as patch, log.open("w") as file:
            for name, value in told.items():
                patch.setenv(name, value)
            with contextlib.redirect_stderr(file):
                return replay.main()


Look = Callable[..., tuple[Comparison, Zoom | None]]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Make two runs, the second with a difference, and compare them, with a closer look if wanted."""
    monkeypatch.setattr(switches, "apply", lambda *_: {})  # of the whole process

    def closer(
        config: Config, plant: Plant, other: Config | None = None, closely: bool = True, code: str = ""
    ) -> tuple[Comparison, Zoom | None]:
        monkeypatch.setattr(zoom, "Children", Here({"a": nothing, "b": plant}))
        monkeypatch.setattr(recorded_code, "files_apart", lambda *_: [code] if code else [])
        a, b = made(tmp_path / "a", config), made(tmp_path / "b", other or config, plant)
        comparison = compare_runs(a, b)
        assert report(comparison)
        found = zoom_in(comparison) if closely else None
        assert found is None or zoom.report(found)
        return comparison, found

    return closer


def fault(text: str) -> Plant:
    """One value flipped in its last bit."""

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FAULT, text)
            yield

    return planted


def code(file: str, name: str, old: str, new: str) -> Plant:
    """Another line in a function or a method of a module of the package."""
    module = importlib.import_module(f"rltemplate.{file.removesuffix('.py').replace('/', '.')}")
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        other = types.ModuleType(module.__name__)
        exec(compile(text.replace(old, new), str(module.__file__), "exec"), other.__dict__)
        *way, last = name.split(".")
        holder, changed = (functools.reduce(getattr, way, each) for each in (module, other))
        function = getattr(changed, last)
        if function.__closure__ is None:  # no decorator: it can use what is in the module itself
            function = types.FunctionType(function.__code__, module.__dict__, last, function.__defaults__)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, last, function)
            yield

    return planted


@pytest.mark.parametrize(
    ("detail", "item"),
    [
        ("step", "next_obs@1:3"),
        pytest.param("iteration", "next_obs@1:3", marks=pytest.mark.long),
        pytest.param("step", "critic/target@2:5", marks=pytest.mark.long),
        pytest.param("iteration", "critic/target@2:5", marks=pytest.mark.long),
    ],
)
def test_a_run_of_sac_is_run_again_event_by_event(
    configure: Configure, look: Look, detail: str, item: str
) -> None:
    config = configure(*WORDS["sac"], f"trace={detail}", "checkpoint_every=0")
    _, found = look(config, fault(item))
    assert found is not None
    name, _, place = item.partition("@")
    assert (found.a.problem, found.b.problem) == (None, None)
    assert (f"{found.iteration}:{found.index}", found.first) == (place, name)


@pytest.mark.parametrize(
    ("algo", "item", "detail"),
    [
        ("ppo", "start/adam/2@1", "iteration"),
        pytest.param("ppo", "start/net@1", "step", marks=pytest.mark.long),
        pytest.param("sac", "start/updates_due@2", "iteration", marks=pytest.mark.long),
    ],
)
def test_what_changed_between_two_iterations_is_blamed_on_neither(
    configure: Configure, look: Look, algo: str, item: str, detail: str
) -> None:
    _, found = look(configure(*WORDS[algo], f"trace={detail}", "checkpoint_every=0"), fault(item))
    assert found is not None
    assert (found.a.problem, found.b.problem) == (None, None)
    assert f"{found.first}@{found.iteration}" == item
    assert found.finding is not None
    assert found.finding.kind == zoom.BETWEEN


# --- The table -------------------------------------------------------------------------------------------

Change = tuple[str, str, str, str]  # file, function, and what stands there instead of what
PPO, SAC, NORM, BUFFER = "algos/ppo.py", "algos/sac.py", "normalize.py", "buffers.py"
ENDING = ["env=CartPole", "env.max_episode_steps=22", "algo.num_steps=32"]
NORMALIZED = {
    "ppo": ["algo.normalize_obs=true", "algo.normalize_reward=true"],
    "sac": ["algo.normalize_obs=true"],
}


@dataclass(frozen=True)
class Planted:
    """A difference, and the iteration and the item that are to be named.

    `difference` is a flipped bit (`reward@1:6`), a value of the configuration or a change of the code.
    `words` are those of both runs.
    """

    algo: str
    iteration: int
    item: str
    difference: str | Change
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        difference = self.difference
        return f"{self.algo} {difference if isinstance(difference, str) else difference[3]}"

    @property
    def plant(self) -> Plant:
        """What makes the difference, if the configuration does not."""
        if not isinstance(self.difference, str):
            return code(*self.difference)
        return nothing if "=" in self.difference else fault(self.difference)

    def configs(self, configure: Configure, *words: str) -> list[Config]:
        """Of both runs."""
        both = [*WORDS[self.algo], *NORMALIZED[self.algo], "checkpoint_every=0", *self.words, *words]
        own = [self.difference] if isinstance(self.difference, str) and "=" in self.difference else []
        return [configure(*both), configure(*both, *own)]


def flip(algo: str, text: str) -> Planted:
    item, _, place = text.partition("@")
    return Planted(algo, int(place.partition(":")[0]), item, text)


def changes(algo: str, file: str, name: str, item: str, old: str, new: str, *words: str) -> list[Planted]:
    return [Planted(algo, 0, item, (file, name, old, new), words)]


DRAW = "self.adam = state; torch.randperm(2, generator=shuffle)"
# Functions in which a change is found to the line.
LINES = ("compute_gae", "PPO._scaled_reward", "PPO._targets", "ppo_loss", "critic_loss")
OLDER = "learner.critic, config.tau"
PPO_FLIPS = (
    *("init/actor.0.weight@0", "init/log_std@0", "obs@1:3", "reward@1:6", "terminated@1:4", "noise@2:5"),
    *("action@1:2", "log_prob@1:9", "normalized_obs@2:1", "value@1", "order@1:1", "gradient@1:6"),
    *("optimizer/nu@1:2", "params@1:5", "obs_norm/var@1", "return_norm/mean@1", "start/adam/2@1"),
    *("start/net@2", "start/streams/minibatch@1", "start/return_norm/count@1", "start/running_return@1"),
)
SAC_FLIPS = (
    *("init/log_alpha@0", "obs@1:3", "action@1:2", "noise@2:4", "reward@1:5", "next_obs@1:1"),
    *("replay_index@1:3", "update_noise@1:4", "critic/target@1:6", "critic/loss@1:4"),
    *("critic/optimizer/mu@1:23", "critic/target_params@1:5", "actor/loss@1:3", "actor/params@1:1"),
    *("alpha/log_alpha@1:23", "obs_norm/mean@1", "start/updates_due@2", "start/learner/alpha_adam/2@1"),
    *("start/learner/target@2", "start/num_updates@1", "start/streams/replay@1", "start/obs_norm/count@2"),
)
PLANTED = [
    *(flip("ppo", text) for text in PPO_FLIPS),
    *(flip("sac", text) for text in SAC_FLIPS),
    Planted("ppo", 0, "init/actor.0.weight", "seed=2"),
    Planted("ppo", 0, "init/actor.0.weight", "algo.hidden_sizes=[9]"),
    Planted("ppo", 0, "init/log_std", "algo.log_std_init=-1.0"),
    Planted("ppo", 0, "next_obs", "+env.kwargs.g=9.0"),
    Planted("ppo", 0, "scaled_reward", "algo.gamma=0.5"),
    Planted("ppo", 0, "advantage", "algo.gae_lambda=0.5"),
    Planted("ppo", 0, "gradient", "algo.vf_coef=0.25"),
    Planted("ppo", 0, "optimizer/mu", "algo.max_grad_norm=0.01"),
    Planted("ppo", 0, "params", "algo.learning_rate=0.1"),
    Planted("sac", 0, "init/log_alpha", "algo.alpha_init=0.5"),
    Planted("sac", 0, "critic/target", "algo.gamma=0.5"),
    Planted("sac", 0, "critic/target_params", "algo.tau=0.5"),
    Planted("sac", 0, "critic/params", "algo.critic_learning_rate=0.1"),
    Planted("sac", 0, "actor/params", "algo.actor_learning_rate=0.1"),
    Planted("sac", 0, "alpha/loss", "algo.target_entropy=-3.0"),
    Planted("sac", 0, "replay_index", "algo.batch_size=9"),
    *changes("ppo", PPO, "compute_gae", "advantage", "(1.0 - terminated) * next", "next", *ENDING),
    *changes("ppo", PPO, "compute_gae", "advantage", "(1.0 - done)", "(1.0 - 0.0 * done)", *ENDING),
    *changes("ppo", PPO, "PPO._scaled_reward", "scaled_reward", "1.0 - torch", "1.0 - 0.0 * torch", *ENDING),
    *changes("ppo", PPO, "PPO._targets", "advantage", "final  # the", "0.0  # the", *ENDING),
    *changes("ppo", PPO, "ppo_loss", "loss", "(advantage - advantage.mean()) /", "advantage /"),
    *changes("ppo", NORM, "RunningNorm.update", "obs_norm/mean", "delta * share)", "delta * share * 0.5)"),
    *changes("ppo", NORM, "RunningNorm.update", "end/obs_norm/count", "copy_(total)", "copy_(total + 1)"),
    *changes("ppo", PPO, "PPO._learn", "end/streams/minibatch", "self.adam = state", DRAW),
    *changes("sac", SAC, "SAC._one_full_update", "actor/loss", "batch.obs, draw)", "batch.next_obs, draw)"),
    *changes("sac", SAC, "SAC._one_critic_update", "critic/target_params", "critic, config.tau", OLDER),
    *changes("sac", SAC, "critic_loss", "critic/target", "* next_log_prob", "* next_log_prob * 0.9"),
    *changes("sac", BUFFER, "ReplayBuffer.add", "critic/target", "start, reward)", "start, reward * 2)"),
    *changes("sac", SAC, "SAC._due_updates", "end/updates_due", "_due -= due", "_due -= due - 1e-9"),
]
DEFAULT = ("ppo start/return_norm/count@1", "sac replay_index@1:3", "ppo algo.gamma=0.5")


def tiers() -> list[Any]:
    """All of the table, and which of it takes too long for every day."""
    long = [() if str(each) in DEFAULT else (pytest.mark.long,) for each in PLANTED]
    return [pytest.param(each, marks=marks, id=str(each)) for each, marks in zip(PLANTED, long, strict=True)]


@pytest.mark.parametrize("planted", tiers())
def test_what_was_planted_is_named(configure: Configure, look: Look, planted: Planted) -> None:
    """With a line for each iteration: then the item, or that it has followed from something in there."""
    config, other = planted.configs(configure, "trace=iteration")
    changed = f"rltemplate/{planted.difference[0]}" if isinstance(planted.difference, tuple) else ""
    comparison, found = look(config, planted.plant, other, code=changed)
    at = comparison.divergence
    assert at is not None
    assert at.iteration == planted.iteration
    if at.item != planted.item:
        assert "first of the list need not be the first in time" in " ".join(comparison.look_at)
    assert found is not None
    assert (found.a.problem, found.b.problem) == (None, None)
    assert (found.iteration, found.first) == (planted.iteration, planted.item)
    if isinstance(planted.difference, tuple) and planted.difference[1] in LINES:
        file, _, old, _ = planted.difference
        line = (ROOT / "rltemplate" / file).read_text().partition(old)[0].count("\n") + 1
        assert found.finding is not None
        assert found.finding.operation is not None
        assert found.finding.operation.source[0].startswith(f"rltemplate/{file}:{line} ")


@pytest.mark.parametrize("planted", tiers())
def test_what_was_planted_is_named_step_by_step(configure: Configure, look: Look, planted: Planted) -> None:
    config, other = planted.configs(configure, "trace=step")
    comparison, _ = look(config, planted.plant, other, closely=False)
    at = comparison.divergence
    assert at is not None
    assert (at.iteration, at.item) == (planted.iteration, planted.item)


COMPILED = [
    Planted("ppo", 1, "reward", "reward@1:6"),
    Planted("ppo", 1, "start/net", "start/net@1"),
    Planted("ppo", 0, "advantage", "algo.gae_lambda=0.5"),
    Planted("ppo", 0, "loss", "algo.vf_coef=0.25"),  # with the norm of the gradient
    Planted("sac", 1, "next_obs", "next_obs@1:1"),
    Planted("sac", 1, "replay_index", "replay_index@1:3"),
    Planted("sac", 0, "critic/target_params", "algo.tau=0.5"),
]


@pytest.mark.long
@pytest.mark.parametrize("planted", COMPILED, ids=str)
def test_what_was_planted_in_a_compiled_run_is_named(
    configure: Configure, look: Look, planted: Planted
) -> None:
    config, other = planted.configs(configure, "trace=step", "compile=true")
    comparison, found = look(config, planted.plant, other)
    at = comparison.divergence
    assert at is not None
    assert found is not None
    assert (at.iteration, at.item) == (found.iteration, found.first) == (planted.iteration, planted.item)
