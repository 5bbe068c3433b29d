"""SAC's losses by hand, its schedule of updates, and that its update means the same eagerly and compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import SHRUNK, Configure, unreadable

from rltemplate.algos.sac import SAC, Seen, actor_loss, alpha_loss, critic_loss
from rltemplate.buffers import Batch
from rltemplate.optim import gradient
from rltemplate.programs import Flat, flatten, traced
from rltemplate.train import build_algorithm
from rltemplate.types import ConfigError, Probe


def build(configure: Configure, *overrides: str) -> SAC:
    algorithm, _ = build_algorithm(configure("algo=sac", "env=Pendulum", *SHRUNK["sac"], *overrides))
    assert isinstance(algorithm, SAC)
    return algorithm


def batch(size: int = 6) -> Batch:
    g = torch.Generator().manual_seed(0)
    obs, next_obs = torch.randn(2, size, 3, generator=g)
    action = torch.rand(size, 1, generator=g) * 2 - 1
    ended = torch.tensor([1.0, 0.0] * (size // 2))
    return Batch(obs, action, torch.randn(size, generator=g), next_obs, ended)


def test_the_critic_target_by_hand_and_no_bootstrap_after_termination(configure: Configure) -> None:
    sac = build(configure, "algo.alpha_init=0.3")
    data, noise = batch(), torch.randn(6, 1, generator=torch.Generator().manual_seed(1))
    learner = sac.learner._replace(target=sac.learner.critic + 0.01)  # not the online critic
    loss, _ = critic_loss(learner.critic, learner, sac.nets, data, noise, 0.9, Probe())
    total = 0.0
    for i in range(6):
        action, log_prob = sac.nets.dist.sample(
            sac.nets.actor.call(learner.actor, data.next_obs[i : i + 1]), noise[i : i + 1]
        )
        target_q = sac.nets.critic.call(learner.target, data.next_obs[i : i + 1], action)
        soft = min(target_q[0, 0].item(), target_q[1, 0].item()) - 0.3 * log_prob.item()
        wanted = data.reward[i].item() + (0.0 if i % 2 == 0 else 0.9 * soft)
        q = sac.nets.critic.call(learner.critic, data.obs[i : i + 1], data.action[i : i + 1])
        total += sum((q[k, 0].item() - wanted) ** 2 for k in range(2)) / 6
    assert loss.item() == pytest.approx(total, rel=1e-4)
    sac.close()


def test_the_critic_gradient_does_not_flow_through_the_target(configure: Configure) -> None:
    sac = build(configure)
    data, noise = batch(), torch.zeros(6, 1)
    everything_ended = data._replace(terminated=torch.ones(6))
    reward_only, _ = gradient(
        critic_loss, sac.learner.critic, sac.learner, sac.nets, everything_ended, noise, 0.9, Probe()
    )
    q = sac.nets.critic.call(sac.learner.critic, data.obs, data.action)
    alone, _ = gradient(
        lambda flat: (
            (sac.nets.critic.call(flat, data.obs, data.action) - data.reward).square().mean(1).sum(),
            (),
        ),
        sac.learner.critic,
    )
    assert q.shape == (2, 6)
    torch.testing.assert_close(reward_only, alone)
    sac.close()


def test_the_policy_gradient_leaves_critics_alone_and_follows_the_smaller_one(configure: Configure) -> None:
    sac = build(configure)
    data, noise = batch(), torch.zeros(6, 1)
    loss, (_, log_prob) = actor_loss(sac.learner.actor, sac.learner, sac.nets, data.obs, noise)
    action, log_probs = sac.nets.dist.sample(sac.nets.actor.call(sac.learner.actor, data.obs), noise)
    q = sac.nets.critic.call(sac.learner.critic, data.obs, action)
    expected = (log_probs - torch.minimum(q[0], q[1])).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert log_prob.item() == pytest.approx(log_probs.mean().item(), rel=1e-5)
    sac.close()


def test_temperature_rises_while_entropy_is_below_its_target() -> None:
    log_alpha = torch.zeros(1)
    for log_prob, sign in ((2.0, -1.0), (-2.0, 1.0)):
        grad, _ = gradient(alpha_loss, log_alpha, torch.tensor(log_prob), -1.0)
        assert math.copysign(1.0, grad.item()) == sign  # descent goes against the gradient


def test_updates_per_environment_step_do_not_depend_on_the_number_of_environments(
    configure: Configure,
) -> None:
    done = {}
    for num_envs in (1, 2, 4):
        sac = build(configure, f"env.num_envs={num_envs}", "algo.learning_starts=0")
        sac.train_iteration()
        done[num_envs] = (sac.env_steps, sac._num_updates)
        sac.close()
    assert done == dict.fromkeys((1, 2, 4), (24, 24))


@pytest.mark.parametrize(("per_step", "expected"), [("0.25", 6), ("0.5", 12), ("2", 48)])
def test_fractions_of_updates_add_up(configure: Configure, per_step: str, expected: int) -> None:
    sac = build(configure, f"algo.updates_per_step={per_step}", "algo.learning_starts=0")
    sac.train_iteration()
    assert sac._num_updates == expected
    sac.close()


def test_nothing_is_learned_before_learning_starts(configure: Configure) -> None:
    sac = build(configure, "algo.learning_starts=24")
    before = sac.learner.critic.clone()
    first = sac.train_iteration()
    assert torch.equal(sac.learner.critic, before)
    assert "loss/critic" not in first.metrics
    second = sac.train_iteration()
    assert not torch.equal(sac.learner.critic, before)
    assert {"loss/critic", "alpha/value", "policy/entropy"} <= set(second.metrics)
    sac.close()


def test_the_policy_moves_only_every_policy_delay_updates(configure: Configure) -> None:
    sac = build(configure, "algo.policy_delay=3", "algo.learning_starts=0")
    sac.train_iteration()
    assert (float(sac.learner.critic_adam.steps), float(sac.learner.actor_adam.steps)) == (24.0, 24.0)
    changes, rates = [], sac.rates()
    for _ in range(6):
        before = sac.learner.actor
        sac._learn(rates, Seen())
        changes.append(not torch.equal(sac.learner.actor, before))
    assert changes == [False, False, True] * 2
    sac.close()


def test_nothing_in_an_update_is_scattered(configure: Configure) -> None:
    """A compiled program leaves that to torch where it has to repeat, and joins nothing across it."""

    def operations(function: Any, *args: Any) -> list[str]:
        program = traced(Flat(function, args), flatten(args))
        return [str(node.target) for node in program.graph.nodes if "scatter" in str(node.target)]

    sac = build(configure)
    noise = torch.zeros(6, 1)
    args = (sac.learner, batch(), noise, [noise], sac.rates())
    assert operations(sac._update_both, *args) == []
    least = operations(lambda x: gradient(lambda q: (q.min(0).values.sum(), ()), x)[:1], torch.rand(2, 6))
    assert least != []
    sac.close()


def test_a_fixed_temperature_stays_fixed(configure: Configure) -> None:
    sac = build(configure, "algo.learn_alpha=false", "algo.alpha_init=0.2", "algo.learning_starts=0")
    sac.train_iteration()
    assert sac.learner.log_alpha.exp().item() == pytest.approx(0.2)
    learned = build(configure, "algo.learn_alpha=true", "algo.alpha_init=0.2", "algo.learning_starts=0")
    learned.train_iteration()
    assert learned.learner.log_alpha.exp().item() != pytest.approx(0.2)
    sac.close()
    learned.close()


def test_the_target_entropy_is_minus_the_action_size_unless_given(configure: Configure) -> None:
    default, chosen = build(configure, "env=Hopper"), build(configure, "algo.target_entropy=-0.5")
    assert (default.target_entropy, chosen.target_entropy) == (-3.0, -0.5)
    default.close()
    chosen.close()


def test_all_three_learning_rates_fall_in_a_line(configure: Configure) -> None:
    sac = build(configure, "algo.learning_rate_schedule=linear", "total_env_steps=48")
    start = sac.rates()
    sac.train_iteration()
    half = sac.rates()
    sac.train_iteration()
    assert [float(rate) for rate in half] == pytest.approx([float(rate) / 2 for rate in start])
    assert [float(rate) for rate in sac.rates()] == [0.0, 0.0, 0.0]
    sac.close()


def test_truncation_is_stored_as_not_terminated(configure: Configure) -> None:
    sac = build(configure, "env.max_episode_steps=4", "algo.learning_starts=1000")
    sac.train_iteration()
    assert sac.replay.size == 24
    assert not sac.replay.take(torch.arange(24)).terminated.any()
    sac.close()


@pytest.mark.parametrize("env", ["CartPole", "LunarLander"])
def test_discrete_actions_are_refused_with_what_to_use_instead(configure: Configure, env: str) -> None:
    with pytest.raises(ConfigError, match="use algo=ppo"):
        build_algorithm(configure("algo=sac", f"env={env}"))


@pytest.mark.parametrize("delay", [1, 2])
def test_programs_are_made_before_anything_is_learned_and_fit(configure: Configure, delay: int) -> None:
    words = ["compile=true", "algo.hidden_sizes=[8]", "algo.batch_size=16", f"algo.policy_delay={delay}"]
    sac = build(configure, *words, "algo.learning_starts=20", "algo.steps_per_iteration=12")
    before = sac.learner.critic.clone()
    made = []
    for _ in range(3):
        sac.train_iteration()
        made.append(sac.programs.made)
        assert torch.equal(sac.learner.critic, before) == (sac.env_steps <= 20)
    assert made == [1 + delay] * 3  # to act and to learn; none was made again for rows that have a meaning
    sac.close()


def test_nothing_is_compiled_where_nothing_is_learned(configure: Configure) -> None:
    sac = build(configure, "compile=true", "algo.learning_starts=100000000")
    sac.train_iteration()
    assert sac.programs.made == 0
    sac.close()


def test_nothing_waits_for_a_value_while_it_learns(configure: Configure) -> None:
    """Such as `.item()`, `if tensor`, or a number from the CPU in between: a GPU would stand still."""
    sac = build(configure, "algo.policy_delay=2")
    noise = torch.zeros(6, 1)
    given = unreadable((sac.learner, batch(), noise, [noise, noise], sac.rates()))
    learner, report, actor_report = sac._one_full_update(*given)
    assert learner.critic.device.type == report.device.type == actor_report.device.type == "meta"
    decided = sac._one_decision(*unreadable((sac.learner.actor, (), torch.zeros(1, 3), torch.zeros(1, 1))))
    assert decided[2].shape == (1, 1)
    with pytest.raises(RuntimeError):  # that it would be noticed
        report.mean().item()
    sac.close()


def test_eager_and_compiled_updates_agree(configure: Configure) -> None:
    """After twenty updates the weights agree to a hundredth of what Adam moved them."""
    learners, start = [], None
    for flag in ("false", "true"):
        sac = build(configure, f"compile={flag}", "algo.hidden_sizes=[16,16]", "algo.batch_size=32")
        start = sac.learner.critic.clone()
        sac.train_iteration()
        learners.append(sac.learner)
        sac.close()
    assert start is not None
    moved = (learners[0].critic - start).abs().max()
    assert moved > 1e-3
    assert (learners[0].critic - learners[1].critic).abs().max() < 1e-2 * moved
    torch.testing.assert_close(learners[0].log_alpha, learners[1].log_alpha, atol=1e-4, rtol=0)
