"""Environments as algorithms see them: spaces, episode ends, refusals."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import env_config
from gymnasium import spaces

from rltemplate.envs.codec import Codec, refuse_images
from rltemplate.envs.envs import Envs
from rltemplate.envs.make import make_env, repeats
from rltemplate.interfaces import ConfigError, Episode
from rltemplate.run.trace import named_leaves

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def codec(obs: spaces.Space[Any] = BOX, action: spaces.Space[Any] = BOX) -> Codec:
    return Codec("Some-v0", obs, action)


def test_observations_are_flattened_and_choices_become_one_hot_from_their_start() -> None:
    shaped, raw = codec(spaces.Box(-1, 1, (2, 3, 2), np.float64)), np.arange(24.0).reshape(2, 2, 3, 2)
    assert shaped.obs_size == 12
    assert shaped.encode_obs(raw).dtype == np.float32
    assert shaped.encode_obs(raw).tolist() == raw.reshape(2, 12).tolist()
    assert codec(spaces.Discrete(3, start=5)).encode_obs([5, 7]).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_actions_reach_the_bounds_exactly_and_never_pass_them() -> None:
    low, high = np.array([-0.4, 0.0, -3.0], np.float32), np.array([0.4, 7.3, -1.1], np.float32)
    wide = codec(action=spaces.Box(low, high))
    native = wide.decode_action(np.array([[-1, -1, -1], [1, 1, 1], [-9, 9, 0]], np.float32))
    np.testing.assert_array_equal(native[0], low)
    np.testing.assert_array_equal(native[1], high)
    np.testing.assert_allclose(native[2], [-0.4, 7.3, -2.05], rtol=1e-6)
    assert all(wide.action_space.contains(row) for row in native)
    # Without bounds a component passes as it is.
    free = codec(action=spaces.Box(np.array([-np.inf, -2.0]), np.array([np.inf, 2.0]), dtype=np.float64))
    assert free.decode_action(np.array([[5.0, 0.5]])).tolist() == [[5.0, 1.0]]
    assert not free.bounded
    # With one bound it passes as far as this bound.
    half = codec(action=spaces.Box(np.array([0.0, -np.inf]), np.array([np.inf, 2.0]), dtype=np.float64))
    assert half.decode_action(np.array([[-3.0, -3.0], [5.0, 5.0]])).tolist() == [[0.0, -3.0], [5.0, 2.0]]
    assert not half.bounded
    assert wide.bounded


def test_choices_start_where_the_space_starts_and_have_its_shape() -> None:
    several = spaces.MultiDiscrete(np.array([[3], [2]]))
    cases: list[tuple[spaces.Space[Any], Any, Any, Any]] = [
        (spaces.Discrete(3, start=-1), [[0], [2]], [-1, 1], (3,)),
        (several, [[2, 1]], [[[2], [1]]], (3, 2)),
        (spaces.MultiBinary(3), [[1, 0, 1]], [[1, 0, 1]], (2, 2, 2)),
    ]
    for space, action, native, nvec in cases:
        decoded = codec(action=space).decode_action(np.array(action))
        assert (decoded.tolist(), codec(action=space).nvec) == (native, nvec)
        assert all(map(space.contains, decoded))


@pytest.mark.parametrize(("low", "high", "kind"), [(-2, 5, np.int64), (0, 255, np.uint8)])
def test_every_integer_of_a_box_has_an_equal_share(low: int, high: int, kind: Any) -> None:
    number = high - low + 1
    some = codec(action=spaces.Box(low, high, (1,), kind))
    spread = (np.arange(100 * number) + 0.5) / (50 * number) - 1.0
    decoded = some.decode_action(spread[:, None].astype(np.float32))
    assert decoded.dtype == kind
    assert np.bincount(decoded[:, 0].astype(int) - low).tolist() == [100] * number
    assert some.decode_action(np.array([[-1], [1], [-9], [9]])).ravel().tolist() == [low, high, low, high]


def test_a_space_that_does_not_fit_is_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match=r"^Some-v0 has the observation space Dict; .* flattens[^\n]*$"):
        codec(spaces.Dict({"a": BOX}))
    for shape in (84, 84), (8, 8, 3):
        image = spaces.Box(0, 255, shape, np.uint8)
        for space in image, spaces.Dict({"a": BOX, "b": spaces.Tuple([BOX, image])}):
            with pytest.raises(ConfigError, match="Some-v0 observes images"):
                refuse_images("Some-v0", space)
    memory = spaces.Box(0, 255, (4, 128), np.uint8)  # a stack of an Atari's
    refuse_images("Some-v0", spaces.Dict({"a": BOX, "b": memory}))
    assert codec(memory).obs_size == 512


class Looks(gym.Env[Any, Any]):
    """Its constructor takes no `render_mode`, and it observes an image in a Dict."""

    observation_space = spaces.Dict({"image": spaces.Box(0, 255, (8, 8, 3), np.uint8)})
    action_space = spaces.Discrete(2)


def test_a_constructor_without_render_mode_is_called_and_images_in_a_dict_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        gym.registry, "Looks-v0", gym.envs.registration.EnvSpec("Looks-v0", f"{__name__}:Looks")
    )
    with pytest.raises(ConfigError, match=r"env.kwargs.render_mode: .* leave it out"):
        make_env(env_config("Looks-v0", kwargs={"render_mode": "human"}))
    with pytest.raises(ConfigError, match=r"Looks-v0 observes images \(8, 8, 3\)"):
        make_env(env_config("Looks-v0"))


def test_an_ended_episode_keeps_its_last_observation_apart_from_the_next_start() -> None:
    envs, bare = Envs(env_config("Pendulum-v1", limit=2), [7]), gym.make("Pendulum-v1")
    still = np.zeros((1, 1), np.float32)
    assert envs.reset()[0].tolist() == bare.reset(seed=7)[0].tolist()
    first, (obs, reward, *_) = envs.step(still), bare.step(still[0])
    assert (first.episodes, first.obs is first.next_obs) == ([], True)
    assert first.obs[0].tolist() == obs.tolist()
    end, (obs, more, *_) = envs.step(still), bare.step(still[0])
    assert (end.truncated.tolist(), end.terminated.tolist()) == ([True], [False])
    assert end.next_obs[0].tolist() == obs.tolist()
    assert end.obs[0].tolist() == bare.reset()[0].tolist()
    assert end.episodes == [Episode(float(reward) + float(more), 2)]
    assert envs.step(still).obs[0].tolist() == bare.step(still[0])[0].tolist()  # no phantom step in between
    envs.close()


class Counts(gym.Wrapper[Any, Any, Any, Any]):
    """Shows the number of the step as info, also the last one, and can be rewarded by what is hidden."""

    def __init__(self, env: gym.Env[Any, Any], hidden: str = "") -> None:
        super().__init__(env)
        self.hidden, self.own = hidden, np.random.default_rng()

    def reset(self, **kwargs: Any) -> Any:
        self.number = 0
        return self.env.reset(**kwargs)[0], {"steps": np.zeros(2)}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        self.number += 1
        reward = self.own.normal() if self.hidden == "generator" else reward
        final = {"final": {"steps": self.number}} if truncated else {}
        return obs, reward, terminated, truncated, {"steps": np.full(2, self.number), **final}


SHAPED = {"examples.shaping:Upright": {"gamma": 0.5}}


def test_wrappers_apply_in_their_order_and_those_of_training_around_them() -> None:
    clip = {"ClipReward": {"max_reward": -0.5}}

    def reward(training: bool, **changes: Any) -> float:
        env = make_env(env_config("CartPole-v1", **changes), training=training)
        env.reset(seed=1)
        return float(env.step(1)[1])

    shaped = reward(False, wrappers=clip | SHAPED)
    assert -0.6 < shaped < 0 != shaped + 0.5
    assert reward(False, wrappers=SHAPED | clip) == -0.5
    assert reward(True, wrappers=clip, training_wrappers=SHAPED) == shaped
    assert reward(False, wrappers=clip, training_wrappers=SHAPED) == -0.5  # as evaluations have it


def test_a_wrapper_may_change_the_spaces_and_a_dict_is_flattened() -> None:
    stack, clock = {"FrameStackObservation": {"stack_size": 3}}, {"TimeAwareObservation": {"flatten": False}}
    assert Envs(env_config("CartPole-v1", wrappers=stack), [0]).reset().shape == (1, 12)
    flat = Envs(env_config("CartPole-v1", wrappers=clock), [0])  # of which the observation is a Dict
    bare = Envs(env_config("CartPole-v1"), [0])
    assert flat.reset()[:, :4].tolist() == bare.reset().tolist()
    assert flat.step(np.array([[1]])).obs[0].tolist() == [*bare.step(np.array([[1]])).obs[0].tolist(), 1.0]


REPEATS = "does not repeat itself"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"FramStackObservation": {}}, r"env.wrappers.FramStack.* did you mean FrameStackObservation\?"),
        ({"FrameStackObservation": {"size": 4}}, "unexpected keyword argument 'size'"),
        ({"FrameStackObservation": 4}, "env.wrappers.FrameStackObservation=4: .*must be a mapping"),
        ({"builtins:print": {}}, "is no subclass of gymnasium.Wrapper"),
        ({"pydoc.pipepager": {"cmd": "touch executed"}}, "is no subclass of gymnasium.Wrapper"),
        ({"gymnasium.spaces.Discrete": {}}, "is no subclass of gymnasium.Wrapper"),
        ({"nowhere:Wrapper": None}, "env.wrappers.nowhere:Wrapper=None: .*No module named 'nowhere'"),
        ({"test_envs:Counts": {"hidden": "generator"}}, REPEATS),
        ({"training_wrappers": {"NormalizeReward": {}}}, REPEATS),
        ({"training_wrappers": {"FrameStackObservation": {"stack_size": 2}}}, "change the spaces"),
    ],
)
def test_a_wrapper_that_cannot_be_had_is_refused(changes: dict[str, Any], words: str) -> None:
    changes = changes if "training_wrappers" in changes else {"wrappers": changes}
    with pytest.raises(ConfigError, match=words) as refusal:
        Envs(env_config("CartPole-v1", **changes), [0])
    assert str(refusal.value).count("\n") == (words == REPEATS)


@pytest.mark.parametrize(
    ("env_id", "changes", "same"),
    [
        ("CartPole-v1", {}, True),
        ("CartPole-v1", {"training_wrappers": {"test_envs:Counts": {"hidden": "generator"}}}, False),
        ("FrozenLake-v1", {"kwargs": {"desc": None, "map_name": "4x4"}}, True),
        ("FrozenLake-v1", {"kwargs": {"desc": None, "map_name": None}}, False),  # another map in each
    ],
)
def test_an_environment_that_does_not_repeat_is_found(
    env_id: str, changes: dict[str, Any], same: bool
) -> None:
    assert repeats(env_config(env_id, **changes)) is same


@pytest.mark.parametrize("workers", [0, 1])
def test_infos_come_with_the_observations_that_they_are_about(workers: int) -> None:
    names = ["steps", "final.steps", "none"]
    config = env_config("CartPole-v1", 2, workers, 2, wrappers={"test_envs:Counts": {}}, infos=names)
    envs, again = Envs(config, [0, 1]), Envs(config, [0, 1])
    envs.reset()
    seen = [envs.infos]
    for _ in range(2):
        step = envs.step(np.zeros((2, 1), np.int64))
        seen += [step.next_infos, step.infos]
    assert [infos["steps"].tolist() for infos in seen] == [[[n, n]] * 2 for n in (0, 1, 1, 2, 0)]
    assert all(infos.keys() == {"steps", "_steps"} for infos in seen if infos is not seen[3])
    assert seen[3]["_final.steps"].tolist() == [True, True]
    assert seen[3]["final.steps"].tolist() == [2, 2]
    assert {"next_infos/final.steps", "infos/steps"} <= dict(named_leaves(step)).keys()  # so in the trace
    again.load_state_dict(envs.state_dict())
    assert again.infos["steps"].tolist() == [[0, 0]] * 2
    envs.close()
    again.close()
