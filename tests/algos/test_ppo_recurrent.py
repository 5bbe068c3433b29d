"""Memories of PPO with memory: within episodes, over the ends of sequences, iterations and runs.

What an iteration computes is in test_references.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Configure, build, small
from torch import Tensor

from rltemplate.algos.ppo_recurrent import Carry, Memory, PPORecurrent
from rltemplate.learning.networks import GRU
from rltemplate.learning.on_policy import Rollout
from runlab.config.cli.preflight import preflight
from runlab.determinism import kernels
from runlab.envs.make import make_env
from runlab.errors import ConfigError
from runlab.interfaces import act_of
from runlab.run.evaluation import evaluate


def made(configure: Configure, *words: str, env: str = "CartPoleNoVel") -> PPORecurrent:
    """An algorithm whose episodes end within rollouts, and not where sequences do."""
    run = small("ppo_recurrent", "env.max_episode_steps=7", *words, env=env)
    algorithm = build(configure(*run))[0]
    assert isinstance(algorithm, PPORecurrent)
    return algorithm


def first_error(algorithm: PPORecurrent) -> float:
    """The largest error of the first ratios in three iterations."""
    metrics = [algorithm.train_iteration().metrics for _ in range(3)]
    algorithm.close()
    return max(float(each["policy/first_ratio_max_error"]) for each in metrics)


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_the_first_ratio_is_exactly_one_through_whole_sequences(configure: Configure, num_envs: int) -> None:
    kernels.use("padded")
    words = f"env.num_envs={num_envs}", "algo.sequence_length=8", "algo.num_minibatches=2"
    assert first_error(made(configure, *words)) == 0.0
    assert first_error(made(configure, *words, env="PendulumNoVel")) == 0.0


def memory_kept_at_ends(algorithm: PPORecurrent) -> None:
    """Acting goes on with the memory of the episode before, and the update is told of the end."""
    decide = algorithm.decide

    def forgetful(params: Tensor, obs: Tensor, extras: Memory, memory: Carry) -> Any:
        policy, _, after = decide(params, obs, extras, Carry(torch.zeros_like(memory.begins), memory.memory))
        return policy, Memory((), *memory), after

    algorithm.decide = forgetful  # type: ignore[method-assign, assignment]


def ends_one_step_late(algorithm: PPORecurrent) -> None:
    """The update takes each step for the start of an episode after the one that is."""
    collect = algorithm.collect

    def late(obs: Tensor) -> Any:
        rollout = collect(obs)
        assert isinstance(rollout.extras, Memory)
        return rollout._replace(extras=rollout.extras._replace(begins=rollout.extras.begins.roll(1, 0)))

    algorithm.collect = late  # type: ignore[method-assign]


def memory_of_the_step_before(algorithm: PPORecurrent) -> None:
    """Sequences begin with an old memory."""
    collect = algorithm.collect

    def old(obs: Tensor) -> Any:
        rollout = collect(obs)
        assert isinstance(rollout.extras, Memory)
        return rollout._replace(extras=rollout.extras._replace(memory=rollout.extras.memory.roll(1, 0)))

    algorithm.collect = old  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", [memory_kept_at_ends, ends_one_step_late, memory_of_the_step_before])
def test_the_first_ratio_shows_a_memory_that_is_not_the_one_of_the_rollout(
    configure: Configure, mistake: Callable[[PPORecurrent], None]
) -> None:
    kernels.use("padded")
    algorithm = made(configure, "algo.sequence_length=8", "algo.num_minibatches=2", env="PendulumNoVel")
    mistake(algorithm)
    assert first_error(algorithm) > 1e-5


def test_the_memory_goes_on_in_the_next_iteration_and_after_a_resume(configure: Configure) -> None:
    algorithm, again = (made(configure, "algo.update_epochs=1") for _ in range(2))
    rollouts, firsts = list[Rollout](), list[Memory]()
    collect = algorithm.collect

    def kept(obs: Tensor) -> Rollout:
        rollout = collect(obs)
        assert isinstance(rollout.extras, Memory)
        firsts.append(Memory((), rollout.extras.begins[0], rollout.extras.memory[0]))
        rollouts.append(rollout)
        return rollout

    algorithm.collect = kept  # type: ignore[method-assign]
    algorithm.train_iteration()  # with two rollouts, since observations are normalised
    state = algorithm.state_dict()
    left = algorithm.state.carry
    algorithm.train_iteration()
    assert bool(firsts[0].begins.all())
    assert not bool(firsts[0].memory.any())
    ended = torch.maximum(rollouts[0].terminated, rollouts[0].truncated)[-1]
    assert torch.equal(firsts[1].begins, ended)
    assert bool(firsts[1].memory.any())
    assert torch.equal(firsts[2].begins, left.begins)
    assert torch.equal(firsts[2].memory, left.memory)
    again.load_state_dict(state)
    assert torch.equal(again.state.carry.memory, left.memory)
    again.train_iteration()
    assert torch.equal(again.state.net.params, algorithm.state.net.params)
    state["carry"]["memory"] = torch.zeros_like(left.memory)  # the inverse: a resume without it
    forgot = made(configure, "algo.update_epochs=1")
    forgot.load_state_dict(state)
    forgot.train_iteration()
    assert not torch.equal(forgot.state.net.params, algorithm.state.net.params)
    for each in algorithm, again, forgot:
        each.close()


def test_an_observation_changes_later_steps_of_its_own_episode_alone(configure: Configure) -> None:
    algorithm = made(configure)
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(3, 10, 2, generator=generator)
    begins = torch.zeros(3, 10)
    begins[0, 8] = 1.0
    extras = Memory((), begins, torch.randn(3, 10, 8, generator=generator))

    def outputs(obs: Tensor) -> Tensor:
        policy, value = algorithm.net.apply(algorithm.state.net.params, obs, extras, "policy", "value")
        return torch.cat([policy, value[..., None]], -1)

    changed = obs.clone()
    changed[0, 3] += 1.0
    differs = (outputs(obs) != outputs(changed)).any(-1)
    assert differs[0].tolist() == [3 <= step < 8 for step in range(10)]
    assert not bool(differs[1:].any())
    algorithm.close()


def test_a_sequence_may_be_cut_where_its_memory_is_known() -> None:
    kernels.use("padded")
    gru = GRU(3, 5, True, torch.Generator().manual_seed(0))
    x, begins, start = torch.randn(4, 9, 3), (torch.rand(4, 9) < 0.2).float(), torch.randn(4, 5)
    with torch.no_grad():
        whole = gru(x, begins, start)
        second = gru(x[:, 4:], begins[:, 4:], whole[:, 3])
        assert torch.equal(whole[:, 4:], second)
        assert not torch.equal(whole[:, 4:], gru(x[:, 4:], begins[:, 4:], whole[:, 2]))


@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_unit_is_torchs_and_its_weights_are_as_stated(orthogonal: bool) -> None:
    gru, other = GRU(3, 7, orthogonal, torch.Generator().manual_seed(0)), torch.nn.GRU(3, 7, batch_first=True)
    layers = {"ih": gru.of_input, "hh": gru.of_memory}
    for name, layer in layers.items():
        getattr(other, f"weight_{name}_l0").data.copy_(layer.weight)
        getattr(other, f"bias_{name}_l0").data.copy_(layer.bias)
        for part in layer.weight.split(7):
            product = part.T @ part if part.shape[1] <= 7 else part @ part.T
            assert torch.allclose(product, torch.eye(len(product)), atol=1e-5) == orthogonal
        assert bool(layer.bias.any()) != orthogonal
        if not orthogonal:
            assert 0.8 / math.sqrt(7) < float(layer.weight.detach().abs().max()) <= 1.0 / math.sqrt(7)
    x, start = torch.randn(4, 6, 3), torch.randn(4, 7)
    torch.testing.assert_close(gru(x, torch.zeros(4, 6), start), other(x, start[None])[0])


def test_checks_try_as_many_rows_as_the_unit_gets(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = made(configure, "env.max_episode_steps=null", "algo.sequence_length=2")  # none is truncated
    called, step = set[int](), GRU.step

    def noted(self: GRU, rows: Tensor) -> Tensor:
        called.add(len(rows))
        return step(self, rows)

    monkeypatch.setattr(GRU, "step", noted)
    algorithm.train_iteration()
    assert called == {2, 4, 16}  # a decision, an update, and the whole rollout
    assert called <= {*algorithm.forward_passes()["memory"].batches}
    algorithm.close()


def test_evaluations_remember_each_episode_on_its_own(configure: Configure) -> None:
    """Episodes of unequal length, side by side and one by one, take the same actions."""
    kernels.use("padded")
    algorithm = made(configure, "env.max_episode_steps=null", "algo.normalize_obs=false")
    params = 30.0 * algorithm.state.net.params  # a policy whose actions depend on all that it has seen
    algorithm.state = algorithm.state._replace(net=algorithm.state.net._replace(params=params))
    config, codec = configure("env=CartPoleNoVel").env, algorithm.envs.codec

    def episodes(act: Any, most_beside: int) -> list[Any]:
        return evaluate(lambda: make_env(config), codec, act, range(1, 9), most_beside=most_beside)

    act = act_of(algorithm)
    single = episodes(act, 1)
    assert len({episode.length for episode in single}) > 2
    assert episodes(act, 8) == single
    assert episodes(lambda obs, _, rngs: act(obs, None), 8) != single  # without memory
    obs = np.zeros((2, 2), np.float32)
    assert np.array_equal(algorithm.act(obs), algorithm.act_from(obs, None)[0])
    algorithm.close()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "algo.sequence_length=24",
            "algo.sequence_length=24 does not divide algo.num_steps=256; nearest that does: 16",
        ),
        (
            "algo.num_minibatches=48",
            "algo.num_minibatches=48 does not divide the 128 sequences of a rollout (algo.num_steps=256 / "
            "algo.sequence_length=16 x env.num_envs=8); nearest that does: 32",
        ),
        (
            "algo.num_minibatches=2048 algo.sequence_length=1",
            "algo.num_minibatches=2048 leaves one sample per minibatch, too few to normalise advantages; use "
            "fewer, or algo.normalize_advantage=false",
        ),
        ("algo.num_minibatches=128", None),  # sequences of 16 samples
    ],
)
def test_a_rollout_that_does_not_divide_is_refused_in_a_line(words: str, problem: str | None) -> None:
    words = f"algo=ppo_recurrent env=Hopper {words}"
    if problem is None:
        preflight(words.split())
    else:
        with pytest.raises(ConfigError) as refused:
            preflight(words.split())
        assert str(refused.value) == problem
