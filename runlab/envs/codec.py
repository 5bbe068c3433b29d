"""Translation between an environment's spaces and the flat arrays of algorithms."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from runlab.envs.images import ImageBox, with_image
from runlab.envs.masks import ActionMask, MaskedBox, choices_of, has_mask
from runlab.envs.validity import parts_check
from runlab.errors import ConfigError, RunError


def flattened(env_id: str, env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """The environment with observations that `FlatCodec` takes.

    One with an image becomes an `ImageBox`, a Dict with an `action_mask` for discrete actions a `MaskedBox`.
    """
    if (masked := has_mask(env)) and not isinstance(env, ActionMask):
        env = ActionMask(env_id, env)
    plain = isinstance(space := env.observation_space, spaces.Box | spaces.Discrete)
    if not plain:  # while its parts can be told apart
        env = gym.wrappers.TransformObservation(env, parts_check(space), space)
    if (imaged := with_image(env_id, env, masked)) is not None:
        return imaged
    if plain:
        return env
    flat = gym.wrappers.FlattenObservation(env)
    if masked and isinstance(box := flat.observation_space, spaces.Box):
        flat.observation_space = MaskedBox(box.low, box.high, dtype=box.dtype)
    return flat


class FlatCodec:
    """Observations and actions of an environment as arrays of numbers; the only place that knows spaces.

    Observations become float32 (N, O): Box of any shape flattened, Discrete one-hot. They begin with an image
    of `image_shape`, or () without one, and are bytes where all of their parts are. Actions are float32
    (N, A) in [-1, 1], scaled to the bounds of the Box (components without finite bounds pass unchanged), or
    integers (N, A) from zero for Discrete, MultiDiscrete and MultiBinary. In a Box of integers or bools each
    of them has an equal share of [-1, 1].
    """

    def __init__(self, env_id: str, obs_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.env_id, self.obs_space, self.action_space = env_id, obs_space, action_space
        if not isinstance(obs_space, spaces.Box | spaces.Discrete):
            raise ConfigError(
                f"{env_id} has the observation space {type(obs_space).__name__}; supported: Box, Discrete "
                "and what Gymnasium flattens to a Box; env.wrappers takes a wrapper that gets there"
            )
        self.obs_size = spaces.flatdim(obs_space)
        self.image_shape = obs_space.image_shape if isinstance(obs_space, ImageBox) else ()
        in_bytes = self.image_shape and obs_space.dtype == np.uint8
        self.obs_dtype: np.dtype[Any] = np.dtype(np.uint8 if in_bytes else np.float32)
        self._shape = tuple(action_space.shape or ())
        self.nvec = choices_of(action_space)  # choices per component; empty for continuous actions
        self.mask_size = sum(self.nvec) if isinstance(obs_space, MaskedBox) else 0
        self.continuous = isinstance(action_space, spaces.Box)
        self.bounded = False  # actions are continuous and every component has finite bounds
        if isinstance(action_space, spaces.Box):
            low, high = action_space.low.reshape(-1), action_space.high.reshape(-1)
            bounded = (action_space.bounded_below & action_space.bounded_above).reshape(-1)
            self.bounded, self.action_size = bool(bounded.all()), len(low)
            bottom, top = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
            self._low, self._high = low + 0.0, high + 0.0  # no -0.0: np.minimum may return either zero
            self._whole = action_space.dtype.kind in "iub"  # of bools as well
            if self._whole:  # half a step beyond both ends, so that these have a full share
                bottom, top = low - 0.5, high + 0.5
            center, half = bottom / 2 + top / 2, top / 2 - bottom / 2
            kind, most = (np.float64, 2.0**53) if self._whole else (np.float32, np.finfo(np.float32).max)
            if (self._whole and not bounded.all()) or not np.abs([center, half]).max(initial=0.0) <= most:
                raise ConfigError(
                    f"{env_id} has the action space {action_space}; supported: numbers of float32, and whole "
                    "numbers with bounds up to 2**53; env.wrappers takes a wrapper that gets there"
                )
            self._center, self._half = center.astype(kind), half.astype(kind)
            self._limit = np.where(bounded, 1.0, np.inf).astype(np.float32)
            return
        if not self.nvec:
            raise ConfigError(
                f"{env_id} has the action space {action_space}; supported: Box, Discrete, MultiDiscrete and "
                "MultiBinary; env.wrappers takes a wrapper that gets there"
            )
        self._start = np.reshape(getattr(action_space, "start", 0), -1)
        self.action_size = len(self.nvec)

    def encode_obs(self, obs: Any) -> np.ndarray:
        """A batch of raw observations (N, O), a copy."""
        batch = np.asarray(obs)
        if isinstance(self.obs_space, spaces.Discrete):
            one_hot = np.zeros((len(batch), self.obs_size), np.float32)
            one_hot[np.arange(len(batch)), batch - self.obs_space.start] = 1.0
            return one_hot
        return batch.reshape(len(batch), -1).astype(self.obs_dtype)

    def decode_action(self, action: np.ndarray) -> np.ndarray:
        """Algorithm actions (N, A) as a batch of the environment's own actions.

        `RunError` for NaN and infinity.
        """
        if self.nvec:
            whole: np.ndarray = (action + self._start).reshape(-1, *self._shape)
            return whole.astype(self.action_space.dtype, copy=False)  # others may not be `contained`
        if not np.isfinite(action).all():  # environments blame something else, or hide it
            row, place = np.argwhere(~np.isfinite(action))[0].tolist()
            raise RunError(
                f"the action for {self.env_id} has {action[row, place]} in place {place + 1} of "
                f"{action.shape[1]}, expected finite numbers: the policy has diverged"
            )
        # Like np.clip, in half the time.
        native: np.ndarray = np.minimum(np.maximum(action, -self._limit), self._limit)
        native = native * self._half + self._center
        if self._whole:
            native = np.rint(native)
        # Rounding in the scaling may step over a bound by one ulp, which some environments reject.
        native = np.minimum(np.maximum(native, self._low), self._high)
        return native.reshape(-1, *self._shape).astype(self.action_space.dtype, copy=False)
