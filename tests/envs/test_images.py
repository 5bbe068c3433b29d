"""Images of bytes reach an algorithm as they are, channels first, alone and as a part of a Dict."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import env_config
from gymnasium import spaces

from runlab.config.cli.preflight import preflight
from runlab.envs.codec import FlatCodec, flattened
from runlab.envs.envs import Envs
from runlab.envs.images import image_shape
from runlab.errors import ConfigError, RunError


def pixels(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


class Pictures(gym.Env[Any, Any]):
    """Draws each observation from its space into one buffer, which the next step overwrites.

    `how`: with a copy of it, or turned.
    """

    action_space = spaces.Discrete(2)
    kinds: dict[str, spaces.Space[Any]] = {
        "grey": pixels(36, 40),
        "grey1": pixels(36, 40, 1),
        "colour": pixels(36, 40, 3),
        "first": pixels(3, 36, 40),
        "opaque": pixels(20, 30, 4),
        "onehot": pixels(7, 7, 20),
        "numbers": spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "view": pixels(20, 20, 3)}),
        "minigrid": spaces.Dict({"direction": spaces.Discrete(4), "image": pixels(7, 7, 3)}),
        "masked": spaces.Dict({"action_mask": spaces.MultiBinary(2), "image": pixels(7, 7, 3)}),
    }

    def __init__(self, kind: str, how: str = "") -> None:
        self.observation_space, self.how = self.kinds[kind], how
        self.buffers: dict[str, np.ndarray] = {}

    def _obs(self, space: spaces.Space[Any], name: str = "") -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._obs(part, key) for key, part in space.items()}
        if name == "action_mask":
            return np.array([1, self.np_random.integers(2)], np.int8)
        if isinstance(space, spaces.Discrete):
            return int(self.np_random.integers(4))
        assert isinstance(space, spaces.Box)
        if space.dtype == np.float32:
            return self.np_random.uniform(-1, 1, space.shape).astype(np.float32)
        buffer = self.buffers.setdefault(name, np.zeros(space.shape, np.uint8))
        buffer[:] = self.np_random.integers(256, size=space.shape)
        return {"": buffer, "turned": buffer.swapaxes(0, 1), "copied": buffer.copy()}[self.how]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._obs(self.observation_space), {}

    def step(self, action: Any) -> Any:
        return self._obs(self.observation_space), 0.0, False, False, {}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gym.register("Pictures-v0", lambda **kwargs: Pictures(**kwargs), max_episode_steps=3)
    yield
    gym.registry.pop("Pictures-v0")


def channels_first(raw: np.ndarray, kind: str) -> np.ndarray:
    """An image (C, H, W), pixel by pixel."""
    if kind == "first":
        return raw
    raw = raw if raw.ndim == 3 else raw[:, :, None]
    height, width, channels = raw.shape
    return np.array([[[raw[y, x, c] for x in range(width)] for y in range(height)] for c in range(channels)])


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("grey", 0), ("grey1", 0), ("colour", 0), ("colour", 1), ("first", 0), ("opaque", 0), ("onehot", 0)],
)
def test_every_layout_is_bytes_with_channels_first_and_no_later_step_changes_them(
    kind: str, workers: int
) -> None:
    envs = Envs(env_config("Pictures-v0", 2, workers, kwargs={"kind": kind}), [3, 4])
    alone = [gym.make("Pictures-v0", kind=kind, disable_env_checker=True) for _ in range(2)]
    expected = [
        np.array(
            [channels_first(env.reset(seed=seed)[0], kind) for env, seed in zip(alone, (3, 4), strict=True)]
        )
    ]
    taken = [envs.reset()]
    for _ in range(2):
        taken.append(envs.step(np.zeros((2, 1), np.int64)).obs)
        expected.append(np.array([channels_first(env.step(0)[0], kind) for env in alone]))
    assert [obs.dtype for obs in taken] == [np.uint8] * 3
    for obs, images in zip(taken, expected, strict=True):
        assert envs.codec.image_shape == images.shape[1:]  # type: ignore[attr-defined]
        assert obs.reshape(images.shape).tolist() == images.tolist()
    envs.close()


@pytest.mark.parametrize(
    ("wrappers", "shape"),
    [
        ({"FrameStackObservation": {"stack_size": 4}}, (4, 36, 40)),
        (
            {"FrameStackObservation": {"stack_size": 4}, "ReshapeObservation": {"shape": [144, 40, 1]}},
            (1, 144, 40),
        ),
    ],
)
def test_stacked_grey_frames_are_channels(wrappers: dict[str, Any], shape: tuple[int, ...]) -> None:
    envs = Envs(env_config("Pictures-v0", kwargs={"kind": "grey", "how": "copied"}, wrappers=wrappers), [3])
    alone = gym.make("Pictures-v0", kind="grey", how="copied", disable_env_checker=True)
    frames = [alone.reset(seed=3)[0]] * 3 + [alone.step(0)[0]]
    envs.reset()
    obs = envs.step(np.zeros((1, 1), np.int64)).obs
    assert envs.codec.image_shape == shape  # type: ignore[attr-defined]
    assert obs.reshape(4, 36, 40).tolist() == np.array(frames).tolist()
    envs.close()


@pytest.mark.parametrize(
    ("shape", "image"),
    [
        ((210, 160, 4), (4, 210, 160)),
        ((84, 84, 4), (4, 84, 84)),
        ((7, 7, 20), (20, 7, 7)),
        ((4, 210, 160), (4, 210, 160)),
        ((4, 84, 84), (4, 84, 84)),
        ((111, 8, 8), (111, 8, 8)),
        ((36, 40, 1), (1, 36, 40)),
        ((1, 36, 40), (1, 36, 40)),
    ],
)
def test_channels_are_told_from_height_and_width(shape: tuple[int, ...], image: tuple[int, ...]) -> None:
    assert image_shape(pixels(*shape)) == image


def test_stacked_colour_frames_are_an_image_after_a_reshape() -> None:
    wrappers = {"FrameStackObservation": {"stack_size": 2}, "ReshapeObservation": {"shape": [72, 40, 3]}}
    envs = Envs(env_config("Pictures-v0", kwargs={"kind": "colour", "how": "copied"}, wrappers=wrappers), [3])
    alone = gym.make("Pictures-v0", kind="colour", how="copied", disable_env_checker=True)
    frames = [alone.reset(seed=3)[0], alone.step(0)[0]]
    envs.reset()
    obs = envs.step(np.zeros((1, 1), np.int64)).obs
    assert envs.codec.image_shape == (3, 72, 40)  # type: ignore[attr-defined]
    assert obs.reshape(3, 72, 40).tolist() == np.concatenate(frames).transpose(2, 0, 1).tolist()
    envs.close()


def test_parts_beside_an_image_follow_it_and_a_mask_is_last() -> None:
    cases = [("numbers", np.float32, (3, 20, 20), 2), ("minigrid", np.uint8, (3, 7, 7), 4)]
    for kind, dtype, shape, rest in [*cases, ("masked", np.uint8, (3, 7, 7), 2)]:
        envs = Envs(env_config("Pictures-v0", kwargs={"kind": kind}), [3])
        obs, raw = (
            envs.reset()[0],
            gym.make("Pictures-v0", kind=kind, disable_env_checker=True).reset(seed=3)[0],
        )
        image = channels_first(raw["view" if kind == "numbers" else "image"], kind)
        beside = {
            "numbers": lambda raw: raw["a"].tolist(),
            "minigrid": lambda raw: np.eye(4)[raw["direction"]].tolist(),
            "masked": lambda raw: raw["action_mask"].tolist(),
        }[kind](raw)
        assert (obs.dtype, envs.codec.image_shape) == (dtype, shape)  # type: ignore[attr-defined]
        assert obs[: image.size].tolist() == image.reshape(-1).tolist()
        assert obs[image.size :].tolist() == beside
        assert envs.codec.mask_size == (rest if kind == "masked" else 0)  # type: ignore[attr-defined]
        envs.close()


def test_an_image_of_another_shape_ends_the_run() -> None:
    envs = Envs(env_config("Pictures-v0", kwargs={"kind": "grey", "how": "turned"}), [3])
    with pytest.raises(
        RunError, match=r"Pictures-v0, reset: the observation is .*shape \(40, 36\), expected"
    ):
        envs.reset()
    envs.close()


VECTOR = spaces.Box(-1, 1, (3,))


@pytest.mark.parametrize(
    ("space", "line"),
    [
        (pixels(4, 36, 40, 3), "images (4, 36, 40, 3), .* ReshapeObservation:{shape:[144,40,3]} after it"),
        (spaces.Box(0, 1, (36, 36, 3)), "images (36, 36, 3) of float32; use bytes: .*DtypeObservation"),
        (spaces.Box(0, 1, (84, 84)), "images (84, 84) of float32; use bytes: .*FlattenObservation=null"),
        (spaces.Box(0, np.inf, (84, 84)), "images (84, 84) of float32; use bytes: a wrapper of your own"),
        (spaces.Tuple([VECTOR, pixels(8, 8, 3)]), "an image (8, 8, 3) within a Tuple; use a wrapper"),
        (spaces.Dict({"a": spaces.Dict({"b": pixels(8, 8, 3)})}), "an image (8, 8, 3) within a Dict; use"),
        (spaces.Dict({"a": pixels(8, 8, 3), "b": pixels(8, 8, 3)}), "the images a, b, .*filter_keys=[a]"),
        (
            spaces.Dict({"a": VECTOR, "image": pixels(8, 8, 3), "words": spaces.Sequence(VECTOR)}),
            "a, words beside the image, .*filter_keys=[image,a]",
        ),
    ],
)
def test_other_images_are_refused_in_a_line(space: spaces.Space[Any], line: str) -> None:
    env = gym.make("Pictures-v0", kind="grey")
    env.unwrapped.observation_space = space
    pattern = line.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ConfigError, match=f"^Some-v0 observes {pattern}[^\n]*$"):
        flattened("Some-v0", env)


def test_the_advice_for_numbers_makes_bytes_of_them() -> None:
    class Floats(gym.ObservationWrapper[Any, Any, Any]):
        def __init__(self, env: gym.Env[Any, Any]) -> None:
            super().__init__(env)
            self.observation_space = spaces.Box(0, 1, (36, 40, 3))

        def observation(self, observation: Any) -> Any:
            return observation.astype(np.float32) / 255.0

    env: gym.Env[Any, Any] = Floats(gym.make("Pictures-v0", kind="colour", disable_env_checker=True))
    with pytest.raises(ConfigError) as refused:
        flattened("Some-v0", env)
    words = str(refused.value).partition("use bytes: ")[2].partition("; or")[0]
    (advice,) = shlex.split(words)  # one word, or make refuses it
    for name, arguments in preflight(["env=Catch", advice]).configs[0].env.wrappers.items():
        env = getattr(gym.wrappers, name)(env, **arguments)
    flat = flattened("Some-v0", env)
    obs, raw = flat.reset(seed=1)[0], gym.make("Pictures-v0", kind="colour").reset(seed=1)[0]
    assert abs(obs.astype(int) - raw.transpose(2, 0, 1).reshape(-1).astype(int)).max() <= 1


def test_what_is_no_image_stays_a_vector_of_numbers() -> None:
    """Such as a stack of an Atari's memory, and small arrays of numbers."""
    for space in (
        pixels(4, 128),
        pixels(64),
        pixels(0, 36, 36),
        spaces.Box(0, 1, (10, 10, 4)),
        spaces.Box(0, 1, (35, 84)),
        spaces.MultiBinary((40, 40)),
    ):
        env = gym.make("Pictures-v0", kind="grey")
        env.unwrapped.observation_space = space
        codec = FlatCodec("Some-v0", flattened("Some-v0", env).observation_space, spaces.Discrete(2))
        assert (image_shape(space), codec.image_shape) == ((), ())
        assert codec.obs_dtype == np.float32
