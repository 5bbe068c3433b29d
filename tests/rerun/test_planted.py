"""Differences planted on purpose: comparing and zooming name the iteration and the item of every one.

A difference is planted while one of two runs is made, and again while zoom runs that one again. All of it
happens in this process, with the real trace, the real comparison and the real replay.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Configure, small

from rltemplate.analysis.compare import compare_runs
from rltemplate.config.command_args import exit_status
from rltemplate.config.loading import to_dict
from rltemplate.config.schema import Config
from rltemplate.determinism import switches
from rltemplate.envs.global_rng import seed_global_rng
from rltemplate.launch.subprocesses import Children
from rltemplate.rerun import replay, zoom
from rltemplate.rerun.recorded_code import Code
from rltemplate.rerun.zoom_report import report
from rltemplate.run.job import JOB_VARIABLE, Job
from rltemplate.run.paths import PROJECT
from rltemplate.run.record import RunRecord
from rltemplate.run.trace import Trace
from rltemplate.train import build_algorithm

WORDS = ["total_env_steps=96", "checkpoint_every=0", "algo.hidden_sizes=[8]", "algo.normalize_obs=true"]


@contextlib.contextmanager
def planted_fault(text: str) -> Iterator[pytest.MonkeyPatch]:
    """One value flipped in its last bit: see tests/faults; nothing where `text` is empty."""
    with pytest.MonkeyPatch.context() as patch:
        if text:
            patch.setenv("ATEN_TEST_FAULT", text)
        yield patch


def made(folder: Path, config: Config, fault: str = "") -> Path:
    """The folder of a run, with what comparing and zooming read of it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    with planted_fault(fault):
        seed_global_rng(config.seed)
        algorithm, _ = build_algorithm(config)
        algorithm.probe = trace = Trace(folder, config.trace.name, config.algo.name)
        while algorithm.env_steps < config.total_env_steps:
            trace.begin(algorithm)
            result = algorithm.train_iteration()
            trace.end(algorithm, result.metrics)
        algorithm.close()
        trace.lines.close()
    RunRecord(id=folder.name, status="finished").write(folder)
    return folder


# Algorithm, a value of the configuration or a bit flipped at `item@iteration:number`, the item to be named
# (of a flipped bit its own), and further words.
DAILY = [  # one of each kind
    ("ppo", "start/return_norm/num_rows@1", "", ""),
    ("sac", "draw/replay@1:3", "", ""),
    ("ppo", "algo.gamma=0.5", "scaled_reward", ""),
    ("ppo", "next_obs@1:3", "", "trace=step"),
]
OTHERS = [
    ("ppo", "advantage@1", "", ""),
    ("ppo", "algo.hidden_sizes=[9]", "start/net/mu", ""),
    ("ppo", "+env.kwargs.g=9.0", "next_obs", ""),
    ("ppo", "algo.max_grad_norm=0.01", "mu", ""),
    ("sac", "algo.tau=0.5", "target", ""),
    ("sac", "algo.target_entropy=-3.0", "actor_metrics", ""),
    ("sac", "algo.batch_size=9", "draw/replay", ""),
    ("sac", "critic/mu@2:5", "", "trace=step"),
    ("sac", "algo.tau=0.5", "target", "trace=step compile=true"),
]


@pytest.mark.parametrize(
    ("algo", "difference", "item", "words"),
    [*DAILY, *(pytest.param(*each, marks=pytest.mark.long) for each in OTHERS)],
)
def test_what_was_planted_is_named(
    configure: Configure, tmp_path: Path, monkeypatch: Any, algo: str, difference: str, item: str, words: str
) -> None:
    """With a line for each iteration: then the item, or that it has followed from something in there."""
    fault, other, iteration = "", [difference], 0
    if "@" in difference:
        fault, other = difference, []
        item, _, place = difference.partition("@")
        iteration = int(place.partition(":")[0])

    def run(
        _: object, command: Sequence[str], environment: Mapping[str, str], log: Path, **__: object
    ) -> int:
        assert command[-2] == replay.__name__
        request = replay.Request(**json.loads(command[-1]))
        with planted_fault(fault if log.parent.name == "b" else "") as patch, log.open("w") as file:
            patch.setenv(JOB_VARIABLE, environment[JOB_VARIABLE])
            with contextlib.redirect_stderr(file):
                return exit_status(lambda: replay.replay(Job.from_environment(), request))

    monkeypatch.setattr(switches, "apply", lambda *_: {})  # of the whole process
    monkeypatch.setattr(Children, "run", run)
    code = "0" * 40, PROJECT, (), tmp_path  # the present one
    monkeypatch.setattr(
        zoom, "recorded_code", lambda _, record, *__: contextlib.nullcontext(Code(record, *code))
    )
    both = small(algo, *WORDS, "algo.normalize_reward=true", *words.split(), env="Pendulum")
    a = made(tmp_path / "a", configure(*both))
    comparison = compare_runs(a, made(tmp_path / "b", configure(*both, *other), fault))
    at = comparison.divergence
    assert at is not None
    assert at.iteration == iteration
    if at.item != item:
        assert not words
        told = "first of the list need not be the first in time" in " ".join(comparison.look_at)
        assert told == bool(at.further)
    found = zoom.zoom_in(comparison)
    assert report(found)
    assert (found.iteration, found.first) == (iteration, item)
    assert not item.startswith("start/") or (found.finding and found.finding.kind == "between")
