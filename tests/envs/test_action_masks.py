"""Masks of actions come with every observation, from infos or from Dict observations, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import env_config
from gymnasium import spaces

from runlab.config.schema import EnvConfig
from runlab.envs import make
from runlab.envs.envs import Envs
from runlab.envs.make import check_env, codec_of, make_env, repeats
from runlab.envs.masks import ActionMask
from runlab.errors import ConfigError, RunError

ACTIONS: dict[str, spaces.Space[Any]] = {
    "one": spaces.Discrete(4, start=2),
    "several": spaces.MultiDiscrete([2, 4, 3], start=[1, 0, 0]),
    "bits": spaces.MultiBinary(3),
    "box": spaces.Box(-1.0, 1.0, (2,)),
}
SIZES = {"one": 4, "several": 9, "bits": 6}  # choices of all components
FIRST = {4: [0], 9: [0, 2, 6], 6: [0, 2, 4]}  # by size: where the choices of each component begin
IN_INFO, IN_OBS = "info", "obs"


class Strict(gym.Env[Any, Any]):
    """Refuses forbidden actions. The mask after the second step is the one in `fault`, if there is one."""

    def __init__(
        self, actions: str = "one", where: str = IN_INFO, fault: Sequence[Any] = (), size: int = 0
    ) -> None:
        self.action_space, self.where, self.fault = ACTIONS[actions], where, fault
        self.size = size or SIZES.get(actions, 2)
        parts = {"near": spaces.Box(-9.0, 9.0, (2,)), "zone": spaces.Discrete(3)}
        masked = {"action_mask": spaces.MultiBinary(self.size), **parts}
        self.observation_space = spaces.Dict(masked) if where == IN_OBS else parts["near"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._results(ended=False)

    def step(self, action: Any) -> Any:
        chosen = np.ravel(action) - getattr(self.action_space, "start", 0) + FIRST[self.size]
        if not self.mask[chosen].all():
            raise ValueError(f"{action} is forbidden")
        self.steps += 1
        done = self.steps == 7
        obs, info = self._results(done)
        return obs, 1.0, done, False, info

    def _results(self, ended: bool) -> tuple[Any, dict[str, Any]]:
        self.mask: Any = np.zeros(self.size, np.int8)
        if not ended:  # all even places, so that each component has a choice, and some of the others
            self.mask[::2] = 1
            self.mask[self.np_random.integers(self.size)] = 1
        shown = self.fault[0] if self.steps == 2 and self.fault else self.mask
        parts = {"near": self.np_random.random(2, np.float32), "zone": np.int64(2)}
        if self.where == IN_OBS:
            return {"action_mask": shown, **parts}, {}
        return parts["near"], {} if shown is None else {"action_mask": shown}


class Outside(gym.Env[Any, Any]):
    """Observes a number outside of its space after the first step."""

    action_space, observation_space = spaces.Discrete(2), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return 0, {"action_mask": [1, 1]}

    def step(self, action: Any) -> Any:
        return -1, 0.0, False, False, {"action_mask": [1, 1]}


class Late(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper of the user, inside of those of this project."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Any:
    for name in ("Strict", "Outside"):
        gym.register(f"{name}-v0", entry_point=f"test_action_masks:{name}")
    yield
    for name in ("Strict", "Outside"):
        gym.registry.pop(f"{name}-v0")


def strict(where: str = IN_INFO, num_envs: int = 1, workers: int = 0, **kwargs: Any) -> EnvConfig:
    infos = ["action_mask"] if where == IN_INFO else []
    return env_config("Strict-v0", num_envs, workers, kwargs={"where": where, **kwargs}, infos=infos)


@pytest.mark.parametrize("where", [IN_INFO, IN_OBS])
@pytest.mark.parametrize("actions", SIZES)
@pytest.mark.parametrize("training", [True, False])
def test_the_mask_is_the_end_of_every_observation(where: str, actions: str, training: bool) -> None:
    env = make_env(strict(where, actions=actions), training=training)
    inner: Any = env.unwrapped
    codec = codec_of(strict(where, actions=actions))
    assert codec.mask_size == SIZES[actions] == sum(codec.nvec)  # type: ignore[attr-defined]
    obs, _ = env.reset(seed=1)
    rows, ended = [(obs, inner.mask.copy())], False
    while not ended:
        allowed = np.split(inner.mask, np.cumsum(codec.nvec)[:-1])
        action = codec.decode_action(np.array([[part.argmax() for part in allowed]]))[0]
        obs, _, ended, *_ = env.step(action)
        rows.append((obs, inner.mask.copy()))
    for obs, mask in rows:
        encoded = codec.encode_obs([obs])[0]
        assert encoded.dtype == np.float32
        assert encoded[-len(mask) :].tolist() == mask.tolist()
        assert encoded[2 : -len(mask)].tolist() == ([0.0, 0.0, 1.0] if where == IN_OBS else [])
        assert 0.0 < encoded[0] < 1.0
    assert len({mask.tobytes() for _, mask in rows}) > 2
    assert not rows[-1][1].any(), "a state after which nothing follows needs no action"


@pytest.mark.parametrize("workers", [0, 1])
def test_infos_still_have_the_mask_of_their_observations(workers: int) -> None:
    envs = Envs(strict(num_envs=2, workers=workers), [3, 4])
    obs = envs.reset()
    for _ in range(20):
        np.testing.assert_array_equal(obs[:, -4:], envs.infos["action_mask"])
        step = envs.step(obs[:, -4:].argmax(1)[:, None])
        np.testing.assert_array_equal(step.next_obs[:, -4:], step.next_infos["action_mask"])
        obs = step.obs
    again = Envs(strict(num_envs=2), [5, 6])
    again.load_state_dict(envs.state_dict())
    np.testing.assert_array_equal(again.infos["action_mask"], obs[:, -4:])
    envs.close()
    again.close()


@pytest.mark.parametrize("where", [IN_INFO, IN_OBS])
@pytest.mark.parametrize("actions", SIZES)
def test_trials_take_allowed_actions_only(actions: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = strict(where, actions=actions)
    config.wrappers["test_action_masks:Late"] = {}  # with a wrapper, resuming is tried as well
    check_env(config)
    assert repeats(config).holds
    monkeypatch.setattr(make, "MaskedBox", str)  # as if no observation had a mask
    with pytest.raises(ValueError, match="is forbidden"):
        repeats(config)


def test_a_mask_in_the_observation_needs_no_infos_and_goes_before_them() -> None:
    config = strict(IN_OBS)
    config.infos.append("action_mask")
    with_infos, without = make_env(config), make_env(strict(IN_OBS))
    assert with_infos.observation_space == without.observation_space
    assert sum(isinstance(env, ActionMask) for env in layers(with_infos)) == 1


def layers(env: Any) -> list[Any]:
    return [env, *(layers(env.env) if isinstance(env, gym.Wrapper) else [])]


FAULTS: dict[str, tuple[Any, str]] = {
    "missing": (None, "{} has no action_mask, expected 4 numbers, one for each choice of D"),
    "short": (np.ones(3, np.int8), "{} has an array of int8 with the shape (3,) as action_mask, expected 4"),
    "ragged": ([[1], [1, 0]], "{} has [[1], [1, 0]] (list) as action_mask, expected 4 numbers"),
    "objects": (np.array([1] * 4, object), "{} has an array of object with the shape (4,) as action_mask"),
    "words": (["a"] * 4, "{} has ['a', 'a', 'a', 'a'] (list) as action_mask, expected 4 numbers"),
    "two": ([1, 0, 2, 1], "the action_mask has 2, expected 0 or 1"),
    "nan": ([1, 0, np.nan, 1], "the action_mask has nan, expected 0 or 1"),
    "nothing": (np.zeros(4, bool), "the action_mask forbids everything"),
}


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    """The message of a call that is refused; empty if it is not."""
    try:
        function(*arguments)
    except (ConfigError, RunError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where", [IN_INFO, IN_OBS])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mask_that_fits_no_action_names_environment_and_step(fault: str, where: str) -> None:
    value, message = FAULTS[fault]
    envs = Envs(strict(where, fault=[value]), [1])
    obs = envs.reset()
    obs = envs.step(obs[:, -4:].argmax(1)[:, None]).obs
    expected = message.format("info" if where == IN_INFO else "the observation")
    said = refusal(envs.step, obs[:, -4:].argmax(1)[:, None])
    assert said.startswith(f"Strict-v0, step 2 of its episode: {expected}")
    assert "\n" not in said
    envs.close()
    at_start = "env.id=Strict-v0: its first steps failed, step 2 of its episode: "
    assert refusal(check_env, strict(where, fault=[value])).startswith(at_start + expected)


def test_each_component_needs_a_choice() -> None:
    several = [1, 0, 0, 0, 0, 0, 1, 0, 0]  # of 2, 4 and 3
    config = strict(IN_OBS, actions="several", fault=[several])
    assert refusal(check_env, config).endswith("the action_mask forbids everything in component 2 of 3")
    several[3] = 1
    assert refusal(check_env, config) == ""


def test_a_mask_for_other_actions_is_refused_before_the_first_step() -> None:
    said = refusal(check_env, strict(IN_OBS, size=5))
    assert said.startswith("env.id=Strict-v0: its first steps failed, reset: the observation has an array")
    assert "shape (5,) as action_mask, expected 4 numbers, one for each choice of Discrete(4" in said
    for where in (IN_INFO, IN_OBS):  # infos ask for it
        config = strict(where, actions="box")
        config.infos = ["action_mask"]
        expected = "env.infos=[action_mask]: Strict-v0 has no discrete actions, but Box"
        assert refusal(codec_of, config).startswith(expected)
    codec = codec_of(strict(IN_OBS, actions="box"))  # numbers of another meaning
    assert (codec.obs_size, codec.mask_size) == (7, 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [list, tuple, np.float32, lambda mask: mask[None] > 0])
def test_numbers_of_any_kind_are_a_mask(kind: Callable[[Any], Any]) -> None:
    env = make_env(strict(fault=[kind(np.array([0, 1, 1, 0]))]))
    obs, _ = env.reset(seed=1)
    for _ in range(2):
        obs, *_ = env.step(2 + obs[-4:].argmax())
    assert obs[-4:].tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("infos", [[], ["action_mask"]])
def test_a_mask_lets_no_wrong_observation_pass(infos: list[str]) -> None:
    config = env_config("Outside-v0", 1, 0, infos=infos)
    expected = "step 1 of its episode: the observation is -1 (int), expected a whole number from 0 to 2"
    assert refusal(check_env, config).endswith(expected)
