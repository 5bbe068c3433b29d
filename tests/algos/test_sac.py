"""SAC's number of updates, and its programs. What it computes is in test_references.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import Configure, Programs, build, small

from rltemplate.algos.sac import CriticMetrics, Inputs, Learned, LearningRates
from rltemplate.learning.off_policy import UpdateReport
from rltemplate.learning.replay_buffer import Transition
from runlab.errors import ConfigError
from runlab.run.limits import check_state


def test_a_tenth_of_an_update_for_each_step_comes_to_a_tenth_of_the_steps(configure: Configure) -> None:
    """A running sum of 0.1 makes 2,999 of 3,000 updates."""
    words = ["algo.updates_per_step=0.1", "algo.learning_starts=50", "algo.batch_size=2"]
    sac: Any = build(configure(*small("sac", *words)))[0]
    sac.replay.add(Transition(*(torch.zeros(1, *size) for size in ((3,), (1,), (), (3,), (), ()))))
    due = 0
    for sac.env_steps in range(1, 30_051):
        due += sum(1 for _ in sac.due_inputs())
    assert due == 3000
    sac.close()


def test_no_update_is_lost_by_rounding(configure: Configure) -> None:
    """In floating point, 0.29 times 100 is less than 29."""
    words = ["algo.updates_per_step=0.29", "algo.learning_starts=0", "algo.batch_size=2"]
    sac: Any = build(configure(*small("sac", *words, "env.num_envs=1")))[0]
    sac.replay.add(Transition(*(torch.zeros(1, *size) for size in ((3,), (1,), (), (3,), (), ()))))
    sac.env_steps = 100
    assert sum(1 for _ in sac.due_inputs()) == 29
    sac.close()


def test_both_critics_begin_with_weights_of_their_own_that_the_seed_decides(configure: Configure) -> None:
    weights = []
    for seed in 1, 2:
        sac: Any = build(configure(*small("sac", f"seed={seed}")))[0]
        weights += sac.state.learned.critic.params.chunk(2)
        assert torch.equal(sac.state.learned.target, sac.state.learned.critic.params)
        sac.close()
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(weights, 2))


def test_the_report_in_the_trace_is_of_the_update(configure: Configure) -> None:
    """Its target is the one of the loss, and its gradients are those that the optimisers took."""
    sac: Any = build(configure(*small("sac", "algo.policy_delay=1")))[0]
    taken: list[tuple[Learned, Inputs, UpdateReport, Learned]] = []
    update = sac.update

    def kept(learned: Learned, inputs: Inputs, rates: LearningRates) -> tuple[UpdateReport, Learned]:
        report, new = update(learned, inputs, rates)
        taken.append((learned, inputs, report, new))
        return report, new

    sac.update = kept
    sac.train_iteration()
    (before, inputs, report, after), *_ = taken  # the first update: both moments are zero before it
    q = sac.critic.apply(before.critic.params, inputs.batch.obs, inputs.batch.action)
    loss = (q - report.td_target).square().mean(1).sum()
    torch.testing.assert_close(CriticMetrics(*report.critic_metrics).loss_critic, loss)
    torch.testing.assert_close(after.critic.mu, 0.1 * report.critic_gradient)
    torch.testing.assert_close(after.actor.mu, 0.1 * report.actor_gradient[0])
    assert report.critic_gradient.any()
    assert report.actor_gradient[0].any()
    sac.close()


def test_evaluations_act_with_an_average_of_the_weights_which_changes_no_training(
    configure: Configure,
) -> None:
    plain: Any = build(configure(*small("sac")))[0]
    sac: Any = build(configure(*small("sac", "algo.policy_average_steps=240")))[0]
    obs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        plain.train_iteration()
        sac.train_iteration()
    assert torch.equal(sac.state.learned.actor.params, plain.state.learned.actor.params)
    assert torch.equal(sac.state.learned.critic.params, plain.state.learned.critic.params)
    assert torch.equal(sac.policy(obs), sac.actor.apply(sac.state.average, obs))
    assert torch.equal(plain.policy(obs), plain.actor.apply(plain.state.learned.actor.params, obs))
    assert not torch.equal(sac.policy(obs), plain.policy(obs))
    sac.close()
    plain.close()


def test_a_checkpoint_from_before_averages_goes_on_without_one_and_is_refused_with_one(
    configure: Configure,
) -> None:
    without: Any = build(configure(*small("sac")))[0]
    sac: Any = build(configure(*small("sac", "algo.policy_average_steps=240")))[0]
    states = without.state_dict(), sac.state_dict()
    assert [*states[1].keys() - states[0].keys()] == ["average"]
    without.load_state_dict(states[0])
    with pytest.raises(ConfigError, match=r"former: does not fit .* state\.average is missing"):
        check_state(sac, states[0], "former")
    # An average that nobody asked for acts in no evaluation.
    obs = torch.zeros(1, 3)
    before = without.policy(obs)
    without.load_state_dict(states[1] | {"average": torch.zeros(1)})
    assert torch.equal(without.policy(obs), before)
    without.train_iteration()
    sac.close()
    without.close()


@pytest.mark.usefixtures("traced_only")
def test_programs_are_made_once(configure: Configure, programs: Programs) -> None:
    words = ["compile=true", "algo.hidden_sizes=[8]", "algo.batch_size=16", "algo.policy_delay=2"]
    words += ["algo.learning_starts=20", "algo.steps_per_iteration=12"]
    sac: Any = build(configure(*small("sac", *words)))[0]
    made = []
    for _ in range(4):
        sac.train_iteration()
        made.append(programs())
    assert made == [0, 3, 3, 3]  # to act, and to learn with and without the policy
    sac.close()
