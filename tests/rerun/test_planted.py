"""Differences planted on purpose: comparing and zooming name the iteration and the item of every one.

A difference is planted while one of two runs is made, and again while zoom runs that one again. All of it
happens in this process, with the real trace, the real comparison and the real replay.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, SHRUNK, Configure

from rltemplate.algos.build import build_algorithm
from rltemplate.analysis.compare import Comparison, compare_runs
from rltemplate.config.loading import to_dict
from rltemplate.config.schema import Config
from rltemplate.determinism import switches
from rltemplate.envs.global_rng import seed_global_rng
from rltemplate.rerun import replay, zoom
from rltemplate.rerun.operations import BETWEEN, UNSEEN
from rltemplate.rerun.zoom import zoom_in
from rltemplate.rerun.zoom_report import Zoom, report
from rltemplate.run.git import changes
from rltemplate.run.job import JOB_VARIABLE
from rltemplate.run.observers import make_trace
from rltemplate.run.record import SCHEMA_VERSION

WORDS = {
    "ppo": ["algo=ppo", "env=Pendulum", *SHRUNK["ppo"], "total_env_steps=96", "algo.hidden_sizes=[8]"],
    "sac": ["algo=sac", "env=Pendulum", *SHRUNK["sac"], "total_env_steps=72", "algo.hidden_sizes=[8]"],
}
NORMALIZED = {
    "ppo": ["algo.normalize_obs=true", "algo.normalize_reward=true"],
    "sac": ["algo.normalize_obs=true"],
}

Plant = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """No difference."""
    yield


def fault(text: str) -> Plant:
    """One value flipped in its last bit: see tests/faults."""

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ATEN_TEST_FAULT", text)
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


def made(folder: Path, config: Config, plant: Plant = nothing) -> Path:
    """The folder of a run, with what comparing and zooming read of it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    with plant():
        seed_global_rng(config.seed)
        algorithm, _ = build_algorithm(config)
        trace = make_trace(config, folder)
        assert trace is not None
        algorithm.probe = trace
        while algorithm.env_steps < config.total_env_steps:
            result = algorithm.train_iteration()
            trace.end_iteration(algorithm, result.metrics)
        algorithm.close()
        trace.close()
    record = {"schema": SCHEMA_VERSION, "id": folder.name, "status": "finished"}
    (folder / "record.json").write_text(json.dumps(record))
    return folder


class Here:
    """Stands for `Children`, with calls in the place of processes."""

    def __init__(self, plants: Mapping[str, Plant]) -> None:
        self.plants = plants

    def __call__(self) -> Here:
        return self

    def listening(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def check(self) -> None:
        pass

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path, **_: object) -> int:
        assert command[-2] == replay.__name__
        with self.plants[log.parent.name](), pytest.MonkeyPatch.context() as patch, log.open("w") as file:
            patch.setenv(JOB_VARIABLE, environment[JOB_VARIABLE])
            with contextlib.redirect_stderr(file):
                return replay.main(command[-1])


Look = Callable[..., tuple[Comparison, Zoom]]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Make two runs, the second with a difference, compare them, and look closely."""
    monkeypatch.setattr(switches, "apply", lambda *_: {})  # of the whole process

    def closer(
        config: Config, plant: Plant, other: Config | None = None, code: str = ""
    ) -> tuple[Comparison, Zoom]:
        monkeypatch.setattr(zoom, "Children", Here({"a": nothing, "b": plant}))
        monkeypatch.setattr(changes, "files_between", lambda *_: [code] if code else [])
        comparison = compare_runs(made(tmp_path / "a", config), made(tmp_path / "b", other or config, plant))
        found = zoom_in(comparison)
        assert report(found)
        return comparison, found

    return closer


@dataclass(frozen=True)
class Planted:
    """A difference, and the iteration and the item that are to be named.

    `difference` is a flipped bit (`reward@1:6`), a value of the configuration (`algo.gamma=0.5`), or another
    line: file, function, old and new text.
    """

    algo: str
    iteration: int
    item: str
    difference: str | tuple[str, str, str, str]
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        difference = self.difference
        return f"{self.algo} {difference if isinstance(difference, str) else difference[3]}"

    @property
    def plant(self) -> Plant:
        """The difference, if the configuration does not make it."""
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


PPO, SAC, NORM = "algos/ppo.py", "algos/sac.py", "learning/normalize.py"
ENDING = ("env=CartPole", "env.max_episode_steps=22", "algo.num_steps=32")
PPO_FLIPS = (
    *("next_obs@1:3", "terminated@1:4", "draw/action@2:5", "action@1:2", "advantage@1"),
    *("log_prob@1:9", "normalized_obs@2:1", "draw/minibatch@1:1", "nu@1:2", "params@1:5"),
    *("start/net/steps@1", "start/net/params@2", "start/streams/minibatch@1", "start/return_norm/num_rows@1"),
    "start/net/params@0",
)
SAC_FLIPS = (
    *("next_obs@1:1", "draw/replay@1:3", "target@1:5"),
    *("critic/params@1:3", "alpha/params@1:11", "start/updates_due@2", "start/streams/replay@1"),
    *("start/obs_norm/num_rows@2", "start/learned/alpha/params@0"),
)
PLANTED = [
    *(flip("ppo", text) for text in PPO_FLIPS),
    *(flip("sac", text) for text in SAC_FLIPS),
    Planted("ppo", 0, "start/net/mu", "algo.hidden_sizes=[9]"),
    Planted("ppo", 0, "next_obs", "+env.kwargs.g=9.0"),
    Planted("ppo", 0, "scaled_reward", "algo.gamma=0.5"),
    Planted("ppo", 0, "metrics", "algo.vf_coef=0.25"),
    Planted("ppo", 0, "mu", "algo.max_grad_norm=0.01"),
    Planted("sac", 0, "target", "algo.tau=0.5"),
    Planted("sac", 0, "actor_metrics", "algo.target_entropy=-3.0"),
    Planted("sac", 0, "draw/replay", "algo.batch_size=9"),
    Planted("ppo", 0, "advantage", (PPO, "compute_gae", "(1.0 - terminated) * next", "next"), ENDING),
    Planted("ppo", 0, "advantage", (PPO, "compute_gae", "(1.0 - done)", "(1.0 - 0.0 * done)"), ENDING),
    Planted(
        "ppo",
        0,
        "end/obs_norm/mean",
        (NORM, "Statistics.merged", "delta * share, var", "delta * share / 2, var"),
    ),
    Planted("sac", 0, "td_target", (SAC, "SAC.critic_loss", "* next_log_prob", "* next_log_prob * 0.9")),
]
# One of each kind on every day, the others take too long.
DEFAULT = ("ppo start/return_norm/num_rows@1", "sac draw/replay@1:3", "ppo algo.gamma=0.5")


def tiers() -> list[Any]:
    """All of the table, and the marks of the others."""
    long = [() if str(each) in DEFAULT else (pytest.mark.long,) for each in PLANTED]
    return [pytest.param(each, marks=marks, id=str(each)) for each, marks in zip(PLANTED, long, strict=True)]


@pytest.mark.parametrize("planted", tiers())
def test_what_was_planted_is_named(configure: Configure, look: Look, planted: Planted) -> None:
    """With a line for each iteration: then the item, or that it has followed from something in there."""
    config, other = planted.configs(configure, "trace=iteration")
    changed = "" if isinstance(planted.difference, str) else f"rltemplate/{planted.difference[0]}"
    comparison, found = look(config, planted.plant, other, code=changed)
    at = comparison.divergence
    assert at is not None
    assert at.iteration == planted.iteration
    if at.item != planted.item:
        assert "first of the list need not be the first in time" in " ".join(comparison.look_at)
    assert (found.iteration, found.first) == (planted.iteration, planted.item)
    if planted.item.startswith("start/"):
        assert found.finding is not None
        assert found.finding.kind == (BETWEEN if planted.iteration else UNSEEN)
    if not isinstance(planted.difference, str) and planted.difference[0] != NORM:
        old = planted.difference[2]
        line = (ROOT / changed).read_text().partition(old)[0].count("\n") + 1
        assert found.finding is not None
        assert found.finding.operation is not None
        assert found.finding.operation.source[0].startswith(f"{changed}:{line} ")


@pytest.mark.parametrize(
    "planted",
    [
        flip("ppo", "next_obs@1:3"),
        pytest.param(flip("sac", "critic/mu@2:5"), marks=pytest.mark.long),
        pytest.param(Planted("sac", 0, "target", "algo.tau=0.5"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_what_was_planted_is_named_step_by_step(configure: Configure, look: Look, planted: Planted) -> None:
    config, other = planted.configs(configure, "trace=step")
    comparison, found = look(config, planted.plant, other)
    assert comparison.divergence is not None
    assert (comparison.divergence.item, found.first) == (planted.item, planted.item)
    assert (found.iteration, planted.iteration) == (planted.iteration, comparison.divergence.iteration)


@pytest.mark.long
@pytest.mark.parametrize(
    "planted", [flip("ppo", "next_obs@1:6"), Planted("sac", 0, "target", "algo.tau=0.5")], ids=str
)
def test_what_was_planted_in_a_compiled_run_is_named(
    configure: Configure, look: Look, planted: Planted
) -> None:
    config, other = planted.configs(configure, "trace=step", "compile=true")
    comparison, found = look(config, planted.plant, other)
    assert comparison.divergence is not None
    assert (comparison.divergence.item, found.first) == (planted.item, planted.item)
