"""PPO's advantages by hand, its first weights and ratio, and that its update means the same compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import SHRUNK, Configure, unreadable

from rltemplate.algos.ppo import PPO, ActorCritic, Coefficients, Minibatch
from rltemplate.learning.normalize import Scaling
from rltemplate.learning.on_policy import compute_gae
from rltemplate.train import build_algorithm


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def test_advantages_by_hand_with_a_truncated_and_a_terminated_step() -> None:
    advantage = compute_gae(
        reward=column(1.0, 2.0, 3.0, 4.0),
        value=column(0.5, 0.6, 0.7, 0.8),
        next_value=column(0.6, 0.9, 123.0, 0.4),  # 0.9 is the final observation's, 123 must not matter
        terminated=column(0.0, 0.0, 1.0, 0.0),
        done=column(0.0, 1.0, 1.0, 0.0),
        gamma=0.9,
        gae_lambda=0.8,
    )
    last = 4.0 + 0.9 * 0.4 - 0.8
    ended = 3.0 - 0.7
    cut = 2.0 + 0.9 * 0.9 - 0.6
    first = 1.0 + 0.9 * 0.6 - 0.5 + 0.9 * 0.8 * cut
    torch.testing.assert_close(advantage, column(first, cut, ended, last))


def pendulum(configure: Configure, *overrides: str) -> PPO:
    algorithm, _ = build_algorithm(configure("algo=ppo", "env=Pendulum", *SHRUNK["ppo"], *overrides))
    assert isinstance(algorithm, PPO)
    return algorithm


def test_the_first_ratio_is_one_up_to_rounding_and_the_metric_can_tell(configure: Configure) -> None:
    ppo = pendulum(configure)
    assert float(ppo.train_iteration().metrics["policy/first_ratio_max_error"]) < 1e-4
    collect = ppo._collect

    def stale(obs: torch.Tensor) -> Any:
        rollout = collect(obs)
        return rollout._replace(log_prob=rollout.log_prob + 0.01)

    ppo._collect = stale
    assert float(ppo.train_iteration().metrics["policy/first_ratio_max_error"]) > 5e-3
    ppo.close()


def test_initial_weights_have_the_stated_gains(configure: Configure) -> None:
    ppo = pendulum(configure, "algo.log_std_init=-0.7")
    agent = ppo.net.module
    assert isinstance(agent, ActorCritic)
    for network, gain in ((agent.actor, 0.01), (agent.critic, 1.0)):
        *_, last = [p for p in network.parameters() if p.dim() == 2]
        torch.testing.assert_close(last @ last.T, gain**2 * torch.eye(len(last)), atol=1e-6, rtol=1e-4)
    assert agent.log_std is not None
    assert agent.log_std.tolist() == [pytest.approx(-0.7)]
    ppo.close()


def test_nothing_waits_for_a_value_while_it_learns(configure: Configure) -> None:
    """Such as `.item()`, `if tensor`, or a number from the CPU in between: a GPU would stand still."""
    ppo = pendulum(configure)
    rows = torch.zeros(6)
    mb = Minibatch(torch.zeros(6, 3), torch.zeros(6, 1), rows, rows, rows, rows)
    report, net = ppo.update(*unreadable((ppo.state.net, mb, Coefficients(*torch.ones(3).unbind()))))
    assert net.params.device.type == report.metrics.device.type == "meta"
    scaling, obs, noise = Scaling(torch.zeros(3), torch.ones(3)), torch.zeros(2, 3), torch.zeros(2, 1)
    decision = ppo.policy_step(*unreadable((ppo.state.net.params, scaling, obs, noise)))
    assert decision.action.shape == (2, 1)
    ppo.close()


@pytest.mark.slow
def test_at_full_size_compiled_updates_compute_what_plain_ones_do(configure: Configure) -> None:
    """Two rollouts of the recipe, 640 updates. In a third, a last bit may end an episode a step earlier."""
    flats = []
    for flag in ("false", "true"):
        algorithm, _ = build_algorithm(configure("algo=ppo", "env=Hopper", f"compile={flag}"))
        assert isinstance(algorithm, PPO)
        start = algorithm.state.net.params
        for _ in range(2):
            algorithm.train_iteration()
        flats.append(algorithm.state.net.params)
        algorithm.close()
    # Adam divides by how much gradients vary, so that last bits grow with every update.
    torch.testing.assert_close(flats[1], flats[0], rtol=0, atol=1e-5)
    assert (flats[0] - start).abs().max() > 1e-2
