"""The algorithms by name, and the types of their hyperparameters.

The types are here and not beside the networks because the process that checks the command must not import
torch, which takes a second. Values are in `conf/algo/<name>.yaml`, the algorithm is in `algos/<name>.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol

from rltemplate.config.fields import (
    MOST_STEPS,
    count,
    fraction,
    number,
    positive,
)
from rltemplate.types import ConfigError

# Bytes of a number, and of a weight that Adam moves: itself, its gradient and two moments.
FLOAT, LEARNED = 4, 16


class Schedule(Enum):
    """Learning rate over a run: constant, or linear to zero at the last step."""

    constant = "constant"
    linear = "linear"


class Activation(Enum):
    """Nonlinearity between the layers of a network."""

    tanh = "tanh"
    relu = "relu"
    elu = "elu"


@dataclass(slots=True, kw_only=True)
class AlgoConfig:
    """Hyperparameters and checks of every algorithm."""

    name: str = field()

    def problems(self, num_envs: int) -> Iterator[str]:
        """Yield combinations of values that cannot work."""
        return iter(())

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> dict[str, int]:
        """Bytes that a run needs at the least, by the key that decides them."""
        return {}

    def notes(self, num_envs: int, total_env_steps: int) -> Iterator[str]:
        """Yield doubts about values that work and are probably not meant."""
        return iter(())

    def tied_to_total(self) -> Iterator[str]:
        """Yield settings whose meaning depends on `total_env_steps`: a rate that falls to zero at the end."""
        if getattr(self, "learning_rate_schedule", None) is Schedule.linear:
            yield "algo.learning_rate_schedule=linear"


@dataclass(slots=True, kw_only=True)
class PPOConfig(AlgoConfig):
    """Proximal policy optimisation; each value is explained in `conf/algo/ppo.yaml`."""

    learning_rate: float = positive(10.0)
    learning_rate_schedule: Schedule = field()
    adam_eps: float = positive(1.0)
    num_steps: int = count()
    update_epochs: int = count()
    num_minibatches: int = count()
    gamma: float = fraction()
    gae_lambda: float = fraction()
    clip_coef: float = positive()
    clip_value_loss: bool = field()
    ent_coef: float = number(0.0)
    vf_coef: float = number(0.0)
    max_grad_norm: float = positive()
    target_kl: float | None = positive()
    normalize_advantage: bool = field()
    recompute_advantage: bool = field()
    normalize_obs: bool = field()
    obs_clip: float = positive()
    normalize_reward: bool = field()
    reward_clip: float = positive()
    hidden_sizes: list[int] = count()  # noqa: RUF009 - a field, not a shared default
    activation: Activation = field()
    orthogonal_init: bool = field()
    log_std_init: float = number(-20.0, 2.0)

    def problems(self, num_envs: int) -> Iterator[str]:
        """A rollout must divide into minibatches of one size, each with at least two samples."""
        rollout = self.num_steps * num_envs
        if rollout % self.num_minibatches:
            yield (
                f"algo.num_minibatches={self.num_minibatches} does not divide the rollout of {rollout} "
                f"samples (algo.num_steps={self.num_steps} x env.num_envs={num_envs}); "
                f"nearest that does: {_nearest_divisor(rollout, self.num_minibatches)}"
            )
        elif rollout // self.num_minibatches < 2 and self.normalize_advantage:
            instead = (
                f"algo.num_minibatches={rollout // 2} at most" if rollout > 1 else "algo.num_steps=2 at least"
            )
            yield (
                f"algo.num_minibatches={self.num_minibatches} leaves one sample per minibatch, too few to "
                f"normalise advantages; use {instead}, or algo.normalize_advantage=false"
            )

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> dict[str, int]:
        """Policy and value network with their optimiser; a rollout, and what a minibatch makes of it."""
        weights = sum(num_weights([obs_size, *self.hidden_sizes, out]) for out in (action_size, 1))
        rollout = self.num_steps * num_envs
        rows = rollout // self.num_minibatches
        # Of a step also reward, two flags, value, log-probability and advantage.
        steps = rollout * (obs_size + action_size + 6) + rows * 2 * sum(self.hidden_sizes)
        return {"algo.hidden_sizes": LEARNED * weights, "algo.num_steps": FLOAT * steps}


@dataclass(slots=True, kw_only=True)
class SACConfig(AlgoConfig):
    """Soft actor-critic; each value is explained in `conf/algo/sac.yaml`."""

    actor_learning_rate: float = positive(10.0)
    critic_learning_rate: float = positive(10.0)
    alpha_learning_rate: float = positive(10.0)
    learning_rate_schedule: Schedule = field()
    adam_eps: float = positive(1.0)
    steps_per_iteration: int = count()
    gamma: float = fraction()
    tau: float = number(0.0, 1.0, open_low=True)
    batch_size: int = number(2)
    buffer_size: int = count(2 * 10**9)  # rows have 32-bit numbers
    learning_starts: int = number(0, MOST_STEPS)
    updates_per_step: float = positive()
    policy_delay: int = count()
    learn_alpha: bool = field()
    alpha_init: float = positive()
    target_entropy: float | None = number(-1e6, 1e6)
    log_std_min: float = number(-20.0, 2.0)
    log_std_max: float = number(-20.0, 4.0)
    hidden_sizes: list[int] = count()  # noqa: RUF009 - a field, not a shared default
    activation: Activation = field()
    normalize_obs: bool = field()
    obs_clip: float = positive()

    def problems(self, num_envs: int) -> Iterator[str]:
        """The buffer must hold one step, and the bounds of the deviation must not be empty."""
        if self.buffer_size < num_envs:
            yield f"algo.buffer_size={self.buffer_size} cannot hold one step of env.num_envs={num_envs}"
        if self.log_std_min >= self.log_std_max:
            yield (f"algo.log_std_min={self.log_std_min} must be below algo.log_std_max={self.log_std_max}")

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> dict[str, int]:
        """Policy, two critics and their targets with optimisers; the buffer; a batch in all three."""
        actor = num_weights([obs_size, *self.hidden_sizes, 2 * action_size])
        critic = num_weights([obs_size + action_size, *self.hidden_sizes, 1])
        return {
            "algo.hidden_sizes": LEARNED * (actor + 2 * critic) + FLOAT * 2 * critic,
            # Of a transition both observations, and also reward and flag.
            "algo.buffer_size": FLOAT * self.buffer_size * (2 * obs_size + action_size + 2),
            "algo.batch_size": FLOAT * self.batch_size * 3 * sum(self.hidden_sizes),
        }

    def notes(self, num_envs: int, total_env_steps: int) -> Iterator[str]:
        """A run that ends before its first update learns nothing."""
        iteration = max(1, self.steps_per_iteration // num_envs) * num_envs
        last = -(-total_env_steps // iteration) * iteration  # a run ends with its iteration
        if self.learning_starts >= last:
            yield (
                f"algo.learning_starts={self.learning_starts} is not below "
                f"total_env_steps={total_env_steps}: this run collects random actions and learns nothing"
            )


def num_weights(sizes: Sequence[int]) -> int:
    """Number of weights of a multi-layer perceptron with layers of these sizes."""
    return sum((size_in + 1) * size_out for size_in, size_out in pairwise(sizes))


@dataclass(frozen=True, slots=True)
class Entry:
    """An algorithm: the type of its configuration, and `module:class` of its implementation.

    `needs_bounded_box`: actions must be real numbers between finite bounds.
    """

    config: type[AlgoConfig]
    implementation: str
    needs_bounded_box: bool = False


ALGORITHMS: dict[str, Entry] = {
    "ppo": Entry(PPOConfig, "rltemplate.algos.ppo:PPO"),
    "sac": Entry(SACConfig, "rltemplate.algos.sac:SAC", needs_bounded_box=True),
}


class Actions(Protocol):
    """Facts about the actions of an environment; `envs.codec.Codec` has them."""

    env_id: str
    action_space: Any

    @property
    def continuous(self) -> bool:
        """True if actions are real numbers."""
        ...

    @property
    def bounded(self) -> bool:
        """True if every component of a continuous action has finite bounds."""
        ...


def check_actions(algo: str, actions: Actions) -> None:
    """Raise `ConfigError` if the algorithm of this name cannot choose such actions."""
    if not ALGORITHMS[algo].needs_bounded_box:
        return
    if not actions.continuous:
        raise ConfigError(
            f"algo={algo} needs continuous actions (Box), and {actions.env_id} has "
            f"{actions.action_space}; use algo=ppo"
        )
    if not actions.bounded:
        raise ConfigError(
            f"algo={algo} needs finite action bounds, and {actions.env_id} has {actions.action_space}; "
            "use algo=ppo, or register a variant with finite bounds (gymnasium.wrappers.TransformAction)"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))
