"""The algorithms by name, and the types and ranges of their hyperparameters.

The types are here and not beside the networks because the process that checks the command must not import
torch, which takes a second. Values are in `conf/algo/<name>.yaml`, the algorithm is in `algos/<name>.py`.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from rltemplate.config.entry_points import brought, load
from rltemplate.interfaces import ConfigError

# Upper bounds of environment steps (three years at 10,000 a second) and of all other counts.
MOST_STEPS = 10**12
_MOST = 10**9
_FLOAT32 = 4  # bytes


def number(low: float, high: float = _MOST, *, open_low: bool = False) -> Any:
    """A configuration field without a default whose value must lie in [low, high] (or (low, high])."""
    return field(metadata={"low": low, "high": high, "open_low": open_low})


def positive(high: float = float(_MOST)) -> Any:
    """A configuration field without a default whose value must be greater than zero."""
    return number(0.0, high, open_low=True)


def choice(*names: str | None) -> Any:
    """A configuration field without a default whose value must be one of `names`."""
    return field(metadata={"choices": names})


def count(high: float = _MOST) -> Any:
    """A configuration field without a default that counts something, or lists counts: 1 or more."""
    return number(1, high)


# A coefficient over a run: constant, or falling linearly to zero at the last step.
Schedule = StrEnum("Schedule", ["constant", "linear"])


@dataclass(slots=True, kw_only=True)
class AlgoConfig:
    """Hyperparameters and checks of every algorithm."""

    name: str = field()
    learning_rate_schedule: Schedule = field()
    adam_eps: float = positive(1.0)
    gamma: float = number(0.0, 1.0)
    hidden_sizes: list[int] = count(16_384)  # noqa: RUF009 - a field, not a shared default
    activation: str = choice("tanh", "relu", "elu")
    normalize_obs: bool = field()
    obs_clip: float = positive()

    def problems(self, num_envs: int) -> Iterator[str]:
        """Yield combinations of values that cannot work."""
        return iter(())

    def notes(self, num_envs: int, total_env_steps: int) -> Iterator[str]:
        """Yield warnings about values that work and are probably a mistake."""
        return iter(())

    def batch(self, num_envs: int) -> int:
        """Samples in one update."""
        return 1

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> Iterator[tuple[str, int]]:
        """Yield the large parts of a run in memory: what takes it, and how many float32 numbers it has."""
        sizes = [obs_size, *self.hidden_sizes, action_size]
        weights = sum(a * b for a, b in itertools.pairwise(sizes))
        # Two networks at least, each with its gradient and the two moments of Adam.
        yield f"algo.hidden_sizes={self.hidden_sizes}: training these networks takes", 8 * weights
        batch = self.batch(num_envs)
        yield f"an update of {batch} samples takes", batch * sum(sizes)

    def compile_from(self) -> int:
        """Environment steps of a run from which compiled updates save more time than compiling takes.

        Compiling takes 4 to 20 s. PPO then saves 0.06 s (Hopper) to 0.11 s (CartPole) per 1,000 steps.
        """
        return 150_000

    def tied_to_total(self) -> Iterator[str]:
        """Yield settings that depend on `total_env_steps`: coefficients that fall to zero at the end."""
        for each in fields(self):
            if getattr(self, each.name) is Schedule.linear:
                yield f"algo.{each.name}=linear"


@dataclass(slots=True, kw_only=True)
class PPOConfig(AlgoConfig):
    """Proximal policy optimisation; each value is explained in `conf/algo/ppo.yaml`."""

    learning_rate: float = positive(10.0)
    num_steps: int = count(10**6)
    update_epochs: int = count(10_000)
    num_minibatches: int = count()
    gae_lambda: float = number(0.0, 1.0)
    clip_coef: float = positive()
    clip_coef_schedule: Schedule = field()
    clip_value_loss: bool = field()
    ent_coef: float = number(0.0)
    ent_coef_schedule: Schedule = field()
    vf_coef: float = number(0.0)
    max_grad_norm: float = positive()
    target_kl: float | None = positive()
    normalize_advantage: bool = field()
    recompute_advantage: bool = field()
    normalize_reward: bool = field()
    reward_clip: float = positive()
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
        elif rollout == self.num_minibatches and self.normalize_advantage:
            yield (
                f"algo.num_minibatches={self.num_minibatches} leaves one sample per minibatch, too few to "
                "normalise advantages; use fewer, or algo.normalize_advantage=false"
            )

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> Iterator[tuple[str, int]]:
        """Yield a rollout as well: observation, action, and six numbers of each step."""
        yield from AlgoConfig.memory(self, num_envs, obs_size, action_size)
        rollout = self.num_steps * num_envs
        of = f"algo.num_steps={self.num_steps} x env.num_envs={num_envs}"
        yield f"{of}: a rollout takes", rollout * (obs_size + action_size + 6)

    def batch(self, num_envs: int) -> int:
        """Samples in a minibatch."""
        return self.num_steps * num_envs // self.num_minibatches


@dataclass(slots=True, kw_only=True)
class OffPolicyConfig(AlgoConfig):
    """Algorithms that learn from a replay buffer; each value is explained in `conf/algo/sac.yaml`."""

    steps_per_iteration: int = count(10**7)
    tau: float = number(0.0, 1.0, open_low=True)
    batch_size: int = number(2)
    buffer_size: int = count(10**9)
    learning_starts: int = number(0, MOST_STEPS)
    updates_per_step: float = positive(10_000.0)
    policy_delay: int = count(10**6)

    def problems(self, num_envs: int) -> Iterator[str]:
        """The buffer must hold one step."""
        if self.buffer_size < num_envs:
            yield f"algo.buffer_size={self.buffer_size} cannot hold one step of env.num_envs={num_envs}"

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> Iterator[tuple[str, int]]:
        """Yield a full replay buffer as well."""
        yield from AlgoConfig.memory(self, num_envs, obs_size, action_size)
        row = 2 * obs_size + action_size + 3
        yield f"algo.buffer_size={self.buffer_size}: a full buffer takes", self.buffer_size * row

    def batch(self, num_envs: int) -> int:
        """Transitions per update."""
        return self.batch_size

    def compile_from(self) -> int:
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


@dataclass(slots=True, kw_only=True)
class SACConfig(OffPolicyConfig):
    """Soft actor-critic; each value is explained in `conf/algo/sac.yaml`."""

    actor_learning_rate: float = positive(10.0)
    critic_learning_rate: float = positive(10.0)
    alpha_learning_rate: float = positive(10.0)
    learn_alpha: bool = field()
    alpha_init: float = positive()
    target_entropy: float | None = number(-1e6, 1e6)
    critic_norm: str = choice("none", "layer")
    log_std_min: float = number(-20.0, 2.0)
    log_std_max: float = number(-20.0, 4.0)

    def problems(self, num_envs: int) -> Iterator[str]:
        """The bounds of the deviation must not be empty."""
        yield from OffPolicyConfig.problems(self, num_envs)
        if self.log_std_min >= self.log_std_max:
            yield f"algo.log_std_min={self.log_std_min} must be below algo.log_std_max={self.log_std_max}"


@dataclass(frozen=True, slots=True)
class Entry:
    """An algorithm: the type of its configuration, and `module:class` of its implementation.

    `needs_bounded_box`: actions must be real numbers between finite bounds. `needs_discrete`: an
    action must be one whole number. `values`: the content of its file for conf/algo/, where a package
    brings it.
    """

    config: type[AlgoConfig]
    implementation: str
    needs_bounded_box: bool = False
    needs_discrete: bool = False
    values: Mapping[str, Any] | None = None


ALGORITHMS: dict[str, Entry] = {
    "ppo": Entry(PPOConfig, "rltemplate.algos.ppo:PPO"),
    "sac": Entry(SACConfig, "rltemplate.algos.sac:SAC", needs_bounded_box=True),
}


def check_actions(algo: str, codec: Any) -> None:
    """Raise `ConfigError` if the algorithm cannot choose the actions of a `envs.codec.Codec`."""
    if ALGORITHMS[algo].needs_bounded_box and not (codec.continuous and codec.bounded):
        raise ConfigError(
            f"algo={algo} needs continuous actions with finite bounds (Box), and {codec.env_id} has "
            f"{codec.action_space}; use algo=ppo"
        )
    if ALGORITHMS[algo].needs_discrete and len(codec.nvec) != 1:
        raise ConfigError(f"algo={algo} needs Discrete actions, and {codec.env_id} has {codec.action_space}")


def check_memory(config: AlgoConfig, num_envs: int, codec: Any, available: int) -> None:
    """Raise `ConfigError` if a part of a run is larger than the `available` bytes of memory."""
    for part, numbers in config.memory(num_envs, codec.obs_size, codec.action_size):
        if (needed := _FLOAT32 * numbers) > available:
            raise ConfigError(
                f"{part} {needed / 2**30:.1f} GiB, and this machine has {available / 2**30:.1f} GiB, "
                f"enough for {100 * available / needed:.2g} % of it"
            )


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min([*small, *(number // d for d in small)], key=lambda d: (abs(d - wanted), d))


# At the end, because modules of installed packages import this one.
for brought_name in brought("algorithms"):
    try:
        ALGORITHMS.setdefault(brought_name, load(f"algo={brought_name}", "algorithms", brought_name))
    except ConfigError as problem:
        print(f"note: {problem}", file=sys.stderr)
