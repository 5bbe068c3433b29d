"""What seeds that are trained together have computed at once: as often as one alone, and the same numbers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import SHRUNK, Configure, replayed
from torch import Tensor

from rltemplate import kernels
from rltemplate.algos import PPOConfig
from rltemplate.algos.ppo import PPO
from rltemplate.algos.sac import SAC
from rltemplate.config import Config
from rltemplate.together import Together
from rltemplate.train import build_algorithm
from rltemplate.types import Algorithm, Probe

# Adam divides by how much gradients vary, so that last bits grow with every update: by less than this in a
# few dozen of them, where parameters move by 0.01 to 0.1.
TOLERANCE = 1e-5
WORDS = {
    "ppo": ["env=Pendulum", *SHRUNK["ppo"], "algo.hidden_sizes=[16,16]"],
    "sac": ["env=Pendulum", *SHRUNK["sac"], "algo.hidden_sizes=[16,16]", "algo.policy_delay=2"],
}


class Close(Probe):
    """Looks at single steps."""

    step_by_step = True


def parameters(algorithm: Algorithm) -> Tensor:
    if isinstance(algorithm, PPO):
        return algorithm.net.current.clone()
    assert isinstance(algorithm, SAC)
    learner = algorithm.learner
    return torch.cat([learner.actor, learner.critic, learner.target, learner.log_alpha])


def build(config: Config, seeds: Sequence[int]) -> list[Algorithm]:
    return [build_algorithm(dataclasses.replace(config, seed=seed))[0] for seed in seeds]


def trained(members: Sequence[Algorithm], together: bool, iterations: int = 3) -> list[Tensor]:
    """Where each of them is after some iterations."""
    group = Together(members) if together else None
    for _ in range(iterations):
        if group is None:
            for member in members:
                member.train_iteration()
        else:
            for result in group.train_iteration(range(len(members))).values():
                assert not isinstance(result, Exception), result
    for member in members:
        member.close()
    return [parameters(member) for member in members]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were stacked at each computation of a group."""
    from rltemplate import together

    sizes: list[int] = []
    original = together._Stacked.__call__

    def call(self: Any, args: Any, stacked: list[Tensor]) -> Any:
        sizes.append(len(stacked[0]))
        return original(self, args, stacked)

    monkeypatch.setattr(together._Stacked, "__call__", call)
    return sizes


@pytest.mark.parametrize("algo", ["ppo", "sac"])
@pytest.mark.parametrize("compiles", ["false", "true"])
def test_seeds_computed_at_once_are_those_computed_alone(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, algo: str, compiles: str
) -> None:
    config = configure(f"algo={algo}", *WORDS[algo], f"compile={compiles}")
    sizes = counted(monkeypatch)
    start = parameters(build(config, [5])[0])
    alone = trained(build(config, [4, 5, 6]), together=False)
    assert sizes == []
    joint = trained(build(config, [4, 5, 6]), together=True)
    assert len(sizes) > 20
    assert set(sizes) == {3}
    for one, other in zip(joint, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    assert (alone[1] - start).abs().max() > 1000 * TOLERANCE
    assert (alone[1] - alone[0]).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_to_look_closely_changes_nothing(configure: Configure, algo: str) -> None:
    config = configure(f"algo={algo}", *WORDS[algo])
    joint = trained(build(config, [4, 5]), together=True)
    members = build(config, [4, 5])
    for member in members:
        member.probe = Close()
    close = trained(members, together=True)
    assert all(torch.equal(one, other) for one, other in zip(close, joint, strict=True))


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_where_a_row_depends_on_no_other_each_is_computed_alone(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, algo: str
) -> None:
    config = configure(f"algo={algo}", *WORDS[algo])
    sizes = counted(monkeypatch)
    before = kernels.in_force()["products"]
    try:
        kernels.use("padded")
        padded = trained(build(config, [4, 5]), together=False)
        invariant = trained(build(config, [4, 5]), together=True)
    finally:
        kernels.use(before)
    assert sizes == []
    assert all(torch.equal(one, other) for one, other in zip(invariant, padded, strict=True))
    joint = trained(build(config, [4, 5]), together=True)  # the inverse: computed at once it is not the same
    alone = trained(build(config, [4, 5]), together=False)
    assert sizes
    assert not all(torch.equal(one, other) for one, other in zip(joint, alone, strict=True))


@pytest.mark.parametrize(
    "words", [["compile=true"], ["compile=false"], ["compile=false", "determinism=invariant"]]
)
def test_large_networks_are_computed_alone_in_threads_and_to_the_last_bit(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    from rltemplate import together

    monkeypatch.setattr(together, "_LARGE", 100)
    monkeypatch.setattr(together, "_WORTH_A_THREAD_S", 0.0)
    monkeypatch.setattr(together, "available_cores", lambda: 2)
    config = configure("algo=sac", *WORDS["sac"], *words)
    alone = trained(build(config, [4, 5, 6]), together=False)
    threads = set()
    original = together._alone

    def noted(request: Any) -> Any:
        threads.add(threading.get_ident())
        assert torch.get_num_threads() == 1
        return original(request)

    monkeypatch.setattr(together, "_alone", noted)
    members = build(config, [4, 5, 6])
    apart = trained(members, together=True)
    assert all(torch.equal(one, other) for one, other in zip(apart, alone, strict=True))
    assert len(threads) == 2
    assert threading.get_ident() not in threads
    made = [member.programs.made for member in members]
    assert made == ([3, 0, 0] if "compile=true" in words else [0, 0, 0])


@pytest.mark.parametrize("compiles", ["false", "true"])
def test_many_seeds_make_stacks_that_do_not_depend_on_the_cores(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, compiles: str
) -> None:
    """Each has a thread of its own where there is a core for it, and the same bits where there is none."""
    from rltemplate import together

    config = configure("algo=ppo", *WORDS["ppo"], f"compile={compiles}")
    seeds = [1, 2, 3, 4, 5]
    alone = trained(build(config, seeds), together=False)
    sizes = counted(monkeypatch)
    epochs: list[int] = []  # the threads in which they were computed
    original = PPO._one_epoch

    def noted(self: PPO, *args: Any) -> Any:
        epochs.append(threading.get_ident())
        return original(self, *args)

    monkeypatch.setattr(PPO, "_one_epoch", noted)

    def trained_on(cores: int) -> list[Tensor]:
        epochs.clear()
        monkeypatch.setattr(together, "available_cores", lambda: cores)
        return trained(build(config, seeds), together=True)

    on_one = trained_on(1)
    assert set(epochs) == {threading.get_ident()}
    assert set(sizes) == {3}  # three, and two with one of them once more
    on_two = trained_on(2)
    assert isinstance(config.algo, PPOConfig)
    assert len(epochs) == 2 * 3 * config.algo.update_epochs
    assert len(set(epochs)) == (3 if compiles == "true" else 1)
    assert all(torch.equal(one, other) for one, other in zip(on_two, on_one, strict=True))
    for one, other in zip(on_one, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    monkeypatch.setattr(together, "_STACKED", 1)
    trained_on(1)
    assert set(sizes) == {1, 3}


def test_an_epoch_is_captured_once_for_all_whoever_of_them_is_left(configure: Configure) -> None:
    captures = 0

    def counted(function: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        nonlocal captures
        captures += 1
        return replayed(function)

    results = []
    for capture in (None, counted):
        members = build(configure("algo=ppo", *WORDS["ppo"]), [4, 5, 6])
        for member in members:
            member.programs.capture = capture
        group = Together(members)
        for going in ([0, 1, 2], [1, 2]):
            for result in group.train_iteration(going).values():
                assert not isinstance(result, Exception), result
        results.append([parameters(member) for member in members])
        for member in members:
            member.close()
    assert captures == 1
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_one_that_fails_or_ended_before_leaves_the_others_as_they_are(configure: Configure) -> None:
    """To the last bit, so that those of a group go on exactly, whoever is not with them any more."""
    config = configure("algo=sac", *WORDS["sac"])
    whole = trained(build(config, [4, 5, 6]), together=True)
    members = build(config, [4, 5, 6])
    group = Together(members)
    group.train_iteration([0, 1, 2])
    members[1].close()
    members[1].envs = None  # type: ignore[attr-defined]
    failed = group.train_iteration([0, 1, 2])
    assert isinstance(failed[1], AttributeError)
    group.train_iteration([0, 2])
    left = build(config, [4, 6])
    rest = Together(left, size=3, rows=[0, 2])
    for _ in range(3):
        rest.train_iteration([0, 1])
    for place, mine in ((0, left[0]), (2, left[1])):
        assert torch.equal(parameters(members[place]), whole[place])
        assert torch.equal(parameters(mine), whole[place])
    for member in (members[0], members[2], *left):
        member.close()


def test_a_member_keeps_its_row_when_others_are_gone(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries may compute a row of a batch of products otherwise than another one."""
    from rltemplate import together

    given: list[list[float]] = []
    original = together._Batch.__call__

    def call(self: Any, args: Sequence[Any]) -> Any:
        given.append([float(each[0].sum()) for each in args if isinstance(each[0], Tensor)])
        return original(self, args)

    monkeypatch.setattr(together._Batch, "__call__", call)
    config = configure("algo=ppo", *WORDS["ppo"])
    members = build(config, [5, 6])
    sums = [float(parameters(member).sum()) for member in members]
    Together(members, size=4, rows=[1, 3]).train_iteration([0, 1])
    assert given[0] == [sums[0], sums[0], sums[0], sums[1]]
    for member in members:
        member.close()


def test_what_a_function_raises_in_a_thread_ends_one_alone(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rltemplate import together

    monkeypatch.setattr(together, "_LARGE", 100)
    monkeypatch.setattr(together, "_WORTH_A_THREAD_S", 0.0)
    monkeypatch.setattr(together, "available_cores", lambda: 2)
    members = build(configure("algo=sac", *WORDS["sac"]), [4, 5])
    group = Together(members)
    for _ in range(2):
        group.train_iteration([0, 1])

    def broken(*_: Any) -> Any:
        raise MemoryError("no room")

    for shared in members[0].programs.functions:
        shared.alone = broken
    results = group.train_iteration([0, 1])
    assert isinstance(results[0], MemoryError)
    assert not isinstance(results[1], Exception)
    for member in members:
        member.close()


def test_epochs_may_end_early_in_one_and_not_in_others(configure: Configure) -> None:
    config = configure("algo=ppo", *WORDS["ppo"], "algo.target_kl=0.002", "algo.update_epochs=6")
    algorithms = build(config, [1, 2, 3, 4])
    alone = trained(algorithms, together=False)
    joint = trained(build(config, [1, 2, 3, 4]), together=True)
    steps = {float(a.adam.steps) for a in algorithms if isinstance(a, PPO)}
    assert len(steps) > 1  # they did
    for one, other in zip(joint, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_at_full_size_the_fast_form_computes_what_the_plain_one_does(
    configure: Configure, together: bool
) -> None:
    """Two rollouts of the recipe, 640 updates. In a third, a last bit may end an episode a step earlier."""
    plain = configure("algo=ppo", "env=Hopper")
    fast = configure("algo=ppo", "env=Hopper", "compile=true")
    start = [parameters(member) for member in build(plain, [1, 2, 3, 4, 5])]
    expected = trained(build(plain, [1, 2, 3, 4, 5]), together=False, iterations=2)
    found = trained(build(fast, [1, 2, 3, 4, 5]), together=together, iterations=2)
    for one, other, before in zip(found, expected, start, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
        assert (other - before).abs().max() > 1000 * TOLERANCE


def test_what_ends_the_process_ends_all_and_leaves_gradients_as_they_were(configure: Configure) -> None:
    members = build(configure("algo=ppo", *WORDS["ppo"]), [1, 2])
    end_step = members[1].envs.end_step  # type: ignore[attr-defined]

    def interrupted() -> Any:
        members[1].envs.end_step = end_step  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    members[1].envs.end_step = interrupted  # type: ignore[attr-defined]
    group = Together(members)
    with pytest.raises(KeyboardInterrupt):
        group.train_iteration([0, 1])
    assert torch.is_grad_enabled()
    for member in members:
        member.close()
