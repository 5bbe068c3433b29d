"""PPO with a mixture of experts as policy, whose updates are given the router's choices again.

Last bits decide which experts a router chooses, so that acting and learning may take different ones. Replay
(R3, arXiv 2510.11370) records the set of experts of each decision, and the updates use it:

    x      = torso(obs)                                       (B, H)
    s      = router(x)                                        (B, E) logits
    chosen = the k largest of s, or the recorded set          (B, k) ascending
    g      = softmax of s at the places `chosen`              (B, k)
    output = head(sum over chosen e of g_e expert_e(x))       (B, P) before the standard deviation

Only the set is replayed: s and g are the learner's, and its router has a gradient. All experts compute all
samples, since in batches by expert a row would depend on the rows beside it.
"""

from __future__ import annotations

import contextlib
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runlab.determinism import kernels

from ..learning.algorithm import columns_mean
from ..learning.distributions import Unsquashed
from ..learning.networks import Linear, Rows, mlp
from ..learning.on_policy import Extras, Rollout
from ..learning.optim import AdamState
from .ppo import PPO, ActorCritic, Coefficients
from .ppo_moe_config import PPOMoEConfig

OWN_CHOICE = -1  # in the place of recorded experts: the network chooses


class Routing(NamedTuple):
    """Data of a decision that an update gets again."""

    action_mask: Tensor | tuple[()] = ()
    experts: Tensor | tuple[()] = ()  # (B, k) ascending, or OWN_CHOICE in a whole row


def largest(logits: Tensor, count: int) -> Tensor:
    """The places (B, count) of the largest logits (B, E), ascending; of equal ones the first, unlike topk."""
    left, places = logits.detach(), []
    for _ in range(count):
        places.append(left.argmax(-1, keepdim=True))
        left = left.scatter(-1, places[-1], -3e38)  # of -inf the C++ compiler knows nothing
    return torch.cat(places, -1).sort(-1).values


def loads(experts: Tensor, num_experts: int) -> Tensor:
    """The share of each expert (E,) among the choices (B, k)."""
    taken = experts.new_zeros(len(experts), num_experts, dtype=torch.get_default_dtype())
    return columns_mean(taken.scatter(-1, experts, 1.0)) / experts.shape[-1]


def balance(load: Tensor, logits: Tensor) -> Tensor:
    """E sum_e f_e p_e, 0-d: loads f_e (E,), mean probabilities p_e (arXiv 2101.03961, eq. 4)."""
    return len(load) * kernels.total(load * columns_mean(F.softmax(logits, -1)))


def rounded(weights: Tensor, bits: int) -> Tensor:
    """Weights with `bits` bits of mantissa after the leading one, halves to even, and any exponent."""
    mantissa, exponent = torch.frexp(weights)  # in [1/2, 1)
    return torch.ldexp((mantissa * 2.0 ** (bits + 1)).round() / 2.0 ** (bits + 1), exponent)


class Mixture(nn.Module):
    """PPO's policy network `dense`, whose last hidden layer becomes the first of E experts."""

    def __init__(self, config: PPOMoEConfig, dense: nn.Module, rng: torch.Generator) -> None:
        super().__init__()
        self.config, num_experts = config, config.num_experts
        *torso, first, activation, head = dense.children()
        width, size = first.get_parameter("weight").shape
        layer = partial(mlp, activation=config.activation, generator=rng)
        gain, router_gain = (2.0**0.5, config.router_gain) if config.orthogonal_init else (None, None)
        experts = [first, *(layer([size, width], orthogonal_gain=gain)[0] for _ in range(num_experts - 1))]
        joint = Linear(size, num_experts * width)  # side by side: one product for all of them
        for name, parameter in joint.named_parameters():
            parameter.data.copy_(torch.cat([each.get_parameter(name) for each in experts]))
        self.torso, self.router = Rows(*torso), layer([size, num_experts], orthogonal_gain=router_gain)
        self.experts, self.head = Rows(joint, activation), Rows(head)

    def forward(self, obs: Tensor, recorded: Tensor | tuple[()], acting: bool) -> tuple[Tensor, ...]:
        """Output (B, P) for observations (B, O), logits (B, E) of the router, and the experts used (B, k)."""
        config, high = self.config, contextlib.nullcontext
        lowered = partial(torch.autocast, obs.device.type, torch.bfloat16)
        low = lowered if acting and config.rollout_dtype == "bfloat16" else high
        with low():
            x = self.torso(obs)  # (B, H)
            logits = self.router(x).to(obs.dtype)  # (B, E)
            outputs = self.experts(x).unflatten(-1, (config.num_experts, -1))  # (B, E, H)
        experts = largest(logits, config.num_chosen)  # (B, k)
        if isinstance(recorded, Tensor):
            experts = torch.where(recorded == OWN_CHOICE, experts, recorded)
        weights = F.softmax(logits.gather(-1, experts), -1)  # (B, k)
        chosen = outputs.gather(1, experts[..., None].expand(-1, -1, outputs.shape[-1]))  # (B, k, H)
        mixed = reduce(torch.add, (weights[..., None] * chosen).unbind(1))  # (B, H); a sum in one order
        with high() if config.fp32_head else low():
            return self.head(mixed).to(obs.dtype), logits, experts


class MoEActorCritic(ActorCritic):
    """A mixture as policy, and PPO's network for values."""

    def __init__(self, config: PPOMoEConfig, obs_size: int, dist: Unsquashed, rng: torch.Generator) -> None:
        super().__init__(config, obs_size, dist, rng)
        self.actor, self.coef = Mixture(config, self.actor, rng), config.balance_coef  # type: ignore[assignment]

    def forward(self, obs: Tensor, extras: Extras, *parts: str) -> tuple[Tensor, ...]:
        """Further parts: "act", the policy in a rollout, "experts" used (B, k), weighted loss "balance"."""
        if parts == ("value",):
            return super().forward(obs, extras, *parts)
        assert isinstance(extras, Routing)
        output, logits, experts = self.actor(obs, extras.experts, "act" in parts)
        results = dict.fromkeys(("policy", "act"), self.action_params(output, extras)) | {"experts": experts}
        if "value" in parts:
            results["value"] = super().forward(obs, extras, "value")[0]
        if "balance" in parts:
            results["balance"] = self.coef * balance(loads(experts, logits.shape[-1]), logits)
        return tuple(results[part] for part in parts)


class PPOMoE(PPO):
    """PPO whose samples carry the experts of their decisions."""

    config: PPOMoEConfig
    no_extras = Routing()
    parts = ("policy", "value", "balance")

    def network(self, rng: torch.Generator) -> nn.Module:
        return MoEActorCritic(self.config, self.num_seen, self.dist, rng)

    def acting_params(self) -> Tensor:
        params, bits = self.state.net.params, self.config.rollout_bits
        return params if bits is None else rounded(params, bits)

    def decide(
        self, params: Tensor, obs: Tensor, extras: Extras, memory: Extras
    ) -> tuple[Tensor, Extras, Extras]:
        output, experts = self.net.apply(params, obs, extras, "act", "experts")
        assert isinstance(extras, Routing)
        return output, extras._replace(experts=experts), memory

    def changed(self, params: Tensor, obs: Tensor, experts: Tensor) -> Tensor:
        """True (T, N) where these parameters lead to other experts than those that acted (T, N, k)."""
        own = self.net.apply(params, obs.flatten(0, 1), self.no_extras, "experts")[0].view_as(experts)
        return torch.ne(own, experts).any(-1)

    def learn(
        self, rollout: Rollout, reward: Tensor, coef: Coefficients
    ) -> tuple[AdamState, dict[str, Tensor]]:
        """PPO's epochs, with the experts that `replay_routing` hands back."""
        action_mask, recorded = rollout.extras  # recorded: (T, N, k)
        load = loads(recorded.flatten(0, 1), self.config.num_experts)  # (E,)
        flipped = self.changed(self.state.net.params, rollout.normalized_obs, recorded)  # (T, N)
        replayed = {"all": flipped | True, "flipped": flipped, "none": flipped & False}
        experts = torch.where(replayed[self.config.replay_routing][..., None], recorded, OWN_CHOICE)
        net, metrics = super().learn(rollout._replace(extras=Routing(action_mask, experts)), reward, coef)
        drifted = self.changed(net.params, rollout.normalized_obs, recorded)
        return net, metrics | {
            "moe/flip_fraction": flipped.to(reward.dtype).mean(),
            "moe/drift_fraction": drifted.to(reward.dtype).mean(),
            "moe/load_max": len(load) * load.max(),
        }
