"""All algorithms agree in every weight, moment, statistic and metric with plain ones, in float64."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import gymnasium as gym
import pytest
import torch
import yaml
from conftest import Configure, build
from references.ppo import ReferencePPO
from references.ppo_moe import ReferencePPOMoE
from references.ppo_recurrent import ReferencePPORecurrent
from references.sac import ReferenceSAC
from references.surroundings import Copies

from rltemplate.algos.ppo import PPO
from rltemplate.algos.ppo_moe import PPOMoE
from rltemplate.algos.ppo_recurrent import PPORecurrent
from rltemplate.algos.sac import SAC
from runlab.config.schema import Config
from runlab.rng import Streams, env_seeds
from runlab.run.trace import digest, entries

# Values at which everything has an effect: what is clipped is sometimes beyond its bound, and so on.
BASE = {
    "ppo": [
        *("env.num_envs=3", "total_env_steps=100", "algo.num_steps=20", "algo.num_minibatches=4"),
        *("algo.update_epochs=3", "algo.learning_rate=0.01", "algo.learning_rate_schedule=constant"),
        *("algo.gamma=0.9", "algo.gae_lambda=0.8", "algo.clip_coef=0.1", "algo.ent_coef=0.01"),
        *("algo.max_grad_norm=0.7", "algo.obs_clip=1.5", "algo.reward_clip=1.0", "algo.hidden_sizes=[6,5]"),
        *("algo.normalize_obs=auto", "algo.normalize_reward=true"),
    ],
    "sac": [
        *("env.num_envs=3", "total_env_steps=80", "algo.steps_per_iteration=42", "algo.batch_size=8"),
        *("algo.buffer_size=50", "algo.learning_starts=30", "algo.actor_learning_rate=0.003"),
        *("algo.critic_learning_rate=0.005", "algo.alpha_learning_rate=0.008", "algo.tau=0.05"),
        *("algo.hidden_sizes=[6,5]", "algo.activation=tanh", "algo.alpha_init=0.5", "algo.gamma=0.9"),
        *("algo.normalize_obs=true", "algo.obs_clip=1.5"),
    ],
}
BASE["ppo_moe"] = [*BASE["ppo"], "algo.num_experts=5", "algo.router_gain=3.0", "algo.rollout_bits=3"]
BASE["ppo_recurrent"] = [*BASE["ppo"], "algo.memory_size=5", "algo.sequence_length=5"]
# What each case has that the others have not.
PPO_CASES = """
    base actions=discrete actions=several,ent_coef=0.2 num_envs=1 learning_rate=0.003
    learning_rate_schedule=linear ent_coef_schedule=linear,ent_coef=0.2
    clip_coef_schedule=linear,clip_value_loss=true,num_envs=1 adam_eps=0.01
    num_steps=8 update_epochs=1 num_minibatches=1 gamma=1.0
    gae_lambda=1.0 clip_coef=0.01 clip_value_loss=true ent_coef=0.2 vf_coef=2.0 max_grad_norm=0.05
    target_kl=0.008 normalize_advantage=false recompute_advantage=true normalize_obs=false obs_clip=0.5
    normalize_reward=false reward_clip=0.5 hidden_sizes=[7] activation=elu activation=relu
    orthogonal_init=false log_std_init=-0.7
    actions=discrete,masked=true actions=several,masked=true,ent_coef=0.2
"""
# With pictures, whose edge decides about the encoder. Nothing is normalised.
IMAGE_CASES = """
    image=36 image=8,beside=true image=8,beside=true,actions=discrete,masked=true image=8,encoder=impala
    image=8,encoder_size=5,orthogonal_init=false image=8,beside=true,standardize_images=true
"""
MOE_CASES = """
    base actions=discrete actions=several num_envs=1 hidden_sizes=[7] num_experts=3 num_experts=2
    num_chosen=1 num_chosen=4 router_gain=0.3 balance_coef=1.0 replay_routing=flipped replay_routing=none
    rollout_bits=null rollout_bits=2 orthogonal_init=false
"""
# PPO's own hyperparameters have their cases above.
RECURRENT_CASES = """
    base actions=discrete num_envs=1 memory_size=3 sequence_length=20,num_minibatches=3 sequence_length=1
    normalize_obs=false orthogonal_init=false recompute_advantage=true target_kl=0.008 clip_value_loss=true
    image=36 image=8,beside=true
"""
SAC_CASES = """
    base num_envs=1 actor_learning_rate=0.001 critic_learning_rate=0.001 alpha_learning_rate=0.001
    learning_rate_schedule=linear adam_eps=0.001 steps_per_iteration=40 gamma=0.5 tau=1.0 batch_size=3
    buffer_size=1000 learning_starts=70 updates_per_step=0.45 policy_delay=1 policy_delay=3 learn_alpha=false
    alpha_init=0.05 target_entropy=0.3 log_std_min=-1.0 log_std_max=0.0 hidden_sizes=[7] activation=relu
    normalize_obs=false obs_clip=0.5
    network=residual,hidden_sizes=[6,6] policy_average_steps=500 policy_average_steps=10
"""


Base = Callable[[str], Config]
Of = Callable[[str], str]


@pytest.fixture(scope="module")
def base(configure: Configure) -> Base:
    """What the cases of an algorithm differ from; those of others are not composed for a single test."""
    shared = "env.id=Noisy-v0", "device=cpu"  # a GPU would draw other noise
    return functools.cache(lambda algo: configure(f"algo={algo}", *shared, *BASE[algo]))


def varied(config: Config, case: str) -> Config:
    """The configuration with the values of a case."""
    algo, env = config.algo, config.env
    for name, text in re.findall(r"(\w+)=(\[.*?\]|[^,]+)", case):
        now, value = getattr(algo, name, None), yaml.safe_load(text)
        changes: dict[str, Any] = {name: type(now)[text] if isinstance(now, Enum) else value}
        if name in ("actions", "masked", "image", "beside"):
            env = dataclasses.replace(env, kwargs={**env.kwargs, **changes})
        elif name == "num_envs":
            env = dataclasses.replace(env, **changes)
        else:
            algo = dataclasses.replace(algo, **changes)
    return dataclasses.replace(config, env=env, algo=algo)


@pytest.fixture(scope="module", autouse=True)
def in_float64() -> Iterator[None]:
    """Both compute in float64, where rounding is far below every mistake; for this, torch's default type."""
    gym.register("Noisy-v0", entry_point="references.surroundings:Noisy")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    gym.registry.pop("Noisy-v0")


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Equal names, and values that differ by no more than rounding."""
    tensors = ({name: torch.as_tensor(x) for name, x in values.items()} for values in (actual, expected))
    torch.testing.assert_close(*tensors, rtol=1e-12, atol=1e-12)


def learned(algorithm: PPO | SAC) -> dict[str, Any]:
    """The part of the state of an algorithm that a reference has, by place."""
    left = ("env_steps", "streams", "obs/", "envs", "added")
    state = {path.removeprefix("/"): value for path, value in entries(algorithm.state_dict(), "")}
    return {path: value for path, value in state.items() if not f"{path}/".startswith(left)}


def agree(config: Config) -> str:
    """Both go three iterations and agree after each; a digest of what they have learned."""
    algorithm, envs = build(config)
    seeds = env_seeds(config.seed, "env", config.env.num_envs)
    copies, streams = Copies("Noisy-v0", seeds, **config.env.kwargs), Streams(config.seed)
    shared = copies, streams, config.total_env_steps
    reference: ReferencePPO | ReferenceSAC
    if isinstance(algorithm, PPOMoE):
        reference = ReferencePPOMoE(algorithm.config, *shared, algorithm.state.net.params)
    elif isinstance(algorithm, PPORecurrent):
        reference = ReferencePPORecurrent(algorithm.config, *shared, algorithm.state.net.params)
    elif isinstance(algorithm, PPO):
        reference = ReferencePPO(algorithm.config, *shared, algorithm.state.net.params)
    else:
        assert isinstance(algorithm, SAC)
        actor, critic, *_ = algorithm.state.learned
        reference = ReferenceSAC(algorithm.config, *shared, actor.params, critic.params)
    for _ in range(3):
        assert_same(algorithm.train_iteration().metrics, reference.train_iteration())
        assert_same(learned(algorithm), reference.state())
    assert algorithm.env_steps == reference.env_steps
    obs = torch.randn(9, envs.codec.obs_size, generator=torch.Generator().manual_seed(0)) * 4.0
    assert_same({"action": algorithm.act(obs.numpy())}, {"action": reference.act(obs)})
    algorithm.close()
    return str({path: digest(value) for path, value in learned(algorithm).items()})


@pytest.fixture(scope="module")
def of_base(base: Base, in_float64: None) -> Of:
    """What an algorithm learns from the values of the base."""
    return functools.cache(lambda algo: agree(base(algo)))


@pytest.mark.parametrize("case", PPO_CASES.split())
def test_ppo(base: Base, of_base: Of, case: str) -> None:
    assert (agree(varied(base("ppo"), case)) == of_base("ppo")) == (case == "base")


@pytest.fixture(scope="module")
def of_image(base: Base, in_float64: None) -> Of:
    """What PPO learns in a case with a picture."""
    return functools.cache(lambda case: agree(varied(base("ppo"), case)))


@pytest.mark.parametrize("case", IMAGE_CASES.split())
def test_ppo_with_images(of_image: Of, case: str) -> None:
    """The last value has an effect: it is compared with the same picture without it."""
    fewer, _, last = case.rpartition(",")
    learned = of_image(case)
    if not last.startswith(("image", "beside", "encoder")):  # with those, networks have other shapes
        assert learned != of_image(fewer)


@pytest.mark.parametrize("case", MOE_CASES.split())
def test_ppo_moe(base: Base, of_base: Of, case: str) -> None:
    assert (agree(varied(base("ppo_moe"), case)) == of_base("ppo_moe")) == (case == "base")


@pytest.mark.parametrize("case", RECURRENT_CASES.split())
def test_ppo_recurrent(base: Base, of_base: Of, case: str) -> None:
    assert (agree(varied(base("ppo_recurrent"), case)) == of_base("ppo_recurrent")) == (case == "base")


@pytest.mark.parametrize("case", SAC_CASES.split())
def test_sac(base: Base, of_base: Of, case: str) -> None:
    assert (agree(varied(base("sac"), case)) == of_base("sac")) == (case == "base")


@pytest.mark.parametrize(
    ("algo", "cases"),
    [
        ("ppo", [*PPO_CASES.split(), *IMAGE_CASES.split()]),
        ("ppo_moe", [*PPO_CASES.split(), *IMAGE_CASES.split(), *MOE_CASES.split()]),
        ("ppo_recurrent", [*PPO_CASES.split(), *IMAGE_CASES.split(), *RECURRENT_CASES.split()]),
        ("sac", SAC_CASES.split()),
    ],
)
def test_every_hyperparameter_has_a_case_of_another_value(base: Base, algo: str, cases: list[str]) -> None:
    config = base(algo).algo
    # No number of float64 is lowered: test_ppo_moe.py has cases of the last two.
    names = {spec.name for spec in dataclasses.fields(config)} - {"name", "rollout_dtype", "fp32_head"}
    tried = {(name, str(getattr(varied(base(algo), case).algo, name))) for case in cases for name in names}
    assert {name for name, value in tried if value != str(getattr(config, name))} == names
