"""PPO's first weights and first ratio. What it computes is in test_references.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Configure, build, small
from probe_envs import Value

from rltemplate.algos.ppo import Metrics, PPOReport, approx_kl
from runlab.interfaces import Probe


def test_the_first_ratio_is_one_up_to_rounding_and_the_metric_can_tell(configure: Configure) -> None:
    ppo: Any = build(configure(*small("ppo", env="Pendulum")))[0]
    assert float(ppo.train_iteration().metrics["policy/first_ratio_max_error"]) < 1e-4
    collect = ppo.collect

    def stale(obs: torch.Tensor) -> Any:
        rollout = collect(obs)
        return rollout._replace(log_prob=rollout.log_prob + 0.01)

    ppo.collect = stale
    assert float(ppo.train_iteration().metrics["policy/first_ratio_max_error"]) > 5e-3
    ppo.close()


def test_the_divergence_of_nearly_equal_policies_is_not_negative() -> None:
    log_ratio = 3e-5 * torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    float32 = (log_ratio.exp() - 1.0 - log_ratio).mean(1)
    assert float32.min() < 0.0
    kl = torch.stack([approx_kl(row) for row in log_ratio])
    assert kl.min() > 0.0
    torch.testing.assert_close(kl, 0.5 * log_ratio.square().mean(1), rtol=1e-3, atol=0.0)


def test_values_explain_nothing_of_equal_returns(configure: Configure) -> None:
    """Their variance is that of rounding, and a share of it is no number that means anything."""
    plain = ("algo.normalize_obs=false", "algo.normalize_reward=false")
    words = small("ppo", f"env.id={Value.__name__}-v0", "+env.kwargs.actions=discrete", "~recipe", *plain)
    ppo: Any = build(configure(*words))[0]
    assert [float(ppo.train_iteration().metrics["value/explained_variance"]) for _ in range(3)] == [0.0] * 3
    ppo.close()


def test_the_traced_gradient_is_the_one_before_clipping(configure: Configure) -> None:
    words = small("ppo", "algo.max_grad_norm=0.01", "algo.update_epochs=1", env="Pendulum")
    ppo: Any = build(configure(*words))[0]
    reports: list[PPOReport] = []

    class Reports(Probe):
        def results(self, event: str, values: Any, whole: bool = False) -> None:
            reports.extend(value for value in values if isinstance(value, PPOReport))

    ppo.probe = Reports()
    ppo.train_iteration()
    norms = [Metrics(*report.metrics).optim_grad_norm for report in reports]
    assert len(norms) == ppo.config.num_minibatches
    for report, norm in zip(reports, norms, strict=True):
        torch.testing.assert_close(report.gradient.norm(), norm)
        assert norm > 0.01
    ppo.close()


def test_the_first_iteration_reports_the_episodes_of_both_of_its_rollouts(configure: Configure) -> None:
    words = small("ppo", "algo.normalize_obs=true", "env.max_episode_steps=8", env="Pendulum")
    ppo: Any = build(configure(*words))[0]
    per_rollout = ppo.config.num_steps * ppo.envs.num_envs // 8
    assert [len(ppo.train_iteration().episodes) for _ in range(2)] == [2 * per_rollout, per_rollout]
    ppo.close()


def test_initial_weights_have_the_stated_gains(configure: Configure) -> None:
    ppo: Any = build(configure(*small("ppo", "algo.log_std_init=-0.7", env="Pendulum")))[0]
    agent = ppo.net.module.cpu()
    for network, gain in ((agent.actor, 0.01), (agent.critic, 1.0)):
        weights = [p for p in network.parameters() if p.dim() == 2]
        for weight, scale in zip(weights, [*[2**0.5] * (len(weights) - 1), gain], strict=True):
            short = weight if len(weight) <= weight.shape[1] else weight.T
            torch.testing.assert_close(
                short @ short.T, scale**2 * torch.eye(len(short)), atol=1e-5, rtol=1e-4
            )
        assert not any(bool(p.any()) for p in network.parameters() if p.dim() == 1)
    assert agent.log_std.tolist() == [pytest.approx(-0.7)]
    ppo.close()
