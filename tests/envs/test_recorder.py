"""Environments go on exactly from a file, and only where they can."""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Configure, env_config, play
from gymnasium import spaces

from runlab.envs.envs import Envs
from runlab.envs.make import resume_note
from runlab.envs.recorder import ActionRecorder
from runlab.errors import ConfigError
from runlab.launch.checks import check_configs
from runlab.rng import env_seeds

FURTHER = 200  # steps after the snapshot

LIMIT = 60  # which ends episodes of those that never fall over
IDS = [
    *("CartPole-v1", "Pendulum-v1", "LunarLander-v3", "BipedalWalker-v3", "InvertedPendulum-v5"),
    *("InvertedDoublePendulum-v5", "Reacher-v5", "Pusher-v5", "Swimmer-v5", "Hopper-v5", "Walker2d-v5"),
    *("HalfCheetah-v5", "Ant-v5", "Humanoid-v5"),
]
# They draw from the environment's generator, keep state within an episode, and apply to training alone.
STICKY, STACK = {"repeat_action_probability": 0.5}, {"stack_size": 3}
WRAPPED: dict[str, Any] = {
    "wrappers": {"StickyAction": STICKY, "FrameStackObservation": STACK},
    "training_wrappers": {"examples.shaping:Upright": None},
}
MOMENTS = ("first episode", "mid-episode", "just ended")


def make(env_id: str, num: int, workers: int = 0, seed: int = 1) -> Envs:
    changes = WRAPPED if env_id == "wrapped" else {}
    env_id = "CartPole-v1" if changes else env_id
    return Envs(env_config(env_id, num, workers, LIMIT, **changes), env_seeds(seed, "env", num))


def reach(envs: Envs, moment: str) -> int:
    """Start, go to a moment of that kind, and return the number of steps it took."""
    envs.reset()
    if moment == "first episode":
        assert not any(episodes for *_, episodes in play(envs, 0, 2))
        return 2
    t, ended = 0, 0
    while ended < 2 * envs.num_envs + 1:  # at least one of them is in its third episode or beyond
        ended += len(play(envs, t, 1)[0][-1])
        t += 1
    while moment == "mid-episode" and play(envs, t, 7)[-1][-1]:
        t += 7
    return t if moment == "just ended" else t + 7


@pytest.mark.parametrize(
    ("env_id", "num", "moment", "workers", "later"),
    [
        *(("CartPole-v1", 3, moment, 0, 0) for moment in MOMENTS),
        ("LunarLander-v3", 3, "mid-episode", 0, 0),
        ("BipedalWalker-v3", 1, "just ended", 0, 0),
        ("CartPole-v1", 3, "just ended", 3, 1),
        ("Hopper-v5", 3, "mid-episode", 2, 0),
        ("wrapped", 3, "mid-episode", 1, 0),
        *(
            pytest.param(env_id, num, moment, workers, workers, marks=pytest.mark.slow)
            for env_id, num, moment, workers in itertools.product(IDS, (1, 3), MOMENTS, (0, 1))
        ),
    ],
)
def test_a_run_goes_on_bit_for_bit(
    env_id: str, num: int, moment: str, workers: int, later: int, tmp_path: Path
) -> None:
    whole = make(env_id, num, workers)
    again = make(env_id, num, later, seed=2)  # leads elsewhere by itself
    try:
        t = reach(whole, moment)
        torch.save(whole.state_dict(), tmp_path / "state.pt")
        again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        expected = play(whole, t, FURTHER)
        assert any(episodes for *_, episodes in expected)  # so that resets are among it
        assert play(again, t, FURTHER) == expected
    finally:
        whole.close()
        again.close()


def running(env_id: str = "CartPole-v1", num: int = 2, steps: int = 75) -> Envs:
    envs = make(env_id, num)
    envs.reset()
    play(envs, 0, steps)
    return envs


def restored(state: dict[str, Any], env_id: str = "CartPole-v1", num: int = 2, workers: int = 0) -> Envs:
    envs = make(env_id, num, workers, seed=2)
    try:
        envs.load_state_dict(state)
    finally:
        if workers:
            envs.close()
    return envs


@pytest.mark.parametrize("workers", [0, 1])
def test_another_action_or_generator_is_noticed(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    envs = running()
    state = envs.state_dict()
    assert play(restored(state), 75, 50) == play(envs, 75, 50)  # which leaves the state as it was
    other_kind = copy.deepcopy(state)
    other_kind["states"][0].update(from_seed=False, generator='{"bit_generator": "MT19937"}')
    state["states"][1]["actions"][-2].bitwise_xor_(1)
    for wrong in (state, other_kind):
        with pytest.raises(ConfigError, match=r"CartPole-v1 does not repeat itself from its generator state"):
            restored(wrong, workers=workers)
    with pytest.raises(ConfigError, match=r"env.id=Acrobot-v1: the checkpoint holds CartPole-v1"):
        restored(state, "Acrobot-v1")
    assert capfd.readouterr().err == ""


class Walk(gym.Env[np.ndarray, Any]):
    """A random walk of seven steps that does much of what an environment may.

    The seeded reset draws what all episodes share, and gives the generator to a part. Steps write into the
    action that they are given, and into the one array that is returned each time.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, kind: str, render_mode: str | None = None) -> None:
        self.kind, self.place, self.goal, self.episodes = kind, np.zeros(2), 0.0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.kind == "NoGenerator-v0":
            self.part = np.random.default_rng(0)
        else:
            super().reset(seed=seed)
            if seed is not None:
                self.part, self.goal = self.np_random, self.np_random.normal()
        drawn = np.random.default_rng() if self.kind == "OwnGenerator-v0" else self.part
        self.place[:], self.t, self.episodes = drawn.normal(size=2), 0, self.episodes + 1
        return self.place, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        action += self.place[0]
        late = self.kind == "PartsLater-v0" and self.t == 7  # by what it keeps across episodes
        self.place += self.part.normal(size=2) + action * (self.episodes if late else 1)
        return self.place, float(self.place[0] - self.goal), False, self.t == 7, {}


KINDS = ("Usual-v0", "NoGenerator-v0", "OwnGenerator-v0", "PartsLater-v0")
for kind in KINDS:
    gym.register(kind, entry_point="test_recorder:Walk", kwargs={"kind": kind})


@pytest.mark.parametrize("own", KINDS[:2])
def test_an_environment_that_repeats_itself_goes_on(own: str, tmp_path: Path) -> None:
    for steps in (0, 5, 14, 25):
        envs = running(own, steps=steps)
        torch.save(envs.state_dict(), tmp_path / "state.pt")
        again = restored(torch.load(tmp_path / "state.pt", weights_only=True), own)
        assert play(again, steps, 30) == play(envs, steps, 30)


@pytest.mark.parametrize("own", KINDS[2:])
def test_an_environment_with_hidden_state_is_refused(own: str) -> None:
    state = running(own, steps=25).state_dict()
    with pytest.raises(ConfigError, match=f"the environment {own} does not repeat itself") as refusal:
        restored(state, own)
    assert len(str(refusal.value).splitlines()) <= 2


@pytest.mark.parametrize("own", KINDS)
def test_hidden_state_is_told_at_the_start(
    configure: Configure, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_configs([configure(f"env.id={own}")])
    assert ("runs in it cannot be resumed" in capsys.readouterr().err) == (own in KINDS[2:])


def test_a_slow_environment_is_tried_for_one_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runlab.envs.make._PATIENCE_S", -1.0)
    # One shows draws of its own, and not yet what is kept over episodes.
    assert resume_note(env_config("OwnGenerator-v0")) is not None
    assert resume_note(env_config("PartsLater-v0")) is None


def test_an_environment_that_ends_the_process_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Walk, "step", lambda *_: sys.exit(0))
    assert resume_note(env_config(KINDS[0])) is None


def test_an_environment_that_samples_its_spaces_repeats_itself_from_the_seed() -> None:
    class Sampling(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            _, *others = self.env.step(self.action_space.sample())
            return self.env.observation_space.sample(), *others

    def played(seed: int) -> list[float]:
        recorder = ActionRecorder(Sampling(gym.make("Pendulum-v1")), "Sampling")
        recorder.reset(seed)
        return [float(recorder.step(np.zeros(1, np.float32))[0][0]) for _ in range(5)]

    assert played(1) == played(1) != played(2)


def test_a_recording_is_the_same_however_often_one_is_taken() -> None:
    envs, often = running(num=1, steps=0), running(num=1, steps=0)
    for step in range(300):
        play(envs, step, 1)
        play(often, step, 1)
        seen = often.state_dict()["states"][0]
        assert sum(seen["lengths"]) == len(seen["actions"])
    last = envs.state_dict()["states"][0]
    assert (seen["lengths"], seen["outcomes"]) == (last["lengths"], last["outcomes"])
    assert torch.equal(seen["actions"], last["actions"])
    assert (len(last["lengths"]), len(last["actions"]) < 250) == (2, True)  # of two episodes
