"""The example shows what it says: other bits for other hash seeds, the same ones for the same."""

from __future__ import annotations

import os
import subprocess
import sys

from conftest import ROOT

SCRIPT = """
import gymnasium as gym, numpy as np
terms, hopper = gym.make("examples.terms:HopperTerms-v0"), gym.make("Hopper-v5")
draw = np.random.default_rng(0)
for env in (terms, hopper):
    env.reset(seed=1)
rewards = []
for _ in range(15):
    action = draw.uniform(-1, 1, 3)
    rewards.append([env.step(action)[1] for env in (terms, hopper)])
np.testing.assert_allclose(*np.array(rewards).T, rtol=1e-6)
print(np.array(rewards)[:, 0].tobytes().hex())
"""


def rewards(hash_seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_rewards_over_a_set_depend_on_the_hash_seed() -> None:
    assert rewards(0) == rewards(0)
    assert len({rewards(seed) for seed in range(4)}) > 1
