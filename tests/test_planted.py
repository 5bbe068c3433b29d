"""Differences planted on purpose: comparing and zooming name the iteration and the item of every one.

A difference is planted while one of two runs is made, and again while zoom runs that one again. All of it
happens in this process, with the real trace, the real comparison and the real replay.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from conftest import SHRUNK, Configure

from rltemplate import replay, zoom
from rltemplate.analysis.compare import compare_runs
from rltemplate.config import Config, to_dict
from rltemplate.foreign_rng import seed_foreign_code
from rltemplate.run import determinism
from rltemplate.run.faults import VARIABLE as FAULT
from rltemplate.run.record import SCHEMA_VERSION
from rltemplate.train import build_algorithm, make_trace, watched
from rltemplate.zoom import Zoom, zoom_in

WORDS = {
    "ppo": ["algo=ppo", "env=Pendulum", *SHRUNK["ppo"], "total_env_steps=96"],
    "sac": ["algo=sac", "env=Pendulum", *SHRUNK["sac"], "total_env_steps=72", "algo.hidden_sizes=[16,16]"],
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
        algorithm.probe, injected = watched(trace)
        while algorithm.env_steps < config.total_env_steps:
            result = algorithm.train_iteration()
            trace.end_iteration(algorithm, result.probes)
        algorithm.close()
        trace.close()
        assert injected is None or injected.done
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


Look = Callable[..., Zoom]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Make two runs, the second with a difference, and zoom in on it."""
    monkeypatch.setattr(determinism, "apply", lambda *_: {})  # of the whole process

    def closer(config: Config, plant: Plant, other: Config | None = None) -> Zoom:
        monkeypatch.setattr(zoom, "Children", Here({"a": nothing, "b": plant}))
        a, b = made(tmp_path / "a", config), made(tmp_path / "b", other or config, plant)
        found = zoom_in(compare_runs(a, b))
        assert zoom.report(found)
        return found

    return closer


def fault(text: str) -> Plant:
    """One value flipped in its last bit."""

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FAULT, text)
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
    found = look(config, fault(item))
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
    found = look(configure(*WORDS[algo], f"trace={detail}", "checkpoint_every=0"), fault(item))
    assert (found.a.problem, found.b.problem) == (None, None)
    assert f"{found.first}@{found.iteration}" == item
    assert found.finding is not None
    assert found.finding.kind == zoom.BETWEEN
