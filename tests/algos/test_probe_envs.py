"""Every algorithm learns the known values and actions of small environments, in about a second each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DEVICE, Configure, build, small
from probe_envs import PROBES, ProbeEnv
from torch import Tensor

from rltemplate.algos.ppo_config import PPOConfig
from rltemplate.learning.config import OffPolicyConfig
from runlab.config.project import ALGORITHMS
from runlab.config.schema import Config
from runlab.interfaces import Algorithm, ForwardPass, forward_passes_of

GAMMA = 0.5  # so that a discount that is missing or applied twice is far from the right value
# Largest error of a value, and largest loss of return by an action. Over five seeds of each test the largest
# error was 0.011 (PPO) and 0.045 (SAC), the largest loss 0.001 and 0.011. The wrong action of two loses 2.
TOLERANCE = 0.1

# Without normalisation, values are those of rewards as they are, and networks take observations as they are.
SHARED = f"""
    ~recipe total_env_steps=4000 algo.gamma={GAMMA} algo.hidden_sizes=[32]
    algo.normalize_obs=false algo.normalize_reward=false algo.learning_rate_schedule=constant
"""
# Values at which an algorithm learns in a second, by the type of its configuration. SAC's temperature is low,
# because its values have the entropy in them.
FAST = {
    PPOConfig: "env.num_envs=8 algo.learning_rate=0.003 algo.log_std_init=-2.0",
    OffPolicyConfig: """
        total_env_steps=1000 algo.learning_starts=300 algo.batch_size=64 algo.buffer_size=1000 algo.tau=0.05
        algo.actor_learning_rate=0.01 algo.critic_learning_rate=0.01
        algo.learn_alpha=false algo.alpha_init=0.01
    """,
}

Mistake = Callable[[Any], None]  # changes methods of an algorithm


# Each algorithm with each kind of action that it can choose.
PAIRS = [(algo, "discrete") for algo, entry in ALGORITHMS.items() if not entry.needs_bounded_box]
PAIRS += [(algo, "box") for algo, entry in ALGORITHMS.items() if not entry.needs_discrete]


def configuration(configure: Configure, algo: str, actions: str, probe: str) -> Config:
    """The configuration of an algorithm in a probe environment."""
    own = " ".join(FAST.get(kind, "") for kind in reversed(ALGORITHMS[algo].config.mro()))
    env = f"env.id={probe}-v0", f"+env.kwargs.actions={actions}"
    return configure(*small(algo, *env, *SHARED.split(), *own.split()))


def check(config: Config, *mistakes: Mistake) -> None:
    """Train for `total_env_steps`, and assert that values and actions are near the known ones.

    An algorithm without a network called "value" is asked for its actions alone.
    """
    probe = PROBES[config.env.id.removesuffix("-v0")](**config.env.kwargs)
    algorithm, _ = build(config)
    try:
        for mistake in mistakes:
            mistake(algorithm)
        if "value" not in (forward_passes_of(algorithm) or {}) and not probe.action_matters:
            pytest.skip("the algorithm has no network called value")
        while algorithm.env_steps < config.total_env_steps:
            algorithm.train_iteration()
        errors, losses = answers(algorithm, probe)
    finally:
        algorithm.close()
    assert max(losses) <= TOLERANCE, f"actions earn less than they could, by {losses}"
    assert max(errors, default=0.0) <= TOLERANCE, f"values are wrong, by {errors}"


def answers(algorithm: Algorithm, probe: ProbeEnv) -> tuple[list[float], list[float]]:
    """For each cue, the largest error of a value of its observation, and the return that the action loses."""
    obs = np.array([[cue, 0.0] for cue in probe.cues], np.float32)
    action = algorithm.act(obs)
    pairs = list(zip(probe.cues, action, strict=True))
    losses = [probe.best_return(cue) - probe.episode_return(cue, each) for cue, each in pairs]
    if (passed := (forward_passes_of(algorithm) or {}).get("value")) is None:
        return [], losses
    known = torch.tensor([[probe.value(cue, GAMMA)] for cue in probe.cues])
    return (values_of(passed, obs, action) - known).abs().amax(1).tolist(), losses


def values_of(passed: ForwardPass, obs: np.ndarray, action: np.ndarray) -> Tensor:
    """The values (B, estimates) of observations (B, O) under the actions (B, A).

    A network takes observations, or observations and actions in a row, or observations and a memory, which
    is 0 at the start of an episode. It returns one value, several estimates of it, or, if actions are
    integers, the value of each of the two actions.
    """
    rows = np.concatenate([obs, action], 1)
    if passed.size != rows.shape[1]:
        rows = np.pad(obs, ((0, 0), (0, passed.size - obs.shape[1])))
    with torch.no_grad():
        values = passed.network(torch.from_numpy(rows.astype(np.float32)).to(DEVICE)).cpu()
    values = values.reshape(len(obs), -1)
    each_action = action.dtype.kind == "i" and values.shape[1] == 2
    return values.gather(1, torch.from_numpy(action)) if each_action else values


# Where actions change nothing, one kind of them is enough.
TRIED = [
    (algo, actions, probe) for algo, actions in PAIRS for probe in PROBES if PROBES[probe].action_matters
]
TRIED += [
    (*each, probe) for each in dict(PAIRS).items() for probe in PROBES if not PROBES[probe].action_matters
]


@pytest.mark.parametrize(("algo", "actions", "probe"), TRIED)
def test_values_and_actions_become_the_known_ones(
    configure: Configure, algo: str, actions: str, probe: str
) -> None:
    check(configuration(configure, algo, actions, probe))


# The inverse: with a mistake, the same check fails.


def changed(algorithm: Any, method: str, change: Callable[..., tuple[Any, ...]]) -> None:
    """Let `change` replace the arguments of a method."""
    original = getattr(algorithm, method)
    setattr(algorithm, method, lambda *arguments: original(*change(*arguments)))


def no_discount(algorithm: Any) -> None:
    """Later rewards count as much as the next one."""
    algorithm.config = replace(algorithm.config, gamma=1.0)


def no_terminations(ppo: Any) -> None:
    """Values follow a termination."""
    changed(
        ppo,
        "targets",
        lambda flat, rollout, reward: (flat, rollout._replace(terminated=torch.zeros_like(reward)), reward),
    )


def only_terminations(ppo: Any) -> None:
    """Truncations count as terminations."""

    def change(flat: Tensor, rollout: Any, reward: Tensor) -> tuple[Any, ...]:
        done = torch.maximum(rollout.terminated, rollout.truncated)
        return flat, rollout._replace(terminated=done), reward

    changed(ppo, "targets", change)


def rows_of_others(ppo: Any) -> None:
    """The observations of a minibatch are in another order than its returns."""
    changed(ppo, "update", lambda net, mb, coef: (net, mb._replace(obs=mb.obs.roll(1, 0)), coef))


def wrong_sign(ppo: Any) -> None:
    """The policy follows the negative advantage; returns, which are advantage and value, stay right."""

    def change(net: Any, mb: Any, coef: Any) -> tuple[Any, ...]:
        ret = mb.advantage + mb.value
        return net, mb._replace(advantage=-mb.advantage, value=ret + mb.advantage), coef

    changed(ppo, "update", change)


def next_reward_alone(ppo: Any) -> None:
    """Advantages are of the next reward alone; returns, from which values are learned, stay right."""
    targets = ppo.targets

    def cut(flat: Tensor, rollout: Any, reward: Tensor) -> Any:
        right = targets(flat, rollout, reward)
        advantage = reward - right.value
        return right._replace(advantage=advantage, value=right.advantage + right.value - advantage)

    ppo.targets = cut


def sac_no_terminations(sac: Any) -> None:
    """Values follow a termination."""

    def change(learned: Any, inputs: Any, rates: Any) -> tuple[Any, ...]:
        batch = inputs.batch._replace(terminated=torch.zeros_like(inputs.batch.terminated))
        return learned, inputs._replace(batch=batch), rates

    changed(sac, "update", change)


def sac_wrong_sign(sac: Any) -> None:
    """The policy goes where the critics are low."""
    actor_loss = sac.actor_loss

    def negative(*arguments: Any) -> tuple[Tensor, Any]:
        loss, further = actor_loss(*arguments)
        return -loss, further

    sac.actor_loss = negative


@pytest.mark.parametrize(
    ("algo", "probe", "mistake", "message"),
    [
        ("ppo", "Value", no_terminations, "values"),
        ("ppo", "Discount", no_discount, "values"),
        ("ppo", "Truncation", only_terminations, "values"),
        ("ppo", "Observation", rows_of_others, "values"),
        ("ppo", "Action", wrong_sign, "actions"),
        ("ppo", "Credit", next_reward_alone, "actions|values"),
        ("sac", "Value", sac_no_terminations, "values"),
        ("sac", "Action", sac_wrong_sign, "actions"),
    ],
)
def test_a_mistake_is_noticed(
    configure: Configure, algo: str, probe: str, mistake: Mistake, message: str
) -> None:
    actions = "box" if ALGORITHMS[algo].needs_bounded_box else "discrete"
    with pytest.raises(AssertionError, match=f"^({message}) "):
        check(configuration(configure, algo, actions, probe), mistake)


def no_values(algorithm: Any) -> None:
    """No network that checks could ask."""
    algorithm.forward_passes = dict


def test_without_values_the_actions_decide(configure: Configure) -> None:
    config = configuration(configure, "ppo", "discrete", "Credit")
    check(config, no_values)
    with pytest.raises(AssertionError, match=r"^actions "):
        check(config, no_values, wrong_sign)
    with pytest.raises(pytest.skip.Exception):
        check(configuration(configure, "ppo", "discrete", "Value"), no_values)


def test_of_a_value_for_each_action_the_chosen_one_counts() -> None:
    of_each = ForwardPass(lambda rows: torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 2, ())
    values = values_of(of_each, np.zeros((2, 2), np.float32), np.array([[1], [0]]))
    assert values.tolist() == [[2.0], [3.0]]
