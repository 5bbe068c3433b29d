"""The libraries that do the works: this project, Stable-Baselines3, and SBX, which is its sister on JAX.

Each is built from the numbers of a `Work`, and then asked through its own objects what it is going to do:
libraries that would do other work are not compared. The peers are in bench/requirements.txt.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from bench import works
from bench.works import WORKS, BenchJob, Work

if TYPE_CHECKING:
    import gymnasium as gym

    from runlab.config.schema import Config

# Called between two rounds of training with the environment steps so far: True to go on.
Tick = Callable[[int], bool]


Facts = dict[str, Any]
Weights = list[tuple[int, str]]  # size and number type of each learned tensor


def _facts(num_envs: int, batch_size: int, updates_per_step: float, weights: Weights) -> Facts:
    """A contender's own account of its work. Contenders of one work agree in all of it."""
    parameters, dtypes = sum(size for size, _ in weights), "/".join(sorted({dtype for _, dtype in weights}))
    counts = {"num_envs": num_envs, "batch_size": batch_size, "updates_per_step": updates_per_step}
    return {**counts, "parameters": parameters, "dtype": dtypes}


def _of_torch(networks: Iterable[Any]) -> Weights:
    weights = [weight for network in networks for weight in network.parameters()]
    return [(weight.numel(), str(weight.dtype).removeprefix("torch.")) for weight in weights]


def build(job: BenchJob) -> Contender:
    """The contender of a job, in this process."""
    if job.library == "rltemplate":
        return Ours(job)
    peer = StableBaselines3 if job.library == "stable_baselines3" else Sbx
    return peer(WORKS[job.work], job.threads)


def configuration(job: BenchJob) -> Config:
    """The configuration of this project for a job; of a key that is given twice the last word counts."""
    from runlab.config.cli.preflight import preflight

    words = [*WORKS[job.work].overrides(), f"num_threads={job.threads}", "device=cpu"]
    last = {word.partition("=")[0]: word for word in [*words, *job.overrides]}
    return preflight(list(last.values())).configs[0]


class Ours:
    """This project, without observers."""

    def __init__(self, job: BenchJob) -> None:
        from runlab.config.project import project
        from runlab.determinism import switches

        self.config, self.is_ppo = configuration(job), WORKS[job.work].algo == "ppo"
        switches.apply(self.config)
        self.algorithm, self.envs = project().build(self.config)

    def facts(self) -> Facts:
        """Facts from the algorithm's networks and settings."""
        algorithm: Any = self.algorithm
        config, num_envs = algorithm.config, self.envs.num_envs
        networks = [algorithm.net] if self.is_ppo else [algorithm.actor, algorithm.critic]
        if self.is_ppo:
            rollout = config.num_steps * num_envs
            batch = rollout // config.num_minibatches
            updates = config.update_epochs * config.num_minibatches / rollout
        else:
            batch, updates = config.batch_size, config.updates_per_step
        return _facts(num_envs, batch, updates, _of_torch(each.module for each in networks))

    def updates(self) -> float:
        """The step counter of Adam."""
        state: Any = self.algorithm.state  # type: ignore[attr-defined]
        return float((state.net if self.is_ppo else state.learned.critic).steps)

    def train(self, tick: Tick) -> None:
        """Train iteration by iteration."""
        while tick(self.algorithm.env_steps):
            self.algorithm.train_iteration()

    def close(self) -> None:
        """Release the environments."""
        self.algorithm.close()


def atari(env_id: str, **kwargs: Any) -> gym.Env[Any, Any]:
    """A game with the wrappers that it has in training with this project."""
    import gymnasium as gym
    import yaml
    from gymnasium import wrappers

    from runlab.run.paths import PROJECT

    config = yaml.safe_load((PROJECT / "conf/env/_atari.yaml").read_text())
    env: gym.Env[Any, Any] = gym.make(env_id, **config["kwargs"], **kwargs)
    for name, arguments in (config["wrappers"] | config["training_wrappers"]).items():
        env = getattr(wrappers, name)(env, **arguments)
    return env


class StableBaselines3:
    """Stable-Baselines3's own training loop, ended by a callback."""

    library = "stable_baselines3"

    def __init__(self, work: Work, threads: int) -> None:
        import torch
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import VecNormalize

        torch.set_num_threads(threads)
        self.work = work
        made = partial(atari, work.env_id) if work.game else work.env_id
        envs: Any = make_vec_env(made, work.num_envs, seed=1, env_kwargs={"disable_env_checker": True})
        if work.scaled:
            envs = VecNormalize(envs, clip_obs=works.BOUND, clip_reward=works.BOUND, gamma=works.GAMMA)
        # CnnPolicy has the encoder of this project, of 512 features, and one layer each for policy and value.
        name, sizes = ("CnnPolicy", []) if work.game else ("MlpPolicy", list(work.hidden_sizes))
        ppo = work.algo == "ppo"
        kwargs: dict[str, Any] = {
            "policy_kwargs": {"net_arch": {"pi": sizes, "vf" if ppo else "qf": sizes}},
            "gamma": works.GAMMA,
            "device": "cpu",
            "seed": 1,
        }
        if ppo:
            kwargs |= {"n_steps": work.num_steps, "batch_size": work.batch_size, "n_epochs": work.epochs}
        else:
            kwargs |= {"buffer_size": works.SAC_BUFFER, "batch_size": works.SAC_BATCH, "train_freq": 1}
            kwargs |= {"learning_starts": works.LEARNING_STARTS, "gradient_steps": work.num_envs}
        library = importlib.import_module(self.library)
        self.model: Any = getattr(library, work.algo.upper())(name, envs, **kwargs)

    def facts(self) -> Facts:
        """Facts from the model and its networks."""
        model = self.model
        if self.work.algo == "ppo":
            updates = model.n_epochs / model.batch_size
        else:
            updates = model.gradient_steps / (model.train_freq.frequency * model.n_envs)
        return _facts(model.n_envs, model.batch_size, updates, self._weights())

    def _weights(self) -> Weights:
        policy = self.model.policy
        return _of_torch([policy] if self.work.algo == "ppo" else [policy.actor, policy.critic])

    def updates(self) -> float:
        """The largest counter of torch's optimiser."""
        policy = self.model.policy
        optimizer = policy.optimizer if self.work.algo == "ppo" else policy.critic.optimizer
        return max((float(state["step"]) for state in optimizer.state.values()), default=0.0)

    def train(self, tick: Tick) -> None:
        """`learn`, asked when a rollout begins: collecting and learning have been done in full then."""
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

    def _value_state(self) -> Any:
        policy = self.model.policy
        return policy.vf_state if self.work.algo == "ppo" else policy.qf_state

    def _weights(self) -> Weights:
        import jax

        params: Mapping[str, Any] = self.model.policy.actor_state.params
        leaves = jax.tree_util.tree_leaves((params, self._value_state().params))
        return [(int(leaf.size), str(leaf.dtype)) for leaf in leaves]

    def updates(self) -> float:
        """The counter of the value network's training state."""
        return float(self._value_state().step)


Contender: TypeAlias = Ours | StableBaselines3
