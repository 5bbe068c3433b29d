"""`.venv/bin/python -m bench.masks`: masks of actions beside MaskablePPO of sb3-contrib, on one rollout each.

Both have the same weights, observations, masks and actions. Prints the largest difference of log-probability,
entropy and value, and ends with status 1 if one is above 1e-6. The last line of a task shows how far they are
apart where one of them has no masks.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

LARGEST, CONTROL = 1e-6, "entropy without masks"
TASKS = {
    "Taxi-v4, 6 actions": ["env=Taxi-v4", "env.infos=[action_mask]"],
    "3 x 4 x 2 actions": ["env=Several-v0"],
}


class Several(gym.Env[Any, Any]):
    """Random observations and masks of a MultiDiscrete action, as a Dict."""

    action_space = spaces.MultiDiscrete([3, 4, 2])
    observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(9), "x": spaces.Box(-9.0, 9.0, (8,))})

    def __init__(self, render_mode: str | None = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        return self._obs(), 0.0, bool(self.np_random.random() < 0.1), False, {}

    def _obs(self) -> Any:
        kept = self.np_random.integers([0, 3, 7], [3, 7, 9])
        mask = np.isin(np.arange(9), kept) | (self.np_random.random(9) < 0.4)
        return {"action_mask": mask.astype(np.int8), "x": self.np_random.standard_normal(8, np.float32)}


def differences(words: list[str]) -> dict[str, float]:
    """The largest differences on a rollout of 4,096 steps, with a policy that is far from uniform."""
    from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy

    from runlab.config.cli.preflight import preflight
    from runlab.config.project import project

    sizes = ["algo.hidden_sizes=[64,64]", "algo.activation=tanh", "env.num_envs=8", "algo.num_steps=512"]
    plan = preflight(
        ["algo=ppo", *words, *sizes, "compile=false", "device=cpu", "num_threads=1", "logger=none"]
    )
    ppo: Any = project().build(plan.configs[0])[0]
    params = 3.0 * ppo.state.net.params
    ppo.state = ppo.state._replace(net=ppo.state.net._replace(params=params))
    with torch.no_grad():
        rollout = ppo.collect(ppo.begin_iteration())
        samples = rollout.normalized_obs, rollout.extras, rollout.action, rollout.log_prob
        obs, extras, action, acted = ppo.samples(samples)
        logits, value = ppo.net.apply(params, obs, extras, "policy", "value")
        codec = ppo.envs.codec
        seen = spaces.Box(-np.inf, np.inf, (ppo.num_seen,))
        policy = MaskableActorCriticPolicy(seen, codec.action_space, lambda _: 1e-3, net_arch=[64, 64])
        theirs = policy.mlp_extractor
        for module, own in [
            *zip([*theirs.policy_net[::2], policy.action_net], ppo.net.module.actor[::2], strict=True),
            *zip([*theirs.value_net[::2], policy.value_net], ppo.net.module.critic[::2], strict=True),
        ]:
            module.weight.copy_(own.weight)
            module.bias.copy_(own.bias)
        taken = action if len(codec.nvec) > 1 else action[:, 0]
        their_value, log_prob, entropy = policy.evaluate_actions(obs, taken, extras.action_mask)
        _, _, unmasked = policy.evaluate_actions(obs, taken)
    ppo.close()
    pairs = {
        "log-probability in the rollout": (acted, log_prob),
        "log-probability in the update": (ppo.dist.log_prob(logits, action), log_prob),
        "entropy": (ppo.dist.entropy(logits), entropy),
        "value": (value, their_value[:, 0]),
        CONTROL: (entropy, unmasked),
    }
    return {name: float((ours - other).abs().max()) for name, (ours, other) in pairs.items()}


def main() -> int:
    """Print all differences; 1 if one is too large."""
    gym.register("Several-v0", "bench.masks:Several")
    failed = False
    for task, words in TASKS.items():
        for name, difference in differences(words).items():
            print(f"{task:20} {name:32} {difference:.1e}")
            failed |= difference < 0.1 if name == CONTROL else difference > LARGEST
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
