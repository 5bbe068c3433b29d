"""Those who do the works: this project, Stable-Baselines3, and SBX, which is its sister on JAX.

Each is built from the numbers of a `Work` and then asked, through the objects that came out, what it is going
to do. The peers are imported by the functions that use them, for they are only there with the extra `bench`.

What the peers do otherwise, as read in Stable-Baselines3 2.9 and SBX 0.28, is in `OTHERWISE`.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rltemplate.bench.works import (
    GAMMA,
    LEARNING_STARTS,
    OBS_BOUND,
    PPO_BATCH,
    PPO_EPOCHS,
    REWARD_BOUND,
    SAC_BATCH,
    SAC_BUFFER,
    WORKS,
    Arithmetic,
    Job,
    MeasurementError,
    Work,
)

if TYPE_CHECKING:
    from rltemplate.config import Config

# Asked between two rounds of training, with the environment steps so far: whether to go on.
Tick = Callable[[int], bool]

OTHERWISE = (
    "The peers are built with `make_vec_env` (their `DummyVecEnv` with `Monitor`, without Gymnasium's "
    "checker), `VecNormalize` for PPO on MuJoCo, and no logging. Read in their sources: `VecNormalize` "
    "updates its statistics at every step, this project once per rollout; Stable-Baselines3 reads its "
    "losses from the device in every update, this project once per log point; SBX clips the gradients "
    "of policy and value apart and has an optimiser for each, the others one for both; "
    "Stable-Baselines3 and SBX weigh squared errors by 0.5 in SAC, this project by 1. Their `SubprocVecEnv` "
    "was slower on two cores when it was tried, and so were two threads for networks of 64-64. CleanRL "
    "is a collection of scripts and no library on PyPI, so it is not in these tables."
)


class Contender(Protocol):
    """Somebody who is built and ready to train."""

    def arithmetic(self) -> Arithmetic:
        """What it is going to do, read from what was built."""
        ...

    def updates(self) -> tuple[float, float]:
        """Steps that the optimisers of value and policy have taken, as these have counted them."""
        ...

    def train(self, tick: Tick) -> None:
        """Train until `tick` says no; it is asked between two rounds, so that all work is done in full."""
        ...

    def close(self) -> None:
        """Release the environments."""
        ...


def build(job: Job) -> Contender:
    """The contender of a job, in this process."""
    work = WORKS[job.work]
    if job.library == "rltemplate":
        return Ours.ready(configuration(job.words()))
    if job.library == "stable_baselines3":
        return StableBaselines3(work, job.threads, job.device)
    return Sbx(work, job.threads, job.device)


def configuration(words: Sequence[str]) -> Config:
    """What these overrides stand for, the last of each key; `ConfigError` if there is no such thing."""
    from rltemplate.cli import preflight

    last = {word.partition("=")[0]: word for word in words}
    return preflight(list(last.values())).configs[0]


_AT_MINUS_ONE = {"tanh": math.tanh(-1.0), "relu": 0.0, "elu": math.expm1(-1.0)}


def activation_of(function: Callable[[float], float]) -> str:
    """Which nonlinearity a function is, from its value at -1."""
    value = function(-1.0)
    for name, expected in _AT_MINUS_ONE.items():
        if math.isclose(value, expected, abs_tol=1e-5):
            return name
    raise MeasurementError(f"an activation that makes {value} of -1 is none of {', '.join(_AT_MINUS_ONE)}")


class Ours:
    """This project, without observers."""

    def __init__(self, config: Config) -> None:
        """In a process whose settings are those of `config` already."""
        from rltemplate.train import build_algorithm

        self.config = config
        self.algorithm, self.envs = build_algorithm(config)

    @classmethod
    def ready(cls, config: Config) -> Ours:
        """With the level and the threads of the configuration in force in this process."""
        from rltemplate.run import determinism

        determinism.apply(config.determinism, config.num_threads, config.compile, config.device.name)
        return cls(config)

    def arithmetic(self) -> Arithmetic:
        """From environments, networks and settings of the algorithm."""
        import torch
        from torch import nn

        algorithm: Any = self.algorithm
        config, envs = algorithm.config, algorithm.envs
        modules = list(_modules(algorithm))
        chains = [m for module in modules for m in module.modules() if isinstance(m, nn.Sequential)]
        layers = [[layer for layer in chain if isinstance(layer, nn.Linear)] for chain in chains]
        values = {_hidden(chain) for chain in layers if chain[-1].out_features == 1}
        policies = {_hidden(chain) for chain in layers if chain[-1].out_features > 1}
        between = next(layer for layer in chains[0] if not isinstance(layer, nn.Linear))
        weights = [weight for module in modules for weight in module.parameters()]
        ppo = config.name == "ppo"
        rollout = config.num_steps * envs.num_envs if ppo else envs.num_envs
        updates = config.update_epochs * config.num_minibatches / rollout if ppo else config.updates_per_step
        return Arithmetic(
            env_id=envs.spec.id,
            num_envs=envs.num_envs,
            steps_between=rollout,
            batch_size=rollout // config.num_minibatches if ppo else config.batch_size,
            value_updates_per_step=updates,
            policy_updates_per_step=updates if ppo else updates / config.policy_delay,
            hidden_sizes=_only(policies),
            value_hidden_sizes=_only(values),
            activation=activation_of(lambda x: between(torch.tensor([x])).item()),
            parameters=sum(weight.numel() for weight in weights),
            dtype=_only({str(weight.dtype).removeprefix("torch.") for weight in weights}),
            obs_bound=config.obs_clip if config.normalize_obs else None,
            reward_bound=config.reward_clip if ppo and config.normalize_reward else None,
            buffer_size=None if ppo else algorithm.replay.capacity,
            learning_starts=None if ppo else config.learning_starts,
            gamma=config.gamma,
            device=_only({weight.device.type for weight in weights}),
        )

    def updates(self) -> tuple[float, float]:
        """From the optimisers' own counters, as a checkpoint has them."""
        steps = dict(_adam_steps(self.algorithm.state_dict()))
        if not steps:
            raise MeasurementError("no optimiser was found in the algorithm's state")
        return (
            float(steps.get("critic_adam", steps.get("adam", 0.0))),
            float(steps.get("actor_adam", steps.get("adam", 0.0))),
        )

    def train(self, tick: Tick) -> None:
        """Iteration by iteration."""
        while tick(self.algorithm.env_steps):
            self.algorithm.train_iteration()

    def close(self) -> None:
        """Release the environments."""
        self.algorithm.close()


def _modules(algorithm: Any) -> Iterator[Any]:
    """The networks that the attributes of an algorithm hold, each once."""
    from torch import nn

    seen: set[int] = set()
    waiting = list(vars(algorithm).values())
    while waiting:
        thing = waiting.pop(0)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            if any(isinstance(module, nn.Linear) for module in thing.modules()):
                yield thing
        elif isinstance(thing, tuple):
            waiting += thing
        elif isinstance(getattr(thing, "module", None), nn.Module):  # with its parameters as one vector
            waiting.append(thing.module)


def _adam_steps(state: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The steps that each optimiser in a state has counted: the last of its tensors."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _adam_steps(value)
        elif name.endswith("adam"):
            yield name, value[-1].max().item()


def _hidden(layers: Sequence[Any]) -> tuple[int, ...]:
    return tuple(layer.out_features for layer in layers[:-1])


def _only(found: set[Any]) -> Any:
    """The one element; a contender whose parts differ cannot be described."""
    if len(found) != 1:
        raise MeasurementError(f"expected one of a kind, and found {sorted(map(str, found))}")
    return next(iter(found))


class StableBaselines3:
    """Stable-Baselines3's own training loop, stopped by a callback."""

    library = "stable_baselines3"

    def __init__(self, work: Work, threads: int, device: str) -> None:
        import torch
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import VecNormalize

        torch.set_num_threads(threads)
        self.work = work
        envs: Any = make_vec_env(work.env_id, work.num_envs, seed=1, env_kwargs={"disable_env_checker": True})
        if work.scaled:
            envs = VecNormalize(envs, clip_obs=OBS_BOUND, clip_reward=REWARD_BOUND, gamma=GAMMA)
        sizes = list(work.hidden_sizes)
        value = "vf" if work.algo == "ppo" else "qf"
        common = {
            "policy_kwargs": {"net_arch": {"pi": sizes, value: sizes}},
            "gamma": GAMMA,
            "device": device,
            "seed": 1,
        }
        self.model: Any = self._model(envs, common)

    def _model(self, envs: Any, common: dict[str, Any]) -> Any:
        peer, work = importlib.import_module(self.library), self.work
        if work.algo == "ppo":
            return peer.PPO(
                "MlpPolicy",
                envs,
                n_steps=work.num_steps,
                batch_size=PPO_BATCH,
                n_epochs=PPO_EPOCHS,
                normalize_advantage=True,
                **common,
            )
        return peer.SAC(
            "MlpPolicy",
            envs,
            buffer_size=SAC_BUFFER,
            learning_starts=LEARNING_STARTS,
            batch_size=SAC_BATCH,
            train_freq=1,
            gradient_steps=work.num_envs,  # one for each environment step
            **common,
        )

    def arithmetic(self) -> Arithmetic:
        """From the model, its networks and its environments."""
        model = self.model
        ppo = self.work.algo == "ppo"
        scaling = model.get_vec_normalize_env()
        rollout = model.n_steps * model.n_envs if ppo else model.train_freq.frequency * model.n_envs
        if ppo:
            updates = model.n_epochs * math.ceil(rollout / model.batch_size) / rollout
        else:  # below 0: as many as there were steps
            updates = 1.0 if model.gradient_steps < 0 else model.gradient_steps / rollout
        return Arithmetic(
            env_id=model.get_env().get_attr("spec")[0].id,
            num_envs=model.n_envs,
            steps_between=rollout,
            batch_size=model.batch_size,
            value_updates_per_step=updates,
            policy_updates_per_step=updates / getattr(model, "policy_delay", 1),
            obs_bound=scaling.clip_obs if scaling is not None and scaling.norm_obs else None,
            reward_bound=scaling.clip_reward if scaling is not None and scaling.norm_reward else None,
            buffer_size=None if ppo else model.buffer_size,
            learning_starts=None if ppo else model.learning_starts,
            gamma=model.gamma,
            **self._networks(),
        )

    def _networks(self) -> dict[str, Any]:
        import torch
        from torch import nn

        policy = self.model.policy

        def widths(network: nn.Module) -> list[int]:
            return [layer.out_features for layer in network.modules() if isinstance(layer, nn.Linear)]

        if self.work.algo == "ppo":
            hidden = widths(policy.mlp_extractor.policy_net)
            value_hidden = widths(policy.mlp_extractor.value_net)
            weights = list(policy.parameters())
        else:
            hidden, value_hidden = widths(policy.actor.latent_pi), widths(policy.critic.qf0)[:-1]
            weights = [*policy.actor.parameters(), *policy.critic.parameters()]
        return {
            "hidden_sizes": tuple(hidden),
            "value_hidden_sizes": tuple(value_hidden),
            "activation": activation_of(lambda x: policy.activation_fn()(torch.tensor([x])).item()),
            "parameters": sum(weight.numel() for weight in weights),
            "dtype": _only({str(weight.dtype).removeprefix("torch.") for weight in weights}),
            "device": _only({weight.device.type for weight in weights}),
        }

    def updates(self) -> tuple[float, float]:
        """From the counters of torch's optimisers."""
        policy = self.model.policy
        if self.work.algo == "ppo":
            optimizers = (policy.optimizer, policy.optimizer)
        else:
            optimizers = (policy.critic.optimizer, policy.actor.optimizer)
        counted = [[float(state["step"]) for state in each.state.values()] for each in optimizers]
        return max(counted[0], default=0.0), max(counted[1], default=0.0)

    def train(self, tick: Tick) -> None:
        """`learn`, asked whenever a rollout begins: then collecting and learning have been done in full."""
        from stable_baselines3.common.callbacks import BaseCallback

        class Asking(BaseCallback):  # type: ignore[misc, unused-ignore]
            going = True

            def _on_rollout_start(self) -> None:
                self.going = tick(self.num_timesteps)

            def _on_step(self) -> bool:
                return self.going

        self.model.learn(10**9, callback=Asking(), log_interval=None)

    def close(self) -> None:
        """Release the environments."""
        self.model.get_env().close()


class Sbx(StableBaselines3):
    """Stable-Baselines3's loop around algorithms on JAX."""

    library = "sbx"

    def _model(self, envs: Any, common: dict[str, Any]) -> Any:
        return super()._model(envs, {**common, "device": "cpu"})  # JAX chooses its device by itself

    def _networks(self) -> dict[str, Any]:
        import jax

        policy = self.model.policy
        value = policy.vf_state if self.work.algo == "ppo" else policy.qf_state
        heads = 1 if self.work.algo == "ppo" else 2  # mean and deviation
        leaves = jax.tree_util.tree_leaves((policy.actor_state.params, value.params))
        platform = _only({device.platform for leaf in leaves for device in leaf.devices()})
        # Both critics lie in one array.
        return {
            "hidden_sizes": _widths(policy.actor_state.params)[:-heads],
            "value_hidden_sizes": _widths(value.params)[:-1],
            "activation": activation_of(lambda x: float(policy.activation_fn(x))),
            "parameters": sum(int(leaf.size) for leaf in leaves),
            "dtype": _only({str(leaf.dtype) for leaf in leaves}),
            "device": "cuda" if platform == "gpu" else platform,
        }

    def updates(self) -> tuple[float, float]:
        """From the counters of the training states."""
        policy = self.model.policy
        value = policy.vf_state if self.work.algo == "ppo" else policy.qf_state
        return float(value.step), float(policy.actor_state.step)


def _widths(params: Mapping[str, Any]) -> tuple[int, ...]:
    """Outputs of the dense layers of a Flax network, in the order in which it made them."""
    dense = {name: value for name, value in params.items() if re.fullmatch(r"Dense_\d+", name)}
    if dense:
        names = sorted(dense, key=lambda name: int(name.removeprefix("Dense_")))
        return tuple(int(dense[name]["kernel"].shape[-1]) for name in names)
    inner = [value for value in params.values() if isinstance(value, Mapping)]
    if len(inner) != 1:
        raise MeasurementError(f"no dense layers among {', '.join(params)}")
    return _widths(inner[0])
