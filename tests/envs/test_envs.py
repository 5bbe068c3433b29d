"""Environments as algorithms see them: spaces, episode ends, refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
from conftest import env_config, play
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv

from runlab.config.cli.preflight import preflight
from runlab.config.schema import EnvConfig
from runlab.envs.codec import FlatCodec
from runlab.envs.envs import Envs
from runlab.envs.make import check_env, make_env, repeats, seeded_episodes
from runlab.envs.recorder import ActionRecorder
from runlab.envs.vector import step_dtype
from runlab.errors import ConfigError, RunError
from runlab.interfaces import Episode
from runlab.run.trace import named_leaves

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def codec(obs: spaces.Space[Any] = BOX, action: spaces.Space[Any] = BOX) -> FlatCodec:
    return FlatCodec("Some-v0", obs, action)


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


def test_an_action_that_is_not_finite_is_not_blamed_on_the_environment() -> None:
    """Hopper would give NaN as reward, BipedalWalker fails on an assertion, and LunarLander goes on."""
    envs = Envs(env_config("Pendulum-v1", 2), [1, 2])
    envs.reset()
    envs.step(np.array([[3e38], [-9.0]], np.float32))
    for wrong in (np.nan, np.inf):
        expected = f"the action for Pendulum-v1 has {wrong} in place 1 of 1, expected finite numbers"
        with pytest.raises(RunError, match=expected):
            envs.step(np.array([[0.0], [wrong]], np.float32))
    envs.close()


def test_choices_start_where_the_space_starts_and_have_its_shape() -> None:
    several = spaces.MultiDiscrete(np.array([[3], [2]]))
    cases: list[tuple[spaces.Space[Any], Any, Any, Any]] = [
        (spaces.Discrete(3, start=-1), [[0], [2]], [-1, 1], (3,)),
        (several, [[2, 1]], [[[2], [1]]], (3, 2)),
        (spaces.MultiBinary(3), [[1, 0, 1]], [[1, 0, 1]], (2, 2, 2)),
        (spaces.Discrete(3, dtype=np.int32), [[2]], [2], (3,)),
        (spaces.MultiDiscrete([3, 2], dtype=np.uint8), [[2, 1]], [[2, 1]], (3, 2)),
    ]
    for space, action, native, nvec in cases:
        decoded = codec(action=space).decode_action(np.array(action))
        assert (decoded.tolist(), codec(action=space).nvec) == (native, nvec)
        assert all(map(space.contains, decoded))
        assert step_dtype(BOX, space)["action"].base == decoded.dtype  # of the action that arrives


@pytest.mark.parametrize(("low", "high", "kind"), [(-2, 5, np.int64), (0, 255, np.uint8), (0, 1, np.bool_)])
def test_every_integer_of_a_box_has_an_equal_share(low: int, high: int, kind: Any) -> None:
    number = high - low + 1
    some = codec(action=spaces.Box(low, high, (1,), kind))
    spread = (np.arange(100 * number) + 0.5) / (50 * number) - 1.0
    decoded = some.decode_action(spread[:, None].astype(np.float32))
    assert decoded.dtype == kind
    assert np.bincount(decoded[:, 0].astype(int) - low).tolist() == [100] * number
    assert some.decode_action(np.array([[-1], [1], [-9], [9]])).ravel().tolist() == [low, high, low, high]


@pytest.mark.parametrize(
    ("low", "high", "kind", "supported"),
    [
        (-np.inf, np.inf, np.int64, False),  # Gymnasium gives them the bounds of int64
        (0, np.inf, np.int64, False),
        (0, 2**64 - 1, np.uint64, False),
        (-(2**52), 2**52, np.int64, True),
        (-1e300, 1e300, np.float64, False),
        (-1e38, 1e38, np.float64, True),
    ],
)
def test_bounds_that_actions_cannot_be_computed_with_are_refused_in_a_line(
    low: float, high: float, kind: Any, supported: bool
) -> None:
    space = spaces.Box(low, high, (1,), kind)
    if not supported:
        with pytest.raises(ConfigError, match=r"^Some-v0 has the action space Box[^\n]*$"):
            codec(action=space)
        return
    decoded = codec(action=space).decode_action(np.array([[-1.0], [0.0], [1.0]], np.float32))
    assert all(map(space.contains, decoded))
    assert decoded.ravel().tolist() == pytest.approx([low, 0, high])


def test_a_space_that_does_not_fit_is_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match=r"^Some-v0 has the observation space Dict; .* flattens[^\n]*$"):
        codec(spaces.Dict({"a": BOX}))


class Looks(gym.Env[Any, Any]):
    """Its constructor takes no `render_mode`."""

    observation_space = BOX
    action_space = spaces.Discrete(2)


def test_a_constructor_without_render_mode_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        gym.registry, "Looks-v0", gym.envs.registration.EnvSpec("Looks-v0", f"{__name__}:Looks")
    )
    with pytest.raises(ConfigError, match=r"env.kwargs.render_mode: .* leave it out"):
        make_env(env_config("Looks-v0", kwargs={"render_mode": "human"}))
    make_env(env_config("Looks-v0")).close()


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


def test_kept_places_of_observations_are_those_of_the_environment_in_their_order() -> None:
    config = env_config("CartPole-v1", wrappers={"KeepObservations": {"places": [2, 0]}})
    kept, whole = Envs(config, [0]), Envs(env_config("CartPole-v1"), [0])
    assert kept.codec.obs_size == 2
    assert kept.codec.obs_space.high.tolist() == whole.codec.obs_space.high[[2, 0]].tolist()
    assert kept.reset().tolist() == whole.reset()[:, [2, 0]].tolist()
    for action in (1, 0, 1):
        step = np.array([[action]])
        assert kept.step(step).obs.tolist() == whole.step(step).obs[:, [2, 0]].tolist()


REPEATS = "does not repeat itself"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"FramStackObservation": {}}, r"env.wrappers.FramStack.* did you mean FrameStackObservation\?"),
        (
            {"FrameStackObservation": {"size": 4}},
            r"argument 'size'; did you mean stack_size\? allowed: stack_size",
        ),
        ({"FrameStackObservation": 4}, "env.wrappers.FrameStackObservation=4: .*must be a mapping"),
        ({"builtins:print": {}}, "is no subclass of gymnasium.Wrapper"),
        ({"pydoc.pipepager": {"cmd": "touch executed"}}, "is no subclass of gymnasium.Wrapper"),
        ({"gymnasium.spaces.Discrete": {}}, "is no subclass of gymnasium.Wrapper"),
        ({"nowhere:Wrapper": None}, "env.wrappers.nowhere:Wrapper=None: .*No module named 'nowhere'"),
        ({"test_envs:Counts": {"hidden": "generator"}}, REPEATS),
        (
            {"KeepObservations": {"places": [0, 4]}},
            r"places=\[0, 4\]: expected different whole.* from 0 to 3",
        ),
        ({"KeepObservations": {"places": [-1]}}, r"places=\[-1\]: expected"),
        ({"KeepObservations": {"places": [True]}}, r"places=\[True\]: expected"),
        ({"KeepObservations": {"places": []}}, r"places=\[\]: expected"),
        ({"KeepObservations": {"places": [1, 1]}}, r"places=\[1, 1\]: expected different"),
        ({"KeepObservations": {"places": "x"}}, "places=x: expected"),
        ({"KeepObservations": {"places": [[0], [1, 2]]}}, r"places=\[\[0\], \[1, 2\]\]: expected"),
        ({"KeepObservations": {}}, "missing 1 required positional argument: 'places'"),
        ({"KeepObservations": {"place": [1]}}, r"did you mean places\? allowed: places"),
        (
            {"FrameStackObservation": {"stack_size": 2}, "KeepObservations": {"places": [0]}},
            r"takes observations in a Box of one axis, and not Box\(",
        ),
        ({"training_wrappers": {"NormalizeReward": {}}}, REPEATS),
        ({"training_wrappers": {"FrameStackObservation": {"stack_size": 2}}}, "change the spaces"),
    ],
)
def test_a_wrapper_that_cannot_be_had_is_refused(changes: dict[str, Any], words: str) -> None:
    changes = changes if "training_wrappers" in changes else {"wrappers": changes}
    with pytest.raises(ConfigError, match=words) as refusal:
        check_env(env_config("CartPole-v1", **changes))
    assert str(refusal.value).count("\n") == (words == REPEATS)


LONG = 0x3243F6A8885A308D  # a seed of 63 bits


class Peculiar(gym.Env[Any, Any]):
    """A walk of 60 steps. It differs from other environments in what `kind` says."""

    def __init__(self, kind: str = "", render_mode: str | None = None) -> None:
        self.kind, self.resets = kind, 0
        self.make_spaces(2)
        self.goal = np.random.default_rng().uniform() if kind == "drawn when made" else 0.0

    def make_spaces(self, num: int) -> None:
        self.observation_space, self.action_space = spaces.Box(-9, 9, (1,), np.float32), spaces.Discrete(num)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None or self.kind == "entropy":
            self._np_random, _ = gym.utils.seeding.np_random(seed)
        if self.kind == "old generator" and seed is not None:
            self.own = np.random.RandomState(seed)
        if self.kind == "int of C" and seed is not None:
            self.own = np.random.RandomState(np.array([seed], np.int32))
        if self.kind == "unlucky" and seed == LONG:
            raise ValueError("no way out of this maze")
        self.resets += 1
        if self.kind in ("anew", "another space"):
            self.make_spaces(2 if self.kind == "anew" else 2 + self.resets)
        self.t = 0
        obs = np.array([getattr(self, "own", self.np_random).uniform() + self.goal], np.float32)
        return obs if self.kind == "reset of old" else (obs, {})

    def step(self, action: Any) -> Any:
        self.t += 1
        reward: Any = np.array([1.0, 2.0]) if self.kind == "vector" else float(action)
        obs = np.array([getattr(self, "own", self.np_random).uniform()], np.float32)
        ended = (self.t >= 60,) if self.kind == "step of old" else (False, self.t >= 60)
        return obs, reward, *ended, {}


class Seedless(Peculiar):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


@pytest.fixture(autouse=True)
def _peculiar(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Peculiar, Seedless):
        name = f"{kind.__name__}-v0"
        monkeypatch.setitem(
            gym.registry, name, gym.envs.registration.EnvSpec(name, f"{__name__}:{kind.__name__}")
        )


def peculiar(kind: str, num: int = 1, workers: int = 0) -> EnvConfig:
    return env_config(
        "Seedless-v0" if kind == "seedless" else "Peculiar-v0", num, workers, kwargs={"kind": kind}
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vector", r"step 1 of its episode: the reward is an array of float64 with the shape \(2,\)"),
        (
            "seedless",
            r"reset: .*reset\(\) got an unexpected keyword argument 'seed'; expected Gymnasium's reset",
        ),
        ("reset of old", "reset: the environment returned array.*expected 2 values: observation, info"),
        ("step of old", "step 1 of its episode: the environment returned 4 values, expected 5 values"),
        ("another space", r"reset\(\) changes the spaces, expected the same in every episode"),
        ("unlucky", r"ValueError in .*test_envs.py, line \d+: no way out of this maze"),
    ],
)
def test_what_shows_in_the_first_steps_is_refused_before_a_run(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        check_env(peculiar(kind), print)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith(f"env.id={peculiar(kind).id}: its first steps failed, ")
    assert str(refusal.value).count(peculiar(kind).id) == 1


@pytest.mark.parametrize(
    ("kind", "holds", "with_seeds"),
    [
        ("entropy", False, True),
        ("drawn when made", False, False),  # as a random map of FrozenLake
        ("anew", True, True),
        ("old generator", True, True),
    ],
)
def test_the_trial_of_repeat_also_resets_without_a_seed_and_uses_its_own_space(
    kind: str, holds: bool, with_seeds: bool
) -> None:
    assert repeats(peculiar(kind)).holds is holds
    assert repeats(seeded_episodes(peculiar(kind))).holds is with_seeds


@pytest.mark.parametrize("hidden", ["", "generator"])
def test_the_trial_of_repeat_is_made_with_the_wrappers_of_training(hidden: str) -> None:
    wrappers = {"test_envs:Counts": {"hidden": hidden}}
    assert repeats(env_config("CartPole-v1", training_wrappers=wrappers)).holds is (hidden == "")


@pytest.mark.parametrize(("kind", "bits"), [("", 63), ("old generator", 32), ("int of C", 31)])
def test_an_environment_gets_seeds_as_long_as_it_takes(kind: str, bits: int) -> None:
    notes: list[str] = []
    check_env(peculiar(kind), notes.append)
    assert [f"refuses seeds of more than {bits} bits" in note for note in notes[:1]] == [True] * (bits < 63)
    assert repeats(peculiar(kind)).seed_bits == bits
    cut, first = ActionRecorder(make_env(peculiar(kind)), kind).reset(LONG % 2**bits), []
    for workers in (0, 1):  # equal in workers
        envs = Envs(peculiar(kind, 2, workers), [LONG, LONG + 1])
        first.append(envs.reset().tolist())
        envs.close()
    assert first[0] == first[1] != [first[0][0]] * 2
    assert first[0][0] == cut.tolist()


def test_an_error_that_one_seed_causes_stays_one() -> None:
    recorder = ActionRecorder(make_env(peculiar("unlucky")), "unlucky")
    recorder.reset(LONG + 2)
    with pytest.raises(ValueError, match="no way out"):
        recorder.reset(LONG)


@pytest.mark.parametrize("kind", ["entropy", "old generator", "int of C"])
def test_seeded_episodes_make_a_run_repeat_itself_and_resume(kind: str) -> None:
    notes: list[str] = []
    check_env(peculiar(kind), notes.append)
    assert notes[-1].endswith("cannot be resumed. With env.wrappers.SeededEpisodes=null they can")
    config = seeded_episodes(peculiar(kind, 2))
    check_env(config, notes.append)
    assert len(notes) == (1 if kind == "entropy" else 2), "seeds of episodes have 31 bits"
    whole, again = Envs(config, [LONG, 5]), Envs(config, [1, 2])
    starts = [whole.reset().tolist()]
    for step in range(200):  # in the fourth episode
        play(whole, step, 1)
        if step % 60 == 59:
            starts.append(whole.state_dict()["states"][0]["outcomes"])
    assert len({f"{each}" for each in starts}) == 4
    again.load_state_dict(whole.state_dict())
    assert play(again, 200, 100) == play(whole, 200, 100)


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


class Game(CartPoleEnv):
    """With an argument of ALE's games."""

    def __init__(self, repeat_action_probability: float, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)


@pytest.mark.parametrize("probability", [0.25, 0.0])
def test_the_sticky_actions_of_ale_are_refused_and_those_of_gymnasium_are_not(
    monkeypatch: pytest.MonkeyPatch, probability: float
) -> None:
    """ALE's come from a generator that no reset restores, which a few steps need not show."""
    package = SimpleNamespace(Game=Game, ALEInterface=Mock(), LoggerMode=Mock())
    monkeypatch.setitem(sys.modules, "ale_py", package)
    gym.register("Game-v0", "ale_py:Game", kwargs={"repeat_action_probability": 0.25})
    config = env_config("Game-v0", wrappers={"StickyAction": {"repeat_action_probability": 0.25}})
    if probability:
        with pytest.raises(ConfigError, match=r"Game-v0 repeats actions .*StickyAction.repeat_action_prob"):
            check_env(config)
    else:
        check_env(replace(config, kwargs={"repeat_action_probability": 0.0}))
    gym.registry.pop("Game-v0")


def test_packages_of_atari_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ale_py", "cv2"):
        monkeypatch.setitem(sys.modules, name, None)
    words = "use .venv/bin/python -m pip install ale-py opencv-python-headless"
    with pytest.raises(ConfigError, match=words):
        make_env(env_config("ale_py:ALE/Pong-v5"))
    with pytest.raises(ConfigError, match=f"env.wrappers.AtariPreprocessing: a package is missing; {words}"):
        make_env(env_config("CartPole-v1", wrappers={"AtariPreprocessing": {}}))
    for name in ("ale_py:ALE/Qbert-v5", "ALE/Qbert-v5"):
        with pytest.raises(ConfigError, match=f"env={name}: ale_py cannot be imported .*; {words}"):
            preflight([f"env={name}"])
    with pytest.raises(ConfigError, match=r"other_games cannot be imported .*; is it installed?"):
        preflight(["env=other_games:Game-v0"])
    with pytest.raises(ConfigError, match=r"use env.id=minigrid:MiniGrid-Empty-5x5-v0$"):
        make_env(env_config("MiniGrid-Empty-5x5-v0"))  # as a file of conf/env/ may have it


def test_games_of_atari_have_the_names_of_gymnasium() -> None:
    """Whether their package was imported before, or not."""
    for _ in range(2):
        names = ("ALE/Pong-v5", "ale_py:ALE/Pong-v5")
        found = [preflight(["algo=ppo", f"env={name}", "recipe=atari"]).configs[0].env for name in names]
        assert found[0] == found[1]
        assert found[0].id == "ale_py:ALE/Pong-v5"
