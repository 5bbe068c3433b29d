"""Algorithms that act with a memory, as evaluations and policy files meet them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Configure, build
from gymnasium import spaces
from test_protocol import VALUES, WORDS, ClimbConfig, HillClimber

from runlab.config.algorithms import Entry
from runlab.config.loading import to_dict
from runlab.config.project import ALGORITHMS
from runlab.envs.codec import FlatCodec
from runlab.interfaces import Episode, act_of
from runlab.rerun.policy import load_policy
from runlab.rerun.policy_file import export_policy, run_or_policy
from runlab.run.checkpoint import Checkpoints
from runlab.run.evaluation import evaluate


class Remembering(HillClimber):
    """One whose actions depend on the observation before; its weights are a tensor of their own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.recurrent, self.unread = np.ones((self.envs.codec.obs_size, 2)), np.ones(3)

    def act_from(self, obs: np.ndarray, memory: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        before = np.zeros_like(obs) if memory is None else memory
        return np.argmax(obs @ self.best + before @ self.recurrent, 1)[:, None], obs

    def state_dict(self) -> dict[str, Any]:
        arrays = {"recurrent": self.recurrent, "unread": self.unread}
        return super().state_dict() | {name: torch.from_numpy(x.copy()) for name, x in arrays.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.recurrent, self.unread = state["recurrent"].numpy(), state["unread"].numpy()


def test_a_policy_file_keeps_what_acts_by_a_memory_alone(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry(ClimbConfig, f"{__name__}:Remembering", needs_discrete=True, values=VALUES)
    monkeypatch.setitem(ALGORITHMS, "climb", entry)
    config = configure(*WORDS)
    algorithm, _ = build(config)
    assert isinstance(algorithm, Remembering)
    algorithm.recurrent = np.array([[1.0, -1.0]] * 4)
    Checkpoints(tmp_path, to_dict(config), 1).save(0, algorithm.state_dict(), None)
    algorithm.close()
    export_policy(tmp_path, tmp_path / "policy.zip")
    with run_or_policy(None, f"{tmp_path / 'policy.zip'}", tmp_path) as run_dir:
        _, loaded, _ = load_policy(run_dir)
    assert isinstance(loaded, Remembering)
    assert loaded.recurrent.tolist() == algorithm.recurrent.tolist()
    assert loaded.unread.tolist() == [0.0] * 3
    loaded.close()


class Lasting(gym.Env[np.ndarray, Any]):
    """Episodes whose lengths depend on their seeds. An observation is the number of steps that are left."""

    observation_space = spaces.Box(0.0, 10.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 2 + (seed or 0) % 5
        return np.array([self.left], np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return np.array([self.left], np.float32), float(action), self.left == 0, False, {}


@pytest.mark.parametrize("most_beside", [1, 3, 8])
def test_an_evaluation_hands_each_episode_its_own_memory(most_beside: int) -> None:
    codec = FlatCodec("Lasting", Lasting.observation_space, Lasting.action_space)

    def act(obs: np.ndarray, memory: Any, _rngs: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Actions of reward 1 where the memory is the observation before; 0 in the first step."""
        right = np.zeros_like(obs) if memory is None else memory == obs + 1.0
        return right.astype(int), obs

    def of_another(obs: np.ndarray, memory: Any, _rngs: Any = None) -> tuple[np.ndarray, np.ndarray]:
        return act(obs, None if memory is None else memory[::-1])

    episodes = evaluate(Lasting, codec, act, range(8), most_beside=most_beside)
    assert episodes == [Episode(1.0 + seed % 5, 2 + seed % 5) for seed in range(8)]
    assert (evaluate(Lasting, codec, of_another, range(8), most_beside=most_beside) == episodes) == (
        most_beside == 1
    )


def test_an_algorithm_without_a_memory_acts_as_ever() -> None:
    class Forgetful:
        def act(self, obs: np.ndarray) -> np.ndarray:
            return 2.0 * obs

    actions, memory = act_of(Forgetful())(np.ones((2, 1)), None)  # type: ignore[arg-type]
    assert actions.tolist() == [[2.0], [2.0]]
    assert memory is None
