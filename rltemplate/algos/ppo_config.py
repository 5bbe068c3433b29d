"""Types and ranges of the hyperparameters of PPO. Nothing here imports torch (docs/extending.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from runlab.config.algorithms import Entry, Schedule, count, number, positive, setting

from ..learning.config import GradientConfig


@dataclass(slots=True, kw_only=True)
class PPOConfig(GradientConfig):
    """Proximal policy optimisation; each value is explained in `conf/algo/ppo.yaml`."""

    learning_rate: float = positive(10.0, aliases="lr")
    num_steps: int = count(10**6)
    update_epochs: int = count(10_000, aliases="n_epochs")
    num_minibatches: int = count(aliases="batch_size minibatch_size")
    gae_lambda: float = number(0.0, 1.0)
    clip_coef: float = positive(aliases="clip_range clip_eps")
    clip_coef_schedule: Schedule = setting()
    clip_value_loss: bool = setting()
    ent_coef: float = number(0.0)
    ent_coef_schedule: Schedule = setting()
    vf_coef: float = number(0.0)
    max_grad_norm: float = positive()
    target_kl: float | None = positive()
    normalize_advantage: bool = setting(aliases="norm_adv")
    recompute_advantage: bool = setting()
    normalize_reward: bool = setting()
    reward_clip: float = positive()
    orthogonal_init: bool = setting()
    log_std_init: float = number(-20.0, 2.0)

    def problems(self, num_envs: int) -> Iterator[str]:
        """A rollout must divide into minibatches of one size; normalising advantages takes two samples."""
        rollout = self.num_steps * num_envs
        if rollout % self.num_minibatches:
            yield (
                f"algo.num_minibatches={self.num_minibatches} does not divide the rollout of {rollout} "
                f"samples (algo.num_steps={self.num_steps} x env.num_envs={num_envs}); "
                f"nearest that does: {nearest_divisor(rollout, self.num_minibatches)}"
            )
        elif rollout == self.num_minibatches and self.normalize_advantage:
            yield (
                f"algo.num_minibatches={self.num_minibatches} leaves one sample per minibatch, too few to "
                "normalise advantages; use fewer, or algo.normalize_advantage=false"
            )

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> Iterator[tuple[str, int]]:
        """Yield a rollout as well: observations twice, actions, and six numbers of each step."""
        yield from GradientConfig.memory(self, num_envs, obs_size, action_size)
        rollout = self.num_steps * num_envs
        of = f"algo.num_steps={self.num_steps} x env.num_envs={num_envs}"
        yield f"{of}: a rollout takes", rollout * (2 * obs_size + action_size + 6)

    def batch(self, num_envs: int) -> int:
        return self.num_steps * num_envs // self.num_minibatches


ENTRY = Entry(
    PPOConfig,
    f"{__package__}.ppo:PPO",
    console={"policy/entropy": "entropy", "loss/policy": "policy loss", "loss/value": "value loss"},
    zero_metric="policy/first_ratio_max_error",
)


def nearest_divisor(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min([*small, *(number // d for d in small)], key=lambda d: (abs(d - wanted), d))
