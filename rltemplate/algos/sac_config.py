"""Types and ranges of the hyperparameters of SAC. Nothing here imports torch (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runlab.config.algorithms import Entry, choice, number, positive, setting

from ..learning.config import OffPolicyConfig


@dataclass(slots=True, kw_only=True)
class SACConfig(OffPolicyConfig):
    """Soft actor-critic; each value is explained in `conf/algo/sac.yaml`."""

    actor_learning_rate: float = positive(10.0, aliases="lr learning_rate")
    critic_learning_rate: float = positive(10.0)
    alpha_learning_rate: float = positive(10.0, needs="learn_alpha")
    learn_alpha: bool = setting()
    alpha_init: float = positive()
    target_entropy: float | None = number(-1e6, 1e6, needs="learn_alpha")
    network: str = choice("mlp", "residual", aliases="critic_norm")
    log_std_min: float = number(-20.0, 2.0)
    log_std_max: float = number(-20.0, 4.0)

    def problems(self, num_envs: int) -> Iterator[str]:
        yield from OffPolicyConfig.problems(self, num_envs)
        if self.log_std_min >= self.log_std_max:
            yield f"algo.log_std_min={self.log_std_min} must be below algo.log_std_max={self.log_std_max}"
        if self.network == "residual" and len(set(self.hidden_sizes)) != 1:
            wrong = f"algo.hidden_sizes={self.hidden_sizes}"
            yield f"{wrong}: algo.network=residual needs equal sizes, as [128,128]; use algo.network=mlp"

    def layers(self) -> list[int]:
        if self.network == "residual":  # two layers in each block
            blocks = [width for size in self.hidden_sizes for width in (4 * size, size)]
            return [*self.hidden_sizes[:1], *blocks]
        return self.hidden_sizes


ENTRY = Entry(
    SACConfig,
    f"{__package__}.sac:SAC",
    needs_bounded_box=True,
    console={"policy/entropy": "entropy", "loss/policy": "policy loss", "loss/critic": "critic loss"},
    former={"critic_norm": "none"},
)
