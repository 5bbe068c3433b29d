"""Differences planted on purpose: comparing and zooming name the iteration and the item of every one.

A difference is planted while one of two runs is made, and again while zoom runs that one again. All of it
happens in this process, with the real trace, the real comparison and the real replay.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import Configure, build, small
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rltemplate.learning import on_policy
from rltemplate.learning.normalize import RunningMeanStd
from runlab.analysis.compare import compare_runs
from runlab.config.command_args import exit_status
from runlab.config.loading import to_dict
from runlab.config.schema import Config
from runlab.determinism import switches
from runlab.envs.global_rng import seed_global_rng
from runlab.interfaces import attach_probe
from runlab.launch.subprocesses import Children
from runlab.rerun import replay, zoom
from runlab.rerun.recorded_code import Code
from runlab.rerun.zoom_report import report
from runlab.run.job import JOB_VARIABLE, Job
from runlab.run.paths import PROJECT
from runlab.run.record import RunRecord
from runlab.run.trace import TraceWriter

WORDS = ["total_env_steps=96", "checkpoint_every=0", "algo.hidden_sizes=[8]", "algo.normalize_obs=true"]


@contextlib.contextmanager
def planted_fault(text: str) -> Iterator[pytest.MonkeyPatch]:
    """One value flipped in its last bit: see tests/faults; nothing where `text` is empty."""
    with pytest.MonkeyPatch.context() as patch:
        if text:
            patch.setenv("ATEN_TEST_FAULT", text)
        yield patch


Planted = Callable[[], contextlib.AbstractContextManager[Any]]


def made(folder: Path, config: Config, planted: Planted = contextlib.nullcontext) -> Path:
    """The folder of a run, with what comparing and zooming read of it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    with planted():
        seed_global_rng(config.seed)
        algorithm, _ = build(config)
        trace = TraceWriter(folder, config.trace.name, config.algo.name)
        attach_probe(algorithm, trace)
        while algorithm.env_steps < config.total_env_steps:
            trace.begin(algorithm)
            result = algorithm.train_iteration()
            trace.end(algorithm, result.metrics)
        algorithm.close()
        trace.lines.close()
    RunRecord(id=folder.name, status="finished").write(folder)
    return folder


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Planted]:
    """Zoom runs both runs again in this process, each with what is planted for its name."""
    planted: dict[str, Planted] = {}

    def run(
        _: object, command: Sequence[str], environment: Mapping[str, str], log: Path, **__: object
    ) -> int:
        assert command[-2] == replay.__name__
        request = replay.Request.parse(command[-1])
        with contextlib.ExitStack() as stack:
            stack.enter_context(planted.get(log.parent.name, contextlib.nullcontext)())
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv(JOB_VARIABLE, environment[JOB_VARIABLE])
            stack.enter_context(contextlib.redirect_stderr(stack.enter_context(log.open("w"))))
            return exit_status(lambda: replay.replay(Job.from_environment(), request))

    monkeypatch.setattr(switches, "apply", lambda *_: {})  # of the whole process
    monkeypatch.setattr(Children, "run", run)
    code = "0" * 40, PROJECT, (), tmp_path  # the present one
    monkeypatch.setattr(
        zoom, "recorded_code", lambda _, record, *__: contextlib.nullcontext(Code(record, *code))
    )
    return planted


# Algorithm, a value of the configuration or a bit flipped at `item@iteration:number`, the item to be named
# (of a flipped bit its own; none where a condition differs), and further words.
CASES: list[Any] = [
    ("ppo", "start/return_norm/num_rows@1", "", ""),
    ("sac", "draw/replay@1:3", "", ""),
    ("ppo", "algo.target_kl=1e-9", "", ""),
    ("ppo", "next_obs@1:3", "", "trace=step"),
    ("ppo", "advantage@1", "", ""),
    ("ppo", "algo.hidden_sizes=[9]", "start/net/mu", ""),
    ("ppo", "+env.kwargs.g=9.0", "next_obs", ""),
    ("ppo", "algo.max_grad_norm=0.01", "mu", ""),
    ("sac", "algo.tau=0.5", "target", ""),
    ("sac", "algo.target_entropy=-3.0", "actor_metrics", ""),
    ("sac", "algo.batch_size=9", "draw/replay", ""),
    ("sac", "critic/mu@2:5", "", "trace=step"),
    pytest.param("sac", "algo.tau=0.5", "target", "trace=step compile=true", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("algo", "difference", "item", "words"), CASES)
def test_what_was_planted_is_named(
    configure: Configure,
    tmp_path: Path,
    in_this_process: dict[str, Planted],
    algo: str,
    difference: str,
    item: str,
    words: str,
) -> None:
    """With a line for each iteration: then the item, or that it has followed from something in there."""
    fault, other, iteration = "", [difference], 0
    if "@" in difference:
        fault, other = difference, []
        item, _, place = difference.partition("@")
        iteration = int(place.partition(":")[0])

    in_this_process["b"] = partial(planted_fault, fault)
    both = small(algo, *WORDS, "algo.normalize_reward=true", *words.split(), env="Pendulum")
    a = made(tmp_path / "a", configure(*both))
    comparison = compare_runs(a, made(tmp_path / "b", configure(*both, *other), in_this_process["b"]))
    at = comparison.divergence
    assert at is not None
    assert at.iteration == iteration
    if at.item != item:
        assert not words
        advised = "first of the list need not be the first in time" in " ".join(comparison.look_at)
        assert advised == bool(at.further)
    zoomed = zoom.zoom_in(comparison)
    said = "so it was a condition or a setting that differed" in " ".join(report(zoomed).split())
    assert (zoomed.iteration, zoomed.first, said) == (iteration, item or None, not item)
    assert not item.startswith("start/") or (zoomed.finding and zoomed.finding.kind == "between")


def test_the_operation_is_named_with_its_arguments_and_the_line_that_called_it(
    configure: Configure, tmp_path: Path, in_this_process: dict[str, Planted]
) -> None:
    both = small("ppo", *WORDS, "trace=step", env="Pendulum")
    a, b = (
        made(tmp_path / name, configure(*both, f"algo.gamma={x}")) for name, x in (("a", 0.5), ("b", 0.75))
    )
    zoomed = zoom.zoom_in(compare_runs(a, b))
    finding = zoomed.finding
    assert finding is not None
    assert finding.a is not None
    assert finding.b is not None
    assert (zoomed.first, finding.kind) == ("scaled_reward", "arguments")
    assert finding.b.arguments == finding.a.arguments.replace("0.5", "0.75")
    line = "keep = self.config.gamma * (1.0 - torch.maximum(rollout.terminated, rollout.truncated))"
    number = inspect.getsource(on_policy).splitlines().index(f"        {line}") + 1
    place = f"rltemplate/learning/on_policy.py:{number} in scaled_reward: {line}"
    assert [side.source[0] for side in (finding.a, finding.b)] == [place] * 2
    # The operation runs before the event begins in which its result is traced.
    assert finding.logged_from == "collect 1"


@pytest.mark.parametrize("by", ["the algorithm", "the compiler"])
def test_compiled_runs_are_explained_without_the_compiler(
    by: str,
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_this_process: dict[str, Planted],
) -> None:
    """The compiler is replaced by one whose programs log no operations."""
    wrong = False

    def compiled(function: Any, **_: Any) -> Any:
        def program(*arguments: Any) -> Any:
            with _disable_current_modes():
                results = function(*arguments)
            if function.__name__ == "update" and wrong:
                results = (results[0]._replace(td_target=results[0].td_target * 2.0), *results[1:])
            return results

        return program

    @contextlib.contextmanager
    def other_compiler() -> Iterator[None]:
        nonlocal wrong
        wrong = by == "the compiler"
        yield
        wrong = False

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("runlab.determinism.programs.cpp_compiler", lambda: "g++")
    in_this_process["b"] = other_compiler
    both = small("sac", *WORDS, "trace=step", "compile=true")
    other = ["algo.tau=0.5"] if by == "the algorithm" else []
    a = made(tmp_path / "a", configure(*both))
    zoomed = zoom.zoom_in(compare_runs(a, made(tmp_path / "b", configure(*both, *other), other_compiler)))
    text = " ".join(report(zoomed).split())
    if by == "the compiler":
        assert (zoomed.first, zoomed.finding) == ("td_target", None)
        assert "Without the compiler the runs are equal there. So the compiled programs differ." in text
    else:
        assert (zoomed.first, zoomed.finding and zoomed.finding.kind) == ("target", "arguments")
        assert "in rltemplate/learning/optim.py" in text
        assert "in polyak: return target + tau * (online - target)" in text
        assert "Without the compiler the runs differ at the same item." in text


def test_statistics_that_were_merged_before_other_events_are_found(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: dict[str, Planted]
) -> None:
    merged, factor = RunningMeanStd.merged, 1.0

    def other(self: RunningMeanStd, batch: Tensor) -> RunningMeanStd:
        of_obs = batch.shape[1] > 1 and self.num_rows.item() >= 64.0  # from the second iteration on
        return merged(self, torch.mul(batch, factor) if of_obs else batch)

    @contextlib.contextmanager
    def scaled() -> Iterator[None]:
        nonlocal factor
        factor = 1.5
        yield
        factor = 1.0

    monkeypatch.setattr(RunningMeanStd, "merged", other)
    in_this_process["b"] = scaled
    both = small("ppo", *WORDS, "trace=step", env="Pendulum")
    a = made(tmp_path / "a", configure(*both))
    zoomed = zoom.zoom_in(compare_runs(a, made(tmp_path / "b", configure(*both), scaled)))
    assert (zoomed.iteration, zoomed.event, zoomed.first) == (1, "iteration", "end/obs_norm/mean")
    assert zoomed.finding is not None
    assert zoomed.finding.a is not None
    assert (zoomed.finding.kind, zoomed.finding.a.operation) == ("arguments", "aten.mul.Tensor")
    assert "in train_iteration: self.state" in zoomed.finding.a.source[0]


@pytest.mark.parametrize("planted", ["a pixel", pytest.param("another library", marks=pytest.mark.long)])
def test_images_and_convolutions_that_differ_are_named(
    configure: Configure, tmp_path: Path, in_this_process: dict[str, Planted], planted: str
) -> None:
    """Torch's own convolutions round otherwise than those of oneDNN."""
    pixel = planted == "a pixel"
    other: Planted = partial(planted_fault, "next_obs@1:3")
    if not pixel:
        other = partial(torch.backends.mkldnn.flags, enabled=False)
    in_this_process["b"] = other
    both = small("ppo", *WORDS[:2], "algo.encoder_size=16", "trace=step", env="Catch")
    a = made(tmp_path / "a", configure(*both))
    zoomed = zoom.zoom_in(compare_runs(a, made(tmp_path / "b", configure(*both), other)))
    if pixel:
        assert (zoomed.iteration, zoomed.first) == (1, "next_obs")
        return
    assert (zoomed.iteration, zoomed.event, zoomed.first) == (0, "policy_step", "policy")
    assert zoomed.finding is not None
    assert zoomed.finding.a is not None
    assert (zoomed.finding.kind, zoomed.finding.a.operation) == ("computed", "aten.convolution.default")
