"""Types and ranges of the hyperparameters that several algorithms have. Nothing here imports torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from runlab.config.algorithms import (
    MOST_STEPS,
    AlgoConfig,
    Schedule,
    choice,
    count,
    number,
    positive,
    setting,
)

if TYPE_CHECKING:
    from runlab.interfaces import Codec


@dataclass(slots=True, kw_only=True)
class GradientConfig(AlgoConfig):
    """Hyperparameters and checks of algorithms that train multi-layer perceptrons by gradients."""

    learning_rate_schedule: Schedule = setting(aliases="anneal_lr lr_schedule")
    adam_eps: float = positive(1.0)
    gamma: float = number(0.0, 1.0)
    hidden_sizes: list[int] = count(16_384, aliases="net_arch layers")
    activation: str = choice("tanh", "relu", "elu")
    normalize_obs: bool | str = setting()  # "auto" until it is fitted
    obs_clip: float = positive(needs="normalize_obs")

    def fitted(self, codec: Codec) -> Self:
        """Normalise observations without an image where that is left open."""
        if self.normalize_obs != "auto":
            return self
        return replace(self, normalize_obs=not getattr(codec, "image_shape", ()))

    def batch(self, num_envs: int) -> int:
        """Samples in one update."""
        return 1

    def layers(self) -> list[int]:
        """Outputs of the layers of one network but its last."""
        return self.hidden_sizes

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> Iterator[tuple[str, int]]:
        sizes = [obs_size, *self.layers(), action_size]
        weights = sum(a * b for a, b in itertools.pairwise(sizes))
        # Two networks at least, each with its gradient and the two moments of Adam.
        yield f"algo.hidden_sizes={self.hidden_sizes}: training these networks takes", 8 * weights
        batch = self.batch(num_envs)
        yield f"an update of {batch} samples takes", batch * sum(sizes)

    def least_parameters(self) -> int:
        """Weights between the hidden layers of one network."""
        return sum(a * b for a, b in itertools.pairwise(self.layers()))

    def multiplications(self, num_envs: int) -> int:
        """Multiplications between two hidden layers of the greatest size."""
        return self.batch(num_envs) * max(self.hidden_sizes) * max(self.layers())

    def compile_from(self) -> int | None:
        """Compiling takes 4 to 20 s. PPO then saves 0.06 s (Hopper) to 0.11 s (CartPole) per 1,000 steps."""
        return 150_000


@dataclass(slots=True, kw_only=True)
class OffPolicyConfig(GradientConfig):
    """Algorithms that learn from a replay buffer; each value is explained in `conf/algo/sac.yaml`."""

    steps_per_iteration: int = count(10**7)
    tau: float = number(0.0, 1.0, open_low=True, aliases="polyak")
    batch_size: int = number(2)
    buffer_size: int = count(10**9)
    learning_starts: int = number(0, MOST_STEPS)
    updates_per_step: float = positive(10_000.0, aliases="gradient_steps")
    policy_delay: int = count(10**6)
    policy_average_steps: int = number(0, MOST_STEPS, aliases="ema")

    def problems(self, num_envs: int) -> Iterator[str]:
        if self.buffer_size < num_envs:
            yield f"algo.buffer_size={self.buffer_size} cannot hold one step of env.num_envs={num_envs}"

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> Iterator[tuple[str, int]]:
        yield from GradientConfig.memory(self, num_envs, obs_size, action_size)
        row = 2 * obs_size + action_size + 3
        yield f"algo.buffer_size={self.buffer_size}: a full buffer takes", self.buffer_size * row

    def for_acting(self) -> Self:
        """Acting stores no transitions."""
        return replace(self, buffer_size=1)

    def batch(self, num_envs: int) -> int:
        return self.batch_size

    def compile_from(self) -> int | None:
        """Environment steps of a run with 5,000 updates. Compiling saves about 3 s per 1,000 updates."""
        return self.learning_starts + round(5_000 / self.updates_per_step)

    def notes(self, num_envs: int, total_env_steps: int) -> Iterator[str]:
        """Warn if a run ends before its first update, or learns before it has statistics of observations."""
        iteration = max(1, self.steps_per_iteration // num_envs) * num_envs
        last = -(-total_env_steps // iteration) * iteration  # a run ends with its iteration
        if self.learning_starts >= last:
            yield (
                f"algo.learning_starts={self.learning_starts} is not below "
                f"total_env_steps={total_env_steps}: this run collects random actions and learns nothing"
            )
        if self.normalize_obs and self.learning_starts < iteration:
            yield (
                f"algo.normalize_obs=true: observations are scaled from the second iteration on, and updates "
                f"begin in the first one; algo.learning_starts={iteration} or more avoids it"
            )
