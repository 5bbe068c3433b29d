"""The trace shows everything that a run computes, in causal order, and looking changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import SHRUNK, Configure, small
from flipped_bits import VARIABLE, flip_entry, flipped

from rltemplate.algos.build import build_algorithm
from rltemplate.analysis.traces import Divergence, first_difference, open_trace
from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.run.state import State, entries
from rltemplate.run.trace import Trace, digest, named_leaves

ENVS = {"ppo": "Hopper"}  # others on Pendulum


def traced(
    configure: Configure, algo: str, folder: Path, *overrides: str, fault: str = "", detail: str = "step"
) -> Path:
    """The folder of a trace of five iterations."""
    folder.mkdir()
    env = ENVS.get(algo, "Pendulum")
    config = configure(*small(algo, "algo.normalize_obs=true", *overrides, env=env))
    algorithm, _ = build_algorithm(config)
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setenv(VARIABLE, fault)
        trace = algorithm.probe = Trace(folder, detail, algo)
    for _ in range(5):
        result = algorithm.train_iteration()
        trace.end_iteration(algorithm, result.metrics)
    algorithm.close()
    trace.close()
    assert not fault or trace.fault.done, f"the run never met {fault}"  # type: ignore[attr-defined]
    return folder


def divergence(a: Path, b: Path) -> Divergence | None:
    return first_difference(open_trace(a, ""), open_trace(b, ""))


# What can go wrong in a run, as item@iteration:number of its occurrence: in any, and beside it in each.
ANY = ["draw/action@1:3", "action@2:4", "reward@1:6", "next_obs@3:2", "policy@1:3", "start/env_steps@3"]
FAULTS = dict.fromkeys(ALGORITHMS, ANY) | {
    "ppo": [
        *(*ANY, "log_prob@2:9", "normalized_obs@4:1", "scaled_reward@3", "value@1", "advantage@2"),
        *("draw/minibatch@3:1", "metrics@2:1", "gradient@0:0", "mu@1:5", "nu@2:3", "params@1:7"),
        *("start/net/steps@1", "start/streams/minibatch@2", "start/net/params@3", "start/obs_norm/mean@2"),
        *("start/net/params@0", "start/return_norm/var@3"),
    ],
    "sac": [
        *(*ANY, "draw/replay@1:11", "draw/update@2:6", "td_target@3:8", "critic_metrics@1:4"),
        *("critic_gradient@2:20", "critic/mu@1:3", "critic/params@2:9", "target@3:12", "actor_metrics@1:5"),
        *("actor_gradient@2:7", "actor/nu@2:9", "alpha/params@2:11"),
        *("start/obs_norm/var@1", "start/updates_due@2", "start/learned/target@3", "start/num_updates@1"),
    ],
}
# Draws belong to the event of the results that come next.
EVENTS = {"draw/minibatch@3:1": 4, "draw/update@2:6": None}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Filled by the first test of each algorithm."""
    return {}


@pytest.mark.parametrize(("algo", "fault"), [(algo, fault) for algo in FAULTS for fault in FAULTS[algo]])
def test_one_flipped_bit_is_named_with_iteration_index_and_item(
    configure: Configure, tmp_path: Path, undisturbed: dict[str, Path], algo: str, fault: str
) -> None:
    if algo not in undisturbed:
        undisturbed[algo] = traced(configure, algo, tmp_path / "plain")
    found = divergence(undisturbed[algo], traced(configure, algo, tmp_path / "flipped", fault=fault))
    assert found is not None
    item, _, place = fault.partition("@")
    iteration, _, index = place.partition(":")
    assert (found.iteration, found.item.partition("#")[0]) == (int(iteration), item)
    if (expected := EVENTS.get(fault, int(index or 0))) is not None:
        assert found.index == expected


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_flip_changes_every_chain_from_then_on_at_both_details(
    configure: Configure, tmp_path: Path, algo: str
) -> None:
    for detail in ("iteration", "step"):
        plain = traced(configure, algo, tmp_path / f"plain-{detail}", detail=detail)
        fault = traced(configure, algo, tmp_path / f"fault-{detail}", detail=detail, fault="action@2:1")
        lines = [(folder / "trace.jsonl").read_text().splitlines() for folder in (plain, fault)]
        chains = [[json.loads(line)[-1] for line in each if line.startswith('["iter')] for each in lines]
        same = [a == b for a, b in zip(*chains, strict=True)]
        assert same == [True, True, False, False, False]
        found = divergence(plain, fault)
        assert found is not None
        assert found.iteration == 2


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_entry_of_the_state_is_named_at_both_ends_of_an_iteration(
    configure: Configure, algo: str
) -> None:
    """One entry is flipped between two iterations: its digest differs and no other one."""
    small_nets = ["algo.hidden_sizes=[8]"] if hasattr(ALGORITHMS[algo].config, "hidden_sizes") else []
    words = [f"algo={algo}", f"env={ENVS.get(algo, 'Pendulum')}", *SHRUNK[algo], *small_nets]
    algorithm, _ = build_algorithm(configure(*words))
    for _ in range(2):
        algorithm.train_iteration()

    def shown() -> dict[str, str]:
        state = State()
        return {name: digest(value) for name, value in [*state.begin(algorithm), *state.end(algorithm)]}

    before, plain = algorithm.state_dict(), shown()
    names = [name for name, _ in entries(before, "")]
    assert plain.keys() >= {f"{when}{name}" for when in ("start", "end") for name in names}
    assert any(name.startswith("/envs/states/0/actions") for name in names)
    before.pop("envs")  # environments that stepped already keep theirs, and the last observation
    for name in [name for name in names if not name.startswith("/envs/") and name not in ("/obs", "/added")]:
        state = {key: value for key, value in algorithm.state_dict().items() if key != "envs"}
        assert flip_entry(state, name.removeprefix("/"))
        algorithm.load_state_dict(state)
        found = shown()
        assert {item for item in plain if found[item] != plain[item]} == {f"start{name}", f"end{name}"}
        algorithm.load_state_dict(before)
    algorithm.close()


def test_a_flip_is_one_unit_in_the_last_place() -> None:
    value = torch.tensor([0.5, -3.0, 1.0])
    changed = flipped(value)
    assert torch.equal(changed != value, torch.tensor([False, True, False]))
    assert abs(changed[1].item() + 3.0) == np.spacing(np.float32(3.0))
    assert flipped(np.array([4, 7, 2])).tolist() == [4, 6, 2]
    assert flipped(np.array([False, True])).tolist() == [True, True]


class Pair(NamedTuple):
    first: torch.Tensor
    rest: list[Any]


def test_results_in_lists_and_tuples_have_names() -> None:
    """Whatever a function returns is in the trace."""
    one, two, three = torch.zeros(1), torch.ones(1), np.ones(3)
    found = list(named_leaves((Pair(one, [two, (three,)]), 1.0)))
    assert [name for name, _ in found] == ["first", "rest", "rest"]
    assert all(value is given for (_, value), given in zip(found, (one, two, three), strict=True))


def test_digests_see_bits_and_order() -> None:
    value = torch.arange(12, dtype=torch.float32).view(3, 4)
    swapped = value.clone()
    swapped[0, 0], swapped[0, 1] = value[0, 1], value[0, 0]
    assert digest(value) == digest(value.clone())
    assert digest(value.T) == digest(value.T.contiguous())
    assert digest(value) != digest(swapped)
    assert digest(value) != digest(flipped(value))
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))
    assert digest(torch.zeros(2)) != digest(torch.zeros(3))
    assert digest(np.arange(4)) == digest(torch.arange(4))
