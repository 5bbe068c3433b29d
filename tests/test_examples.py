"""The example shows what it says: other bits for other hash seeds, the same ones for the same."""

from __future__ import annotations

import sys

from conftest import ROOT, run

SCRIPT = """
import gymnasium as gym, numpy as np
envs = gym.make("examples.terms:HopperTerms-v0"), gym.make("Hopper-v5")
for env in envs:
    env.reset(seed=1)
actions = np.random.default_rng(0).uniform(-1, 1, (15, 3))
rewards = np.array([[env.step(action)[1] for env in envs] for action in actions])
np.testing.assert_allclose(*rewards.T, rtol=1e-6)
print(rewards[:, 0].tobytes().hex())
"""


def test_rewards_over_a_set_depend_on_the_hash_seed() -> None:
    def rewards(hash_seed: int) -> str:
        variables = {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
        return run(ROOT, sys.executable, "-c", SCRIPT, status=0, **variables).stdout

    first = rewards(0)
    assert rewards(0) == first
    assert any(rewards(seed) != first for seed in (1, 2, 3))
