"""The part that off-policy algorithms share: exploration, replay, the count of updates, twin critics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rltemplate.interfaces import Episode, ForwardPass, IterationResult
from rltemplate.learning.algorithm import StatefulAlgorithm
from rltemplate.learning.config import OffPolicyConfig
from rltemplate.learning.networks import mlp
from rltemplate.learning.normalize import Scaling, Statistics, normalize
from rltemplate.learning.optim import FlatModule, rehearsed
from rltemplate.learning.replay_buffer import ReplayBuffer, Transition

Noise = Callable[[], Tensor]  # draws (B, A)


class TwinCritic(nn.Module):
    """Two independent estimates of the action value, (2, B)."""

    def __init__(
        self,
        config: OffPolicyConfig,
        obs_size: int,
        action_size: int,
        rng: torch.Generator,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = [obs_size + action_size, *config.hidden_sizes, 1]
        build = partial(mlp, sizes, config.activation, layer_norm=layer_norm)
        self.q1, self.q2 = build(rng), build(rng)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Both estimates, each from its own layers: a batched product would round differently."""
        x = torch.cat([obs, action], -1)  # (B, O + A)
        return torch.stack([self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)])  # (2, B)


class TrainState(NamedTuple):
    """All that learning changes."""

    learned: Any  # a NamedTuple, with an `AdamState` as `actor` and as `critic`
    obs_norm: Statistics
    num_updates: int = 0


class PolicyStep(NamedTuple):
    """One decision."""

    policy: Tensor  # (N, P) parameters of the action distribution
    action: Tensor  # (N, A)


class OffPolicyAlgorithm(StatefulAlgorithm):
    """An algorithm that learns from a replay buffer, with a policy and twin critics.

    A subclass builds its networks, calls `start`, and has the methods below that are not implemented.
    """

    config: Any
    state: TrainState
    replay: ReplayBuffer
    actor: FlatModule
    critic: FlatModule

    def start(self, learned: Any) -> None:
        """Begin with the networks and optimisers `learned`."""
        config, codec = self.config, self.envs.codec
        self.state = TrainState(learned, Statistics.empty(codec.obs_size, self.device))
        self.replay = ReplayBuffer(
            config.buffer_size, codec.obs_size, codec.action_size, self.device, self.envs.num_envs
        )

    def rates(self) -> Any:
        """The learning rates of the coming iteration, a NamedTuple of 0-d tensors with a field `actor`."""
        raise NotImplementedError

    def inputs(self, batch: Any, number: int, noise: Noise) -> Any:
        """The data of update `number`, counted from 1: a NamedTuple. The policy learns in some updates."""
        raise NotImplementedError

    def update(self, learned: Any, inputs: Any, rates: Any) -> tuple[Any, Any]:
        """One update: its report, a NamedTuple with `metrics`, and the new `learned`, of the same form.

        The metrics are kept until the iteration ends; the rest of the report is for the trace alone.
        """
        raise NotImplementedError

    def metrics(self, seen: Sequence[Any]) -> dict[str, Tensor]:
        """Metrics of an iteration by name, from the `metrics` of its reports, perhaps none."""
        raise NotImplementedError

    @torch.no_grad()
    def train_iteration(self) -> IterationResult:
        """`steps_per_iteration` environment steps, each followed by its updates."""
        config, obs, rates = self.config, self.begin_iteration(), self.rates()
        raw_obs, episodes, metrics_seen = list[Tensor](), list[Episode](), list[Any]()
        for _ in range(max(1, config.steps_per_iteration // self.envs.num_envs)):
            action = self.explore(obs)
            step = self.envs.step(action.cpu().numpy())
            self.env_steps += self.envs.num_envs
            rest = step.reward, step.next_obs, step.terminated, step.truncated
            self.replay.add(Transition(obs, action, *map(self.to_device, rest)))
            raw_obs.append(obs)
            episodes += step.episodes
            obs = self.to_device(step.obs)
            for inputs in self.due_inputs():
                report, learned = self.engine.run(self.update, self.state.learned, inputs, rates)
                self.state = self.state._replace(learned=learned)
                metrics_seen.append(report.metrics)
        self.obs = obs
        if config.normalize_obs:
            self.state = self.state._replace(obs_norm=self.state.obs_norm.merged(torch.cat(raw_obs)))
        return IterationResult({"optim/learning_rate": rates.actor} | self.metrics(metrics_seen), episodes)

    # Collecting

    def explore(self, obs: Tensor) -> Tensor:
        """Actions (N, A) to learn from: uniform at first, then drawn from the policy."""
        num_envs = self.envs.num_envs
        if self.env_steps < self.config.learning_starts:
            noise = self.streams.draw("warmup", torch.rand, num_envs, self.envs.codec.action_size)
            return (2.0 * noise - 1.0).to(self.device)
        noise = self.streams.draw("action", self.dist.noise, num_envs)
        flat, scaling = self.state.learned.actor.params, self.scaling()
        decision: PolicyStep = self.engine.run(self.policy_step, flat, scaling, obs, noise)
        return decision.action

    def policy_step(self, flat: Tensor, scaling: Scaling | None, obs: Tensor, noise: Tensor) -> PolicyStep:
        """Actions for unscaled observations (N, O)."""
        dist_params = self.actor.call(flat, normalize(obs, scaling, self.config.obs_clip))
        return PolicyStep(dist_params, self.dist.sample(dist_params, noise))

    # Learning

    def due_inputs(self) -> Iterator[Any]:
        """Inputs of the updates that are due after the last step, with fresh batches and noise."""
        config, done, draw = self.config, self.state.num_updates, self.streams.draw
        num_envs, size = self.envs.num_envs, config.batch_size
        steps = max(0, self.env_steps // num_envs - config.learning_starts // num_envs)
        # From the number of all steps: a sum of fractions would lose updates by rounding. The small term is
        # for products just below a whole number.
        due = math.floor(config.updates_per_step * num_envs * steps + 1e-9)
        self.state = self.state._replace(num_updates=due)
        for number in range(done + 1, due + 1):
            batch = self.batch(draw("replay", self.replay.draw, size))
            yield self.inputs(batch, number, lambda: draw("update", self.dist.noise, size))

    def batch(self, index: Tensor) -> Any:
        """The transitions in the rows `index` (B,), as the networks see them: a `Batch`."""
        batch = self.replay.take(index)
        return batch._replace(obs=self.normalized(batch.obs), next_obs=self.normalized(batch.next_obs))

    def rehearse(self) -> None:
        """One decision, and an update with and one without the policy."""
        num_envs, size = self.envs.num_envs, self.config.batch_size
        obs = self.made_up(num_envs, self.envs.codec.obs_size)
        noise = self.streams.draw("action", self.dist.noise, num_envs)
        flat = self.state.learned.actor.params
        self.engine.run(self.policy_step, flat, self.scaling(), obs, noise)
        empty = self.batch(torch.zeros(size, dtype=torch.int64, device=self.device))
        batch = pytree.tree_map(lambda x: self.made_up(*x.shape), empty)
        learned = rehearsed(self.state.learned)
        for number in sorted({1, self.config.policy_delay}):
            inputs = self.inputs(batch, number, lambda: self.streams.draw("update", self.dist.noise, size))
            self.engine.run(self.update, learned, inputs, self.rates())

    # Acting

    def policy(self, obs: Tensor) -> Tensor:
        """Parameters of the action distribution (B, P) for unscaled observations (B, O)."""
        return self.actor.call(self.state.learned.actor.params, self.normalized(obs))  # type: ignore[no-any-return]

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        """Policy and both critics, with the batches of acting and learning."""
        codec, learned = self.envs.codec, self.state.learned
        batches = (self.envs.num_envs, self.config.batch_size)

        def values(rows: Tensor) -> Tensor:
            parts = rows.split([codec.obs_size, codec.action_size], 1)
            return self.critic.call(learned.critic.params, *parts).T  # type: ignore[no-any-return]

        return {
            "policy": ForwardPass(partial(self.actor.call, learned.actor.params), codec.obs_size, batches),
            "value": ForwardPass(values, codec.obs_size + codec.action_size, batches),
        }
