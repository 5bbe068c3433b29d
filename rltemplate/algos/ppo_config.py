"""Types and ranges of the hyperparameters of PPO. Nothing here imports torch (docs/extending.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from runlab.config.algorithms import Entry, Schedule, choice, count, number, positive, setting
from runlab.errors import ConfigError

from ..learning.config import GradientConfig

if TYPE_CHECKING:
    from runlab.interfaces import Codec

# Encoders of images, and the pixels that each needs in height and width.
SMALLEST_IMAGE = {"nature": 36, "impala": 8, "small": 4}
# Filters of their last convolutions, and an edge there: (n - less) // by, for one of n pixels.
LAST_FILTERS = {"nature": (64, 28, 8), "impala": (32, -7, 8), "small": (64, 2, 2)}
_MOST_WEIGHTS = 2**26  # of an encoder; training it takes 1 GiB, and drawing it minutes


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
    ent_coef_schedule: Schedule = setting(needs="ent_coef")
    vf_coef: float = number(0.0)
    max_grad_norm: float = positive()
    target_kl: float | None = positive()
    normalize_advantage: bool = setting(aliases="norm_adv")
    recompute_advantage: bool = setting()
    normalize_reward: bool = setting()
    reward_clip: float = positive(needs="normalize_reward")
    encoder: str = choice("auto", "none", *SMALLEST_IMAGE)
    encoder_size: int = count(16_384, aliases="features_dim cnn_output_dim", needs="encoder")
    standardize_images: bool = setting(needs="encoder")
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

    def fitted(self, codec: Codec) -> Self:
        """Choose an encoder for images as well."""
        config, shape = GradientConfig.fitted(self, codec), getattr(codec, "image_shape", ())
        if not shape:
            if self.encoder not in ("auto", "none"):
                raise ConfigError(
                    f"algo.encoder={self.encoder}: {codec.env_id} observes no images of bytes; use "
                    "algo.encoder=auto"
                )
            return replace(config, encoder="none")
        if config.normalize_obs:
            raise ConfigError(
                f"algo.normalize_obs=true: {codec.env_id} observes images, whose pixels are divided by 255 "
                "instead; use algo.normalize_obs=auto, perhaps with algo.standardize_images=true"
            )
        edge, name = min(shape[1:]), self.encoder
        if name == "auto":
            name = "nature" if edge >= SMALLEST_IMAGE["nature"] else "small"
        least = SMALLEST_IMAGE.get(name)
        if least is None or edge < least:
            needs = "is for vectors" if least is None else f"needs images of {least} x {least} pixels"
            small = edge < SMALLEST_IMAGE["small"]
            instead = "env.wrappers.FlattenObservation=null, a vector" if small else "algo.encoder=auto"
            raise ConfigError(
                f"algo.encoder={name}: {needs}, and {codec.env_id} observes images of "
                f"{shape[1]} x {shape[2]}; use {instead}"
            )
        filters, less, by = LAST_FILTERS.get(name, (0, 0, 1))  # one of your own is not counted
        weights = filters * ((shape[1] - less) // by) * ((shape[2] - less) // by) * self.encoder_size
        weights += 32 * 8 * 8 * shape[0]  # the first convolution of nature, the largest one
        if weights > _MOST_WEIGHTS:
            raise ConfigError(
                f"algo.encoder_size={self.encoder_size}: {weights:,} weights of encoder={name} for the "
                f"images {shape} of {codec.env_id}, and {_MOST_WEIGHTS:,} is the most; use a smaller size, "
                "or env.wrappers.ResizeObservation.shape=[84,84]"
            )
        return replace(config, encoder=name)

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> Iterator[tuple[str, int]]:
        """Yield a rollout as well: observations, again where they are scaled, actions, and six numbers."""
        if self.encoder == "none":
            yield from GradientConfig.memory(self, num_envs, obs_size, action_size)
        else:  # each pixel is a number there, and about as many come out of the convolutions
            batch = self.batch(num_envs)
            yield f"an update of {batch} images takes", batch * 8 * obs_size
        rollout = self.num_steps * num_envs
        of = f"algo.num_steps={self.num_steps} x env.num_envs={num_envs}"
        yield (
            f"{of}: a rollout takes",
            rollout * ((1 + bool(self.normalize_obs)) * obs_size + action_size + 6),
        )

    def multiplications(self, num_envs: int) -> int:
        """With an encoder that has a name, those of its largest convolution for 84 x 84 pixels."""
        of_image = {"nature": 81 * 64 * 512, "impala": 1764 * 16 * 144}.get(self.encoder, 0)
        return max(self.batch(num_envs) * of_image, GradientConfig.multiplications(self, num_envs))

    def batch(self, num_envs: int) -> int:
        return self.num_steps * num_envs // self.num_minibatches


ENTRY = Entry(
    PPOConfig,
    f"{__package__}.ppo:PPO",
    takes_images=True,
    takes_masks=True,
    console={"policy/entropy": "entropy", "loss/policy": "policy loss", "loss/value": "value loss"},
    zero_metric="policy/first_ratio_max_error",
)


def nearest_divisor(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min([*small, *(number // d for d in small)], key=lambda d: (abs(d - wanted), d))
