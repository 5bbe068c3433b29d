"""The trace shows everything that a run computes, in causal order, and looking changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHRUNK, Configure, small
from flipped_bits import VARIABLE, flip_entry, flipped

from rltemplate.algos.build import build_algorithm
from rltemplate.analysis.traces import Divergence, first_difference, open_trace
from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.run.state import State, entries
from rltemplate.run.trace import Trace, digest

STEP = ["algo.normalize_obs=true", "trace=step"]
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
        trace.end_iteration(algorithm, result.probes)
    algorithm.close()
    trace.close()
    assert not fault or trace.fault.done, f"the run never met {fault}"  # type: ignore[attr-defined]
    return folder


def divergence(a: Path, b: Path) -> Divergence | None:
    return first_difference(open_trace(a, ""), open_trace(b, ""))


# What can go wrong in a run, as item@iteration:index of its event: in any, and beside it in each.
ANY = ["obs@0:0", "obs@2:7", "action@2:4", "reward@1:6", "next_obs@3:2"]
SHARED = [*ANY, "policy@1:3", "noise@3:5"]
FAULTS = dict.fromkeys(ALGORITHMS, ANY) | {
    "ppo": [
        *("init/actor.2.weight@0", "init/critic.0.bias@0", "init/log_std@0", *SHARED, "log_prob@2:9"),
        *("normalized_obs@4:1", "scaled_reward@3", "value@1", "advantage@2", "order@1", "order@3:1"),
        *("loss@2:1", "gradient@0:0", "gradient@3:6", "optimizer/mu@1:5", "optimizer/nu@2:3"),
        *("params@1:7", "obs_norm/mean@2", "obs_norm/var@0", "return_norm/var@3"),
        *("start/adam/2@1", "start/streams/minibatch@2", "start/net@3"),
    ],
    "sac": [
        *("init/actor.net.2.weight@0", "init/critic.q2.0.bias@0", "init/log_alpha@0", *SHARED),
        *("replay_index@1:11", "update_noise@2:6", "critic/target@3:8", "critic/loss@1:4"),
        *("critic/gradient@2:20", "critic/optimizer/mu@1:3", "critic/optimizer/nu@4:7", "critic/params@2:9"),
        *("critic/target_params@3:12", "actor/loss@1:5", "actor/gradient@2:7", "actor/optimizer/mu@2:9"),
        *("actor/params@1:1", "alpha/loss@3:3", "alpha/gradient@3:5", "alpha/optimizer/mu@1:7"),
        *("alpha/log_alpha@2:11", "obs_norm/mean@2", "obs_norm/var@0"),
        *("start/updates_due@2", "start/learner/target@3"),
    ],
}


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
    where = (found.iteration, found.item)
    if item == "obs" and place == "0:0":  # the reset shows it before the first step does
        assert (found.event, *where) == ("reset", 0, "obs")
    else:
        assert where == (int(iteration), item)
        assert found.index == int(index or 0)


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
    for name in names:
        state = algorithm.state_dict()
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


def test_digests_see_bits_and_order() -> None:
    value = torch.arange(12, dtype=torch.float32).view(3, 4)
    swapped = value.clone()
    swapped[0, 0], swapped[0, 1] = value[0, 1], value[0, 0]
    for function in (digest,):
        assert function(value) == function(value.clone())
        assert function(value.T) == function(value.T.contiguous())
        assert function(value) != function(swapped)
        assert function(value) != function(flipped(value))
        assert function(torch.zeros(2)) != function(-torch.zeros(2))
        assert function(torch.zeros(2)) != function(torch.zeros(3))
    assert digest(np.arange(4)) == digest(torch.arange(4))


def test_a_run_recorded_earlier_goes_on_in_its_trace(tmp_path: Path) -> None:
    """Its lines have other items of the start of an iteration, and none of its end."""
    old = tmp_path / "old"
    old.mkdir()
    Trace(old, "iteration", "ppo").end_iteration(ended(8), {})
    header = (old / "trace.jsonl").read_text().splitlines()[0]
    names, chain = ["stream/init", "obs", "params"], "ab" * 16
    lines = [json.loads(header), ["items", "iteration", names], ["iteration", 0, 8, "0" * 48, chain]]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (old / "trace.jsonl").write_text(text)
    (tmp_path / "resumed").mkdir()
    (tmp_path / "resumed" / "trace.jsonl").write_text(text)
    trace = Trace(tmp_path / "resumed", "iteration", "ppo")
    assert trace.resume(1, chain)
    trace.end_iteration(ended(16), {"obs": torch.ones(3), "params": torch.ones(3)})
    trace.close()
    written = (tmp_path / "resumed" / "trace.jsonl").read_text()
    assert written.startswith(text)
    assert "end/env_steps" in written
    assert not (tmp_path / "resumed" / "trace.old.jsonl").exists()
    assert divergence(old, tmp_path / "resumed") is None


def ended(env_steps: int) -> Any:
    """As much of an algorithm as the end of an iteration needs."""
    return SimpleNamespace(
        env_steps=env_steps, state_dict=lambda: {"env_steps": env_steps}, experience=lambda first: None
    )
