"""REINFORCE with a linear policy (Williams 1992): about the least that learns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rltemplate.config.algorithms import ToyConfig  # type: ignore[attr-defined]  # put there with this file
from rltemplate.envs.envs import Envs
from rltemplate.learning.distributions import Categorical, DiagGaussian
from rltemplate.learning.engine import Engine
from rltemplate.learning.networks import mlp
from rltemplate.learning.optim import FlatModule, gradient
from rltemplate.rng import Streams
from rltemplate.types import Experience, ForwardPass, IterationResult, Probe


class Toy:
    """The algorithm over N environments."""

    def __init__(
        self, config: ToyConfig, envs: Envs, streams: Streams, total_env_steps: int, engine: Engine
    ) -> None:
        self.config, self.envs, self.streams, self.engine = config, envs, streams, engine
        self.env_steps, self.probe = 0, Probe()
        codec = envs.codec
        self.dist = DiagGaussian(codec.action_size) if codec.continuous else Categorical(codec.nvec)
        init, sizes = streams.torch("init", device="cpu"), [codec.obs_size, self.dist.param_size]
        self.net = FlatModule(mlp(sizes, "tanh", init, orthogonal_gain=0.01).to(streams.device))
        self._update = engine(self._one_update)
        self._obs: Tensor | None = None  # (N, O)

    @torch.no_grad()
    def train_iteration(self) -> IterationResult:
        """T steps with the present policy, and one update."""
        probe, rate, episodes = self.probe, torch.tensor(self.config.learning_rate), []
        if self._obs is None:
            probe.event("init")
            self.net.show(probe)
            probe.event("reset")
            self._obs = torch.from_numpy(probe("obs", self.envs.reset()))
        probe.begin(self)
        steps: list[tuple[Tensor, ...]] = []
        for t in range(self.config.num_steps):
            probe.event("step", t)
            obs = probe("obs", self._obs)
            noise = self.dist.noise(self.envs.num_envs, self.streams.torch("action"))
            action = probe("action", self.dist.sample(self.net.module(obs), noise))
            step = self.envs.step(action.cpu().numpy())
            reward = torch.from_numpy(probe("reward", step.reward.astype(np.float32)))
            probe("next_obs", step.next_obs)
            steps.append((obs, action, reward, torch.from_numpy(step.terminated | step.truncated)))
            episodes += step.episodes
            self._obs = torch.from_numpy(step.obs)
        self.env_steps += self.config.num_steps * self.envs.num_envs
        all_obs, actions, rewards, done = (torch.stack(values) for values in zip(*steps, strict=True))
        returns = [rewards[-1]]  # (N,) until the end of the episode or of these steps, the last step first
        for reward, ends in zip(reversed(rewards[:-1]), reversed(done[:-1]), strict=True):
            returns.append(reward + ~ends * returns[-1])
        data = all_obs.flatten(0, 1), actions.flatten(0, 1), torch.stack(returns[::-1]).flatten()
        probe.event("update", 0)
        flat, loss, entropy = self._update(self.net.flat, *data, rate)
        self.net.assign(probe("params", flat))
        metrics = {"loss/policy": loss, "policy/entropy": entropy, "optim/learning_rate": rate}
        probes = {"obs": all_obs, "action": actions, "reward": rewards, "params": flat}
        return IterationResult(metrics, episodes, probes)

    def _one_update(
        self, flat: Tensor, obs: Tensor, action: Tensor, ret: Tensor, rate: Tensor
    ) -> tuple[Tensor, ...]:
        def loss(flat: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            params = self.net.call(flat, obs)
            advantage = (ret - ret.mean()) / (ret.std() + 1e-8)
            value = -(advantage * self.dist.log_prob(params, action)).mean()
            return value, (value, self.dist.entropy(params).mean())

        grad, (value, entropy) = gradient(loss, flat)
        return flat - rate * grad, value, entropy

    @torch.no_grad()
    def act(self, obs: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """Actions (N, A) for encoded observations (N, O)."""
        params = self.net.module(torch.from_numpy(obs))
        if deterministic:
            return self.dist.mode(params).numpy()
        return self.dist.sample(params, self.dist.noise(len(obs), self.streams.torch("act"))).numpy()

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        """The policy."""
        batches = (self.envs.num_envs, self.envs.num_envs * self.config.num_steps)
        return {"policy": ForwardPass(self.net.module, self.envs.codec.obs_size, batches)}

    def state_dict(self) -> dict[str, Any]:
        """Weights, streams and the counter."""
        return {
            "env_steps": self.env_steps,
            "net": self.net.flat.clone(),
            "streams": self.streams.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state`."""
        self.env_steps = int(state["env_steps"])
        self.net.assign(state["net"])
        self.streams.load_state_dict(state["streams"])

    def progress(self) -> dict[str, Any]:
        """The environments, and what they showed last."""
        return {} if self._obs is None else {"obs": self._obs.clone(), "envs": self.envs.state_dict()}

    def load_progress(self, state: Mapping[str, Any], experience: Iterable[Mapping[str, Tensor]]) -> None:
        """Go on there."""
        if state:
            self.envs.load_state_dict(state["envs"])
            self._obs = state["obs"]

    def experience(self, first: int) -> Experience | None:
        """None: everything is learned from at once."""
        return None

    def close(self) -> None:
        """Release the environments."""
        self.envs.close()
