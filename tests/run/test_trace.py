"""The trace shows everything that a run computes, in causal order, and looking changes nothing."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ON_LEARNING, TRIED_IN, Configure, build, small
from flipped_bits import VARIABLE, flip_entry, flipped

from runlab.analysis.traces import first_difference, open_trace
from runlab.interfaces import IterationResult, attach_probe
from runlab.run.trace import TraceWriter, digest, entries, first_not_finite

ENVS = {"ppo": "Hopper"}  # others in conftest.TRIED_IN


def traced(configure: Configure, algo: str, folder: Path, fault: str = "") -> Path:
    """The folder of a trace of five iterations."""
    folder.mkdir()
    env = ENVS.get(algo, TRIED_IN[algo])
    config = configure(*small(algo, "algo.normalize_obs=true", env=env))
    algorithm, _ = build(config)
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setenv(VARIABLE, fault)
        trace = TraceWriter(folder, "step", algo)
        attach_probe(algorithm, trace)
    for _ in range(5):
        trace.begin(algorithm)
        result = algorithm.train_iteration()
        trace.end(algorithm, result.metrics)
    algorithm.close()
    trace.lines.close()
    assert not fault or trace.done, f"the run never met {fault}"  # type: ignore[attr-defined]
    return folder


# What can go wrong in a run, as item@iteration:number of its occurrence: in any, and beside it in each.
ANY = ["draw/action@1:3", "action@2:4", "reward@1:6", "next_obs@3:2", "policy@1:3", "start/env_steps@3"]
FAULTS = dict.fromkeys(ON_LEARNING, ANY) | {
    "ppo": [
        *(*ANY, "log_prob@2:9", "normalized_obs@4:1", "scaled_reward@3", "value@1", "advantage@2"),
        *("draw/minibatch@3:1", "metrics@2:1", "gradient@0:0", "mu@1:5", "nu@2:3", "params@1:7"),
        "start/net/params@0",
    ],
    "sac": [
        *(*ANY, "draw/replay@1:11", "draw/update@2:6", "td_target@3:8", "critic_metrics@1:4"),
        *("critic_gradient@2:20", "critic/mu@1:3", "critic/params@2:9", "target@3:12", "actor_metrics@1:5"),
        *("actor_gradient@2:7", "actor/nu@2:9", "alpha/params@2:11"),
    ],
}
# Draws belong to the event of the results that come next.
EVENTS = {"draw/minibatch@3:1": 4, "draw/update@2:6": None}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Path]:
    """Filled by the first test of each algorithm."""
    return {}


@pytest.mark.parametrize(("algo", "fault"), [(algo, fault) for algo in FAULTS for fault in FAULTS[algo]])
def test_one_flipped_bit_is_named_with_iteration_index_and_item(
    configure: Configure, tmp_path: Path, undisturbed: dict[str, Path], algo: str, fault: str
) -> None:
    if algo not in undisturbed:
        undisturbed[algo] = traced(configure, algo, tmp_path / "plain")
    other = traced(configure, algo, tmp_path / "flipped", fault=fault)
    difference = first_difference(open_trace(undisturbed[algo], ""), open_trace(other, ""))
    assert difference is not None
    item, _, place = fault.partition("@")
    iteration, _, index = place.partition(":")
    assert (difference.iteration, difference.item.partition("#")[0]) == (int(iteration), item)
    if (expected := EVENTS.get(fault, int(index or 0))) is not None:
        assert difference.index == expected
    lines = [(run / "trace.jsonl").read_text().splitlines() for run in (undisturbed[algo], other)]
    chains = [[json.loads(line)[-1] for line in each if line.startswith('["iter')] for each in lines]
    assert [a == b for a, b in zip(*chains, strict=True)] == [i < int(iteration) for i in range(5)]


@pytest.mark.parametrize("algo", ON_LEARNING)
def test_every_entry_of_the_state_is_named_at_both_ends_of_an_iteration(
    configure: Configure, tmp_path: Path, algo: str
) -> None:
    """One entry is flipped between two iterations: its digest differs and no other one."""
    words = small(algo, "algo.hidden_sizes=[8]", env=ENVS.get(algo, TRIED_IN[algo]))
    algorithm, _ = build(configure(*words))
    trace = TraceWriter(tmp_path, "step", algo)
    attach_probe(algorithm, trace)
    for _ in range(2):
        begun = [name for name, _ in entries(algorithm.state_dict(), "start")]
        trace.begin(algorithm)
        trace.end(algorithm, algorithm.train_iteration().metrics)
    lines = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines()[1:])
    traced = {name for line in lines if line[0] == "items" for name in line[2]}

    def shown() -> dict[str, str]:
        return {name: digest(value) for name, value in entries(algorithm.state_dict(), "")}

    before, plain = algorithm.state_dict(), shown()
    names = list(plain)
    assert traced >= {*begun, *(f"end{name}" for name in names)}
    assert any(name.startswith("/envs/states/0/actions") for name in names)
    before.pop("envs")  # environments that stepped already keep theirs, and the last observation
    for name in [name for name in names if not name.startswith("/envs/") and name not in ("/obs", "/added")]:
        state = {key: value for key, value in algorithm.state_dict().items() if key != "envs"}
        assert flip_entry(state, name.removeprefix("/"))
        algorithm.load_state_dict(state)
        changed = shown()
        assert [item for item in plain if changed[item] != plain[item]] == [name]
        algorithm.load_state_dict(before)
    algorithm.close()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
def test_formats_that_numpy_lacks_have_digests(kind: torch.dtype) -> None:
    values = torch.tensor([1.0, 2.0, -3.0]).to(kind)
    changed = values.clone()
    changed.view(torch.uint8)[0] += 1
    assert digest(values) == digest(values.clone()) != digest(changed)


def test_a_damaged_trace_is_kept_and_a_new_one_begins(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"format": "runlab-trace"}\n["items",dam\0ged\n')
    notes: list[str] = []
    trace = TraceWriter(tmp_path, "iteration", "ppo")
    trace.lines.warn = notes.append
    trace.resume(3, "0" * 32)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.old.jsonl"]
    assert "is damaged: a new one begins here" in notes[0]


def test_a_flip_is_one_unit_in_the_last_place_which_digests_see() -> None:
    value = torch.tensor([0.5, -3.0, 1.0])
    changed = flipped(value)
    assert torch.equal(changed != value, torch.tensor([False, True, False]))
    assert abs(changed[1].item() + 3.0) == np.spacing(np.float32(3.0))
    assert flipped(np.array([4, 7, 2])).tolist() == [4, 6, 2]
    value = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert digest(value) == digest(value.clone())
    assert digest(value.T) == digest(value.T.contiguous())
    for other in (value.flip(0), value.T, flipped(value), value[:2]):
        assert digest(value) != digest(other)
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))
    assert digest(np.arange(4)) == digest(torch.arange(4))


def bad_value(state: dict[str, torch.Tensor], **metrics: float) -> str | None:
    """The first value that is not finite in an iteration that ends with `state` and reports `metrics`."""
    tensors = {name.replace("__", "/"): torch.tensor(value) for name, value in metrics.items()}
    algorithm: Any = SimpleNamespace(state_dict=lambda: state)
    return first_not_finite(algorithm, IterationResult(tensors))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
def test_a_single_element_that_is_not_finite_is_named(kind: torch.dtype) -> None:
    for bad, index in itertools.product((math.nan, math.inf, -math.inf), range(6)):
        values = torch.ones(2, 3, dtype=kind)
        values.view(-1)[index] = bad
        answer = bad_value({"first": torch.ones(3), "second": values, "third": values})
        assert answer == f"end/second became {bad} at {[index // 3, index % 3]}"
    assert bad_value({}, loss__policy=math.nan, value__explained=math.nan) == "loss/policy became nan at []"
    assert bad_value({}, value__explained=math.nan) is None
    # Infinities do not cancel, and a sum that is too large is none.
    assert bad_value({"a": torch.tensor([math.inf, -math.inf])}) == "end/a became inf at [0]"
    huge = {"huge": torch.full((8,), 3e38), "half": torch.full((9,), 6e4, dtype=torch.float16)}
    assert bad_value(huge) is None
