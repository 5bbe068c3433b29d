"""Types and ranges of the hyperparameters of PPO with a mixture of experts. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from runlab.config.algorithms import choice, count, number, positive, setting

from . import ppo_config
from .ppo_config import PPOConfig


@dataclass(slots=True, kw_only=True)
class PPOMoEConfig(PPOConfig):
    """PPO with a mixture of experts; each value is explained in `conf/algo/ppo_moe.yaml`."""

    num_experts: int = count(1024)
    num_chosen: int = count(1024, aliases="top_k")
    router_gain: float = positive(needs="orthogonal_init")
    balance_coef: float = number(0.0, aliases="aux_loss_coef")
    replay_routing: str = choice("all", "flipped", "none")
    rollout_dtype: str = choice("float32", "bfloat16")
    rollout_bits: int | None = number(1, 22)
    fp32_head: bool = setting()

    def problems(self, num_envs: int) -> Iterator[str]:
        yield from PPOConfig.problems(self, num_envs)
        if self.num_chosen > self.num_experts:
            yield f"algo.num_chosen={self.num_chosen}: must be at most algo.num_experts={self.num_experts}"

    def product_problems(self, products: str) -> Iterator[str]:
        """Numpy, which computes the products `blas`, has no bfloat16."""
        if products == "blas" and self.rollout_dtype == "bfloat16":
            yield (
                "algo.rollout_dtype=bfloat16: not with determinism.products=blas, whose numpy has no "
                "bfloat16; use determinism=invariant, or algo.rollout_dtype=float32"
            )

    def acts_as_it_learns(self) -> bool:
        return self.rollout_dtype == "float32" and self.rollout_bits is None

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> Iterator[tuple[str, int]]:
        """Yield the experts as well: weights, gradient and two moments, and outputs for each sample."""
        yield from PPOConfig.memory(self, num_envs, obs_size, action_size)
        *_, size_in, size_out = obs_size, *self.hidden_sizes
        weights = self.num_experts * size_in * size_out
        yield f"algo.num_experts={self.num_experts}: training takes", 4 * weights
        rows = self.num_steps * num_envs
        yield f"their outputs for a rollout of {rows} samples take", rows * self.num_experts * size_out

    def least_parameters(self) -> int:
        """The experts as well, which may read the observation."""
        *_, size_in, size_out = 1, *self.hidden_sizes
        return PPOConfig.least_parameters(self) + (self.num_experts - 1) * size_in * size_out

    def multiplications(self, num_envs: int) -> int:
        """All experts compute all samples, in one product."""
        return self.num_experts * PPOConfig.multiplications(self, num_envs)


ENTRY = dataclasses.replace(
    ppo_config.ENTRY,
    config=PPOMoEConfig,
    implementation=f"{__package__}.ppo_moe:PPOMoE",
    takes_images=False,
    console={**ppo_config.ENTRY.console, "moe/flip_fraction": "flips"},
)
