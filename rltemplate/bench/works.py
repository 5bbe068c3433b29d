"""Works: the same arithmetic for everybody who does them. And what one measurement is to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

PPO_STEPS, PPO_BATCH, PPO_EPOCHS = 256, 64, 10  # steps of each environment, samples, passes
SAC_BATCH, SAC_BUFFER = 256, 1_000_000
LEARNING_STARTS = 500  # environment steps with random actions, so that measuring begins soon
SAC_ITERATION = 250  # environment steps, conf/algo/sac.yaml
GAMMA = 0.99
OBS_BOUND = REWARD_BOUND = 10.0  # of scaled observations and rewards


class MeasurementError(Exception):
    """A measurement is worth nothing. The message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Work:
    """An algorithm on so many copies of an environment; networks, batches and counts follow from these."""

    algo: str
    env: str  # a file of conf/env/
    env_id: str
    num_envs: int
    scaled: bool = False  # whether PPO scales observations and rewards by running statistics
    warm_up: int = 0  # environment steps that are not counted

    @property
    def name(self) -> str:
        """`ppo-Hopper`; `sac-Hopper-8` where the number of environments is not the usual one."""
        usual = 8 if self.algo == "ppo" else 1
        return f"{self.algo}-{self.env}" + ("" if self.num_envs == usual else f"-{self.num_envs}")

    @property
    def title(self) -> str:
        """For people: `PPO Hopper`."""
        usual = 8 if self.algo == "ppo" else 1
        more = "" if self.num_envs == usual else f", {self.num_envs} environments"
        return f"{self.algo.upper()} {self.env}{more}"

    @property
    def hidden_sizes(self) -> tuple[int, int]:
        """Of each network."""
        return (64, 64) if self.algo == "ppo" else (256, 256)

    @property
    def num_steps(self) -> int:
        """Of each environment in one rollout of PPO, which has as many samples whatever their number."""
        return max(1, 8 * PPO_STEPS // self.num_envs)

    @property
    def first(self) -> int:
        """Environment steps until something has been learned from: a rollout, or an iteration of SAC."""
        return self.num_steps * self.num_envs if self.algo == "ppo" else LEARNING_STARTS + SAC_ITERATION

    def overrides(self) -> list[str]:
        """What this project is told to do; the others are built from the same numbers."""
        sizes = ",".join(map(str, self.hidden_sizes))
        words = [f"algo={self.algo}", f"env={self.env}", f"env.num_envs={self.num_envs}"]
        words += [f"algo.hidden_sizes=[{sizes}]", f"algo.obs_clip={OBS_BOUND}", f"algo.gamma={GAMMA}"]
        if self.algo == "sac":
            return [
                *words,
                "algo.activation=relu",
                f"algo.batch_size={SAC_BATCH}",
                f"algo.buffer_size={SAC_BUFFER}",
                "algo.updates_per_step=1",
                "algo.policy_delay=1",
                f"algo.learning_starts={LEARNING_STARTS}",
                f"algo.steps_per_iteration={SAC_ITERATION}",
                "algo.normalize_obs=false",
            ]
        scaled = str(self.scaled).lower()
        return [
            *words,
            "algo.activation=tanh",
            f"algo.num_steps={self.num_steps}",
            f"algo.num_minibatches={self.num_steps * self.num_envs // PPO_BATCH}",
            f"algo.update_epochs={PPO_EPOCHS}",
            "algo.gae_lambda=0.95",
            "algo.target_kl=null",
            "algo.recompute_advantage=false",
            "algo.normalize_advantage=true",
            "algo.clip_value_loss=false",
            f"algo.normalize_obs={scaled}",
            f"algo.normalize_reward={scaled}",
            f"algo.reward_clip={REWARD_BOUND}",
        ]


_ROLLOUT = 8 * PPO_STEPS
_WORKS = (
    Work("ppo", "Hopper", "Hopper-v5", 8, True, 2 * _ROLLOUT),
    # Its episodes are cut after 1,000 steps, and what the first of these ends needs is compiled then.
    Work("ppo", "HalfCheetah", "HalfCheetah-v5", 8, True, 4 * _ROLLOUT),
    Work("ppo", "Humanoid", "Humanoid-v5", 8, True, 2 * _ROLLOUT),
    Work("ppo", "CartPole", "CartPole-v1", 8, False, 2 * _ROLLOUT),
    *(
        Work("sac", env, f"{env}-v5", num_envs, warm_up=LEARNING_STARTS + SAC_ITERATION)
        for env, num_envs in (("Hopper", 1), ("HalfCheetah", 1), ("Humanoid", 1), ("Hopper", 8))
    ),
)
WORKS: dict[str, Work] = {work.name: work for work in _WORKS}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a contender says of itself, read from the objects that it built.

    Two contenders of one work must agree in all of it.
    """

    env_id: str
    num_envs: int
    steps_between: int  # environment steps between two rounds of updates
    batch_size: int
    value_updates_per_step: float  # per environment step
    policy_updates_per_step: float
    hidden_sizes: tuple[int, ...]  # of the policy
    value_hidden_sizes: tuple[int, ...]  # of one value network
    activation: str  # tanh, relu or elu, told from what it makes of a number
    parameters: int  # learned numbers of all networks, target networks left out
    dtype: str
    obs_bound: float | None  # of observations scaled by running statistics; None: as they are
    reward_bound: float | None
    buffer_size: int | None
    learning_starts: int | None
    gamma: float
    device: str


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """`batch_size 128 instead of 64`, for everything in which two `Arithmetic`s as dicts differ."""
    found = []
    for spec in fields(Arithmetic):
        mine, theirs = (_plain(each[spec.name]) for each in (one, other))
        numbers = isinstance(mine, float) and isinstance(theirs, float)
        if mine != theirs and not (numbers and math.isclose(mine, theirs, rel_tol=1e-6)):
            found.append(f"{spec.name} {mine} instead of {theirs}")
    return found


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement, in a process of its own."""

    part: str
    kind: str  # which measurement of `measure.KINDS`
    work: str  # a name of WORKS
    contender: str  # as tables name it
    library: str = "rltemplate"  # rltemplate, stable_baselines3 or sbx
    cores: int = 1  # that the process and all that it starts may use
    threads: int = 1  # of the numerical library
    seconds: float = 15.0  # to measure for, beyond the warm-up
    device: str = "cpu"
    overrides: tuple[str, ...] = ()  # of this project, beyond those of the work
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {"overrides": list(self.overrides), "options": dict(self.options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Job:
        """The job that `to_dict` gave."""
        return cls(**{**values, "overrides": tuple(values["overrides"])})

    def words(self) -> list[str]:
        """The overrides of this project's configuration."""
        return [
            *WORKS[self.work].overrides(),
            "logger=none",
            "total_env_steps=1000000000",
            f"num_threads={self.threads}",
            f"device={self.device}",
            *self.overrides,
        ]
