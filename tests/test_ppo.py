"""PPO's estimates by hand, its loss, and that its update means the same eagerly and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import SHRUNK, Configure, unreadable

from rltemplate.algos.ppo import PPO, Minibatch, compute_gae, ppo_loss
from rltemplate.config import Config
from rltemplate.networks import DiagGaussian
from rltemplate.optim import gradient
from rltemplate.train import build_algorithm


def build(config: Config) -> PPO:
    algorithm, _ = build_algorithm(config)
    assert isinstance(algorithm, PPO)
    return algorithm


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


def test_with_lambda_one_advantage_and_value_are_the_discounted_return() -> None:
    reward = column(1.0, 1.0, 1.0)
    value = column(0.3, -0.2, 0.1)
    next_value = torch.cat([value[1:], column(5.0)])
    advantage = compute_gae(reward, value, next_value, column(0, 0, 0), column(0, 0, 0), 0.5, 1.0)
    assert (advantage + value)[0].item() == pytest.approx(1.0 + 0.5 + 0.25 + 0.125 * 5.0)


@pytest.mark.parametrize("truncate", [True, False])
def test_a_rollout_bootstraps_from_the_final_observation_only_where_truncated(
    configure: Configure, truncate: bool
) -> None:
    kwargs = ["+env.kwargs.length=5", f"+env.kwargs.truncate={truncate}"]
    overrides = ["env.id=Scripted-v0", *kwargs, *SHRUNK["ppo"], "algo.normalize_reward=false"]
    algorithm = build(configure("algo=ppo", *overrides, "algo.update_epochs=1"))
    before = {name: p.clone() for name, p in algorithm.agent.named_parameters()}
    result = algorithm.train_iteration()
    seen: dict[str, Any] = dict(result.probes)

    def value(obs: torch.Tensor) -> torch.Tensor:
        estimate: torch.Tensor = torch.func.functional_call(algorithm.agent, before, (obs,))[1]
        return estimate

    cuts = seen["truncated"].nonzero()
    assert len(seen["final_obs"]) == len(cuts) == (6 if truncate else 0)
    config, decay = algorithm.config, torch.zeros(2)
    expected = torch.zeros(16, 2)
    # The final observation of an episode is [episode, 5], so it can be written down without the rollout.
    for t in range(15, -1, -1):
        ends = (t + 1) % 5 == 0
        if ends:
            final = torch.tensor([[t // 5, 5.0]]).expand(2, 2).clamp(-10, 10)
            following = value(final) if truncate else torch.zeros(2)
        else:
            following = value(seen["normalized_obs"][t + 1] if t < 15 else seen["last_obs"])
        delta = seen["reward"][t] + config.gamma * following - value(seen["normalized_obs"][t])
        decay = delta + (0.0 if ends else config.gamma * config.gae_lambda) * decay
        expected[t] = decay
    torch.testing.assert_close(seen["advantage"], expected, atol=1e-4, rtol=1e-4)
    algorithm.close()


def minibatch(size: int = 12) -> Minibatch:
    g = torch.Generator().manual_seed(0)
    draw = [torch.randn(size, generator=g) for _ in range(4)]
    return Minibatch(torch.randn(size, 3, generator=g), torch.randn(size, 1, generator=g), *draw)


def pendulum(configure: Configure, *overrides: str) -> PPO:
    return build(configure("algo=ppo", "env=Pendulum", *SHRUNK["ppo"], *overrides))


def test_where_the_ratio_is_clipped_the_policy_gets_no_gradient(configure: Configure) -> None:
    ppo = pendulum(configure, "algo.normalize_advantage=false", "algo.vf_coef=0", "algo.ent_coef=0")
    mb = minibatch()
    params, _ = ppo.net.call(ppo.net.flat, mb.obs)
    log_prob = ppo.dist.log_prob(params, mb.action)
    advantage = torch.ones(12)
    far = mb._replace(log_prob=log_prob - 1.0, advantage=advantage)  # ratio e: above 1.2 with a gain
    worse = mb._replace(log_prob=log_prob - 1.0, advantage=-advantage)  # above 1.2 with a loss: not clipped
    for batch, clipped in ((far, True), (worse, False)):
        grad, _ = gradient(ppo_loss, ppo.net.flat, ppo.net, ppo.dist, ppo.config, batch)
        assert (grad.abs().max().item() == 0.0) is clipped
    ppo.close()


def test_value_clipping_takes_the_worse_of_both_errors(configure: Configure) -> None:
    mb = minibatch()
    losses = []
    for flag in ("true", "false"):
        ppo = pendulum(configure, f"algo.clip_value_loss={flag}")
        _, value = ppo.net.call(ppo.net.flat, mb.obs)
        far = mb._replace(value=value + 5.0, ret=value.clone())
        losses.append(ppo_loss(ppo.net.flat, ppo.net, ppo.dist, ppo.config, far)[1][1].item())
        ppo.close()
    assert losses[1] == pytest.approx(0.0)
    assert losses[0] == pytest.approx(0.5 * (5.0 - 0.2) ** 2, rel=1e-4)


def test_the_first_ratio_is_one_up_to_rounding_and_the_metric_can_tell(configure: Configure) -> None:
    ppo = pendulum(configure)
    assert float(ppo.train_iteration().metrics["policy/first_ratio_max_error"]) < 1e-4
    collect = ppo._collect

    def stale() -> Any:
        rollout, raw, episodes = collect()
        return rollout._replace(log_prob=rollout.log_prob + 0.01), raw, episodes

    ppo._collect = stale  # type: ignore[method-assign]
    assert float(ppo.train_iteration().metrics["policy/first_ratio_max_error"]) > 5e-3
    ppo.close()


def test_target_kl_ends_the_passes_early(configure: Configure) -> None:
    moved = []
    for limit in ("1e-12", "null"):
        ppo = pendulum(configure, f"algo.target_kl={limit}", "algo.update_epochs=6")
        ppo.train_iteration()
        moved.append(float(ppo.adam.steps))
        ppo.close()
    assert moved == [4.0, 24.0]


def test_the_learning_rate_falls_in_a_line_to_zero(configure: Configure) -> None:
    linear = pendulum(configure, "total_env_steps=64", "algo.learning_rate_schedule=linear")
    constant = pendulum(configure, "total_env_steps=64", "algo.learning_rate_schedule=constant")
    rates = [
        [float(ppo.train_iteration().metrics["optim/learning_rate"]) for _ in range(3)]
        for ppo in (linear, constant)
    ]
    assert rates[0] == pytest.approx([1e-3, 5e-4, 0.0])
    assert rates[1] == pytest.approx([1e-3, 1e-3, 1e-3])
    linear.close()
    constant.close()


def test_reward_scaling_divides_by_the_deviation_of_the_discounted_return(configure: Configure) -> None:
    ppo = pendulum(configure, "algo.gamma=0.5")
    rollout, _, _ = ppo._collect()
    scaled = ppo._scaled_reward(rollout)
    running, returns = torch.zeros(2), []
    for t in range(16):
        running = 0.5 * running + rollout.reward[t]
        returns.append(running)
    deviation = torch.stack(returns).std(correction=0)
    torch.testing.assert_close(scaled, (rollout.reward / deviation).clamp(-10, 10), rtol=1e-4, atol=1e-5)
    ppo.close()


def test_policy_noise_has_the_configured_initial_deviation(configure: Configure) -> None:
    ppo = pendulum(configure, "algo.log_std_init=-0.7")
    params = ppo.agent.policy(torch.zeros(1, 3))
    assert isinstance(ppo.dist, DiagGaussian)
    assert params[0, 1].item() == pytest.approx(-0.7)
    ppo.close()


def test_nothing_waits_for_a_value_while_it_learns(configure: Configure) -> None:
    """Such as `.item()`, `if tensor`, or a number from the CPU in between: a GPU would stand still."""
    ppo = pendulum(configure)
    rows = torch.zeros(6)
    mb = Minibatch(torch.zeros(6, 3), torch.zeros(6, 1), rows, rows, rows, rows)
    flat, _, report = ppo._one_update(*unreadable((ppo.net.flat, ppo.adam, mb, torch.tensor(0.1))))
    assert flat.device.type == report.device.type == "meta"
    assert report.shape == (7,)
    scaling = (torch.zeros(3), torch.ones(3))
    decision = ppo._one_decision(*unreadable((ppo.net.flat, scaling, torch.zeros(2, 3), torch.zeros(2, 1))))
    assert decision[-2].shape == (2, 1)
    ppo.close()


def test_eager_and_compiled_updates_agree(configure: Configure) -> None:
    """After eight updates from the same rollout, weights agree to a thousandth of what Adam moved them."""
    flats, start = [], None
    for flag in ("false", "true"):
        ppo = pendulum(configure, f"compile={flag}")
        start = ppo.net.flat.clone()
        ppo.train_iteration()
        flats.append(ppo.net.flat.clone())
        ppo.close()
    assert start is not None
    moved = (flats[0] - start).abs().max()
    assert moved > 1e-3
    assert (flats[0] - flats[1]).abs().max() < 1e-3 * moved


@pytest.mark.slow
def test_at_full_size_compiled_updates_compute_what_plain_ones_do(configure: Configure) -> None:
    """Two rollouts of the recipe, 640 updates. In a third, a last bit may end an episode a step earlier."""
    flats = []
    for flag in ("false", "true"):
        algorithm, _ = build_algorithm(configure("algo=ppo", "env=Hopper", f"compile={flag}"))
        assert isinstance(algorithm, PPO)
        start = algorithm.net.flat.clone()
        for _ in range(2):
            algorithm.train_iteration()
        flats.append(algorithm.net.flat.clone())
        algorithm.close()
    # Adam divides by how much gradients vary, so that last bits grow with every update.
    torch.testing.assert_close(flats[1], flats[0], rtol=0, atol=1e-5)
    assert (flats[0] - start).abs().max() > 1e-2
