"""Environments as algorithms see them: spaces, episode ends, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rltemplate.envs.codec import Codec
from rltemplate.envs.envs import Envs
from rltemplate.envs.make import EnvSpec, make_env
from rltemplate.types import ConfigError, Episode

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


def test_integer_actions_start_where_the_space_starts() -> None:
    one = codec(action=spaces.Discrete(3, start=-1))
    several = codec(action=spaces.MultiDiscrete([3, 2]))
    assert one.decode_action(np.array([[0], [2]])).tolist() == [-1, 1]
    assert several.decode_action(np.array([[2, 1]])).tolist() == [[2, 1]]
    assert (one.nvec, several.nvec) == ((3,), (3, 2))


@pytest.mark.parametrize(("low", "high", "kind"), [(-2, 5, np.int64), (0, 255, np.uint8)])
def test_every_integer_of_a_box_has_an_equal_share(low: int, high: int, kind: Any) -> None:
    number = high - low + 1
    some = codec(action=spaces.Box(low, high, (1,), kind))
    spread = (np.arange(100 * number) + 0.5) / (50 * number) - 1.0
    decoded = some.decode_action(spread[:, None].astype(np.float32))
    assert decoded.dtype == kind
    assert np.bincount(decoded[:, 0].astype(int) - low).tolist() == [100] * number
    assert some.decode_action(np.array([[-1], [1], [-9], [9]])).ravel().tolist() == [low, high, low, high]


@pytest.mark.parametrize(
    ("obs", "action", "words"),
    [
        (spaces.Dict({"a": BOX}), BOX, ["Dict", "FlattenObservation"]),
        (BOX, spaces.Tuple([BOX]), ["action space", "Tuple"]),
    ],
)
def test_spaces_that_do_not_fit_are_refused_in_a_line(
    obs: spaces.Space[Any], action: spaces.Space[Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        codec(obs, action)
    message = str(refusal.value)
    assert all(word in message for word in ["Some-v0", *words])
    assert "\n" not in message


def test_an_ended_episode_keeps_its_last_observation_apart_from_the_next_start() -> None:
    envs = Envs(EnvSpec("Scripted-v0", None, {"length": 2}), 2, [0, 1])
    assert envs.reset().tolist() == [[0, 0], [0, 0]]
    first = envs.step(np.zeros((2, 1), np.int64))
    assert first.episodes == []
    assert first.obs is first.next_obs
    end = envs.step(np.zeros((2, 1), np.int64))
    assert end.truncated.tolist() == [True, True]
    assert end.terminated.tolist() == [False, False]
    assert end.next_obs.tolist() == [[0, 2], [0, 2]]
    assert end.obs.tolist() == [[1, 0], [1, 0]]
    assert end.episodes == [Episode(3.0, 2), Episode(3.0, 2)]
    again = envs.step(np.zeros((2, 1), np.int64))
    assert again.obs.tolist() == [[1, 1], [1, 1]]  # no phantom step in between
    assert again.reward.tolist() == [1.0, 1.0]
    envs.close()


def test_mujoco_warnings_leave_no_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_env(EnvSpec("HalfCheetah-v5", None, {})).close()  # with which a warning comes
    assert list(tmp_path.iterdir()) == []
