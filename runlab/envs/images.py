"""Images of bytes in observations, and vectors that begin with one.

An algorithm gets observations (N, O), whatever the environment has. An observation with an image begins with
its pixels, channels first and unscaled. The parts beside it follow, and a mask of actions comes last.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from runlab.envs.masks import MaskedBox
from runlab.envs.validity import obs_check
from runlab.errors import ConfigError

_MOST_STACKED = 16  # up to so many stacked vectors of bytes, such as Atari's memory, are no image
_LARGE = 36  # numbers with two or three axes, of which two have this length or more, are taken for an image
_OF_BYTES = "'env.wrappers={RescaleObservation:{min_obs:0,max_obs:255},DtypeObservation:{dtype:uint8}}'"
# Gymnasium makes vectors of zeros and ones of these. Beside an image they are kept as bytes.
_CHOICES = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary


class ImageBox(spaces.Box):
    """Flat observations that begin with an image of `image_shape` (C, H, W)."""

    image_shape: tuple[int, ...]


class MaskedImageBox(ImageBox, MaskedBox):
    """Flat observations that begin with an image and end with a mask."""


def channels_last(shape: tuple[int, ...]) -> bool:
    """True for (H, W, C), false for (C, H, W). If no two axes that follow are equal, C is the smaller one."""
    if len(shape) != 3 or shape[1] == shape[2]:
        return False
    return shape[0] == shape[1] or shape[2] < shape[0]


def image_shape(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Channels, height and width of an image; () for a space that is none."""
    shape = space.shape or ()
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or 0 in shape:
        return ()
    if len(shape) == 3:
        return (shape[2], *shape[:2]) if channels_last(shape) else shape
    return (1, *shape) if len(shape) == 2 and min(shape) > _MOST_STACKED else ()


def with_image(env_id: str, env: gym.Env[Any, Any], masked: bool) -> gym.Env[Any, Any] | None:
    """The environment with its image in front; None if it has none, `ConfigError` for unsupported images.

    `masked`: the last part of its observations is a mask of actions.
    """
    space = env.observation_space
    parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
    for part in parts.values():
        _refuse(env_id, part)
    names = [name for name, part in parts.items() if image_shape(part)]
    if len(names) > 1:
        raise ConfigError(
            f"{env_id} observes the images {', '.join(names)}, and networks take one; leave the others out, "
            f"as in 'env.wrappers.FilterObservation.filter_keys=[{names[0]}]'"
        )
    return ImageFirst(env_id, env, names[0], masked) if names else None


def _refuse(env_id: str, space: spaces.Space[Any], inside: str = "") -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.values() if isinstance(space, spaces.Dict) else space:
            _refuse(env_id, part, type(space).__name__)
        return
    shape = space.shape or ()
    if space.dtype == np.uint8 and len(shape) > 3:
        raise ConfigError(
            f"{env_id} observes images {shape}, and networks take three axes; use GrayscaleObservation "
            f"before FrameStackObservation in env.wrappers, or ReshapeObservation{_below(shape)} after it"
        )
    large = len(shape) > 1 and sorted(shape)[-2] >= _LARGE
    if isinstance(space, spaces.Box) and space.dtype != np.uint8 and large:
        how = _OF_BYTES if space.is_bounded() else "a wrapper of your own, since its space has no bounds"
        raise ConfigError(
            f"{env_id} observes images {shape} of {space.dtype}; use bytes: {how}; "
            "or plain numbers: env.wrappers.FlattenObservation=null"
        )
    if inside and image_shape(space):
        raise ConfigError(
            f"{env_id} observes an image {shape} within a {inside}; use a wrapper in env.wrappers that gives "
            "the image alone, or a Dict of which it is a part"
        )


def _below(shape: tuple[int, ...]) -> str:
    """The shape in which stacked images (K, H, W, C) or (K, C, H, W) are below one another or channels."""
    if len(shape) != 4:
        return ""
    frames, *image = shape
    return f":{{shape:[{','.join(map(str, (frames * image[0], *image[1:])))}]}}"


def _vector(space: spaces.Space[Any]) -> spaces.Box | None:
    """The space as a vector of numbers; None if it cannot be one."""
    with contextlib.suppress(NotImplementedError):
        flat = spaces.flatten_space(space)
        return flat if isinstance(flat, spaces.Box) else None
    return None


class ImageFirst(gym.ObservationWrapper[Any, Any, Any]):
    """Observations as a vector of the image, channels first, and of the other parts of a Dict.

    Bytes if the other parts are bytes or choices, else float32.
    """

    def __init__(self, env_id: str, env: gym.Env[Any, Any], name: str, masked: bool) -> None:
        super().__init__(env)
        space, self._name = env.observation_space, name
        image: Any = space
        others: dict[str, Any] = {}
        if isinstance(space, spaces.Dict):
            image, others = space[name], {key: part for key, part in space.items() if key != name}
        self._check, self._turned = obs_check(image), channels_last(image.shape)
        self._others = spaces.Dict([*others.items()])  # a list keeps their order, in which a mask is last
        low, high = np.zeros(math.prod(image.shape)), np.full(math.prod(image.shape), 255.0)
        if others:
            if (flat := _vector(self._others)) is None:
                kept = [name, *(key for key, part in others.items() if _vector(part))]
                raise ConfigError(
                    f"{env_id} observes {', '.join(others)} beside the image, and not all of it is a vector; "
                    f"keep what is: 'env.wrappers.FilterObservation.filter_keys=[{','.join(kept)}]'"
                )
            low, high = np.concatenate([low, flat.low]), np.concatenate([high, flat.high])
        in_bytes = all(isinstance(p, _CHOICES) or p.dtype in (np.uint8, np.bool_) for p in others.values())
        self._dtype: Any = np.uint8 if in_bytes else np.float32
        kind = MaskedImageBox if masked else ImageBox
        box = kind(low.astype(self._dtype), high.astype(self._dtype), dtype=self._dtype)
        box.image_shape = image_shape(image)
        self.observation_space = box

    def observation(self, observation: Any) -> np.ndarray:
        """The vector, which may be a view of what the environment returned."""
        image = self._check(observation[self._name] if self._name else observation)
        flat: np.ndarray = (image.transpose(2, 0, 1) if self._turned else image).reshape(-1)
        if not self._others.spaces:
            return flat
        return np.concatenate([flat, spaces.flatten(self._others, observation)]).astype(self._dtype)
