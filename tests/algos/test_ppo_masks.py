"""PPO takes allowed actions only, in rollouts, evaluations and films, and its update has the same masks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, Configure, Programs, build, run_train, small
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical

from rltemplate.algos import ppo as ppo_module
from rltemplate.algos.ppo import PPO, ActorCritic, PPOExtras
from rltemplate.learning.distributions import Categorical
from rltemplate.learning.on_policy import Rollout, RolloutStep
from runlab.__main__ import main
from runlab.config.project import ALGORITHMS
from runlab.envs.make import make_env
from runlab.errors import ConfigError
from runlab.interfaces import Probe, act_of
from runlab.rerun.policy_file import export_policy
from runlab.run.evaluation import evaluate
from runlab.run.trace import digest, entries, named_leaves

NVEC = [4, 2, 3]
MASKED = {"Taxi": ["env.id=Taxi-v4", "env.infos=[action_mask]"], "Dict": ["env.id=Steps-v0"]}


class Steps(gym.Env[Any, Any]):
    """Shows position and mask as a Dict, and refuses forbidden actions. Without `masked` it allows all.

    `shown=False` shows no mask at all.
    """

    def __init__(self, masked: bool = True, shown: bool = True) -> None:
        self.action_space, self.masked, self.shown = spaces.MultiDiscrete([3, 2]), masked, shown
        place = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        parts = {"action_mask": spaces.MultiBinary(5), "place": place}
        self.observation_space: spaces.Space[Any] = spaces.Dict(parts) if shown else place

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        if not (self.mask[:3][action[0]] and self.mask[3:][action[1]]):
            raise ValueError(f"{action} is forbidden")
        self.steps += 1
        return self._obs(), float(action[0]), self.steps == 9, False, {}

    def _obs(self) -> Any:
        free = self.np_random.integers(3), 3 + self.np_random.integers(2)
        self.mask = np.isin(np.arange(5), free) | (self.np_random.random(5) < 0.3) | (not self.masked)
        place = self.np_random.standard_normal(2).astype(np.float32)
        return {"action_mask": self.mask.astype(np.int8), "place": place} if self.shown else place


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    gym.register("Steps-v0", entry_point="test_ppo_masks:Steps")
    yield
    gym.registry.pop("Steps-v0")


class Decisions(Probe):
    """The decisions and rollouts of an algorithm."""

    def __init__(self) -> None:
        self.steps, self.rollouts = list[RolloutStep](), list[Rollout]()

    def results(self, event: str, values: Any, whole: bool = False) -> None:
        if isinstance(values, RolloutStep):
            self.steps.append(values)
        elif isinstance(values, Rollout):
            self.rollouts.append(values)


def ppo_in(configure: Configure, *words: str) -> tuple[PPO, Decisions]:
    """PPO with a policy that is far from uniform, as one that has learned is."""
    ppo: Any = build(configure(*small("ppo", "env.num_envs=3", "algo.num_steps=40", *words, env="CartPole")))[
        0
    ]
    net = ppo.state.net
    ppo.state = ppo.state._replace(net=net._replace(params=3.0 * net.params))
    ppo.probe = decisions = Decisions()
    return ppo, decisions


def network(config: Any, nvec: list[int]) -> ActorCritic:
    return ActorCritic(config, 3, Categorical(nvec), torch.Generator().manual_seed(0))


def random_masks(rows: int, rng: torch.Generator) -> Tensor:
    """Masks (rows, P) with a choice in each component."""
    parts = []
    for size in NVEC:
        free = torch.randint(size, (rows, 1), generator=rng)
        part = torch.rand(rows, size, generator=rng) < 0.4
        parts.append(part.scatter(1, free, torch.ones(rows, 1, dtype=torch.bool)))
    return torch.cat(parts, 1)


def test_the_distribution_is_the_one_over_allowed_actions(configure: Configure) -> None:
    rng, dist = torch.Generator().manual_seed(1), Categorical(NVEC)
    mask = random_masks(500, rng)
    logits = 4.0 * torch.randn(500, sum(NVEC), generator=rng, dtype=torch.float64)
    net = network(configure("algo=ppo").algo, NVEC)
    masked = net.action_params(logits.requires_grad_(), PPOExtras(mask))
    action = dist.sample(masked.detach(), dist.noise(500, rng))
    log_prob, entropy = dist.log_prob(masked, action), dist.entropy(masked)
    for row in range(500):
        expected_log_prob = expected_entropy = torch.tensor(0.0, dtype=torch.float64)
        for part, allowed, chosen in zip(
            logits[row].split(NVEC), mask[row].split(NVEC), action[row], strict=True
        ):
            assert allowed[chosen]
            alone = TorchCategorical(logits=part[allowed])
            expected_log_prob = expected_log_prob + alone.log_prob(allowed[:chosen].sum())
            expected_entropy = expected_entropy + alone.entropy()
        torch.testing.assert_close(log_prob[row], expected_log_prob, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(entropy[row], expected_entropy, rtol=1e-12, atol=1e-12)
    (log_prob.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[~mask].any()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_forbidden_actions_have_probability_0_whatever_the_network_says(
    configure: Configure, kind: torch.dtype
) -> None:
    rng, dist = torch.Generator().manual_seed(2), Categorical(NVEC)
    mask = random_masks(400, rng)
    logits = torch.where(mask, -1e6, 1e6).to(kind)  # a network that wants what is forbidden
    masked = network(configure("algo=ppo").algo, NVEC).action_params(logits, PPOExtras(mask))
    for part, allowed in zip(masked.split(NVEC, 1), mask.split(NVEC, 1), strict=True):
        probability = part.softmax(1)
        assert not probability[~allowed].any()
        torch.testing.assert_close(probability.sum(1), torch.ones(400, dtype=kind))
    for noise in (torch.zeros(400, 9), torch.ones(400, 9), mask.float(), 1.0 - mask.float()):
        action = dist.sample(masked, noise)
        first = torch.tensor([0, 4, 6])
        assert mask.gather(1, action + first).all()
    assert network(configure("algo=ppo").algo, NVEC).action_params(logits, PPOExtras()) is logits


@pytest.mark.parametrize("env", MASKED)
def test_a_rollout_has_no_forbidden_action_and_the_update_gets_its_masks(
    configure: Configure, env: str
) -> None:
    ppo, decisions = ppo_in(configure, *MASKED[env], "algo.normalize_obs=true")
    first_error = ppo.train_iteration().metrics["policy/first_ratio_max_error"]
    assert float(first_error) < 1e-5
    size = sum(ppo.envs.codec.nvec)
    first = torch.tensor([0, *ppo.envs.codec.nvec[:-1]]).cumsum(0)
    for rollout in decisions.rollouts:
        (mask,) = rollout.extras
        assert mask.dtype == torch.bool
        assert torch.equal(mask, rollout.obs[..., -size:] == 1.0)  # unscaled
        assert 0.2 < float(mask.float().mean()) < 0.9
        assert rollout.normalized_obs.shape[-1] == ppo.envs.codec.obs_size - size
        assert mask.gather(2, rollout.action + first).all()
    for step in decisions.steps:
        for part, allowed in zip(
            step.policy.split(ppo.dist.nvec, 1),  # type: ignore[union-attr]
            step.extras[0].split(ppo.dist.nvec, 1),  # type: ignore[union-attr]
            strict=True,
        ):
            assert not part.softmax(1)[~allowed].any()
    names = list(dict(named_leaves(decisions.steps[0])))
    assert names.index("extras/action_mask") < names.index("policy")
    ppo.close()


def test_an_update_without_the_masks_of_its_rollout_shows_in_the_first_ratio(configure: Configure) -> None:
    ppo: Any = ppo_in(configure, *MASKED["Dict"])[0]
    collect = ppo.collect
    ppo.collect = lambda obs: collect(obs)._replace(extras=PPOExtras())
    assert float(ppo.train_iteration().metrics["policy/first_ratio_max_error"]) > 0.5
    ppo.close()


def test_an_algorithm_that_does_not_say_that_it_applies_masks_is_refused(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take forbidden actions, and nothing would show it."""
    config = configure(*small("ppo_moe", "env.id=Taxi-v4", "env.infos=[action_mask]", env="CartPole"))
    build(config)
    for name in ("ppo_moe", "ppo"):
        monkeypatch.setitem(ALGORITHMS, name, replace(ALGORITHMS[name], takes_masks=False))
    with pytest.raises(ConfigError) as refused:
        build(config)
    said, _, use = f"{refused.value}".partition("; use algo=")
    assert said == "algo=ppo_moe applies no masks of actions, and Taxi-v4 has an action_mask"
    assert "ppo_recurrent" in use
    build(configure(*small("ppo_moe", "env.id=Taxi-v4", env="CartPole")))


def test_without_masks_the_same_policy_takes_forbidden_actions(configure: Configure) -> None:
    ppo: Any = ppo_in(configure, *MASKED["Dict"])[0]
    ppo.extras_of = lambda obs: PPOExtras()
    with pytest.raises(ValueError, match="is forbidden"):
        ppo.train_iteration()
    ppo.close()


@pytest.mark.parametrize("env", MASKED)
def test_evaluations_take_allowed_actions_only(configure: Configure, env: str) -> None:
    ppo: Any = ppo_in(configure, *MASKED[env], "env.max_episode_steps=20")[0]
    config = ppo.envs.config

    def forbidden(policy: str = "mode") -> int:
        """Number of forbidden actions of five episodes; `Steps` would raise at the first."""
        wrong, chosen = 0, act_of(ppo, policy)

        def act(obs: np.ndarray, memory: Any, rngs: Any = None) -> tuple[np.ndarray, Any]:
            nonlocal wrong
            action = chosen(obs, memory, rngs)[0]
            if env == "Taxi":
                wrong += int((np.take_along_axis(obs[:, -6:], action, 1) == 0).sum())
            return action, memory

        evaluate(lambda: make_env(config), ppo.envs.codec, act, range(5))
        return wrong

    assert forbidden() == forbidden("sample") == 0
    ppo.extras_of = lambda obs: PPOExtras()
    if env == "Taxi":
        assert forbidden() > 0
    else:
        with pytest.raises(ValueError, match="is forbidden"):
            forbidden()
    ppo.close()


def learned(ppo: PPO) -> dict[str, str]:
    """Digests of all that is learned."""
    state = {path: value for path, value in entries(ppo.state_dict(), "") if "envs" not in path}
    return {path: digest(value) for path, value in state.items() if not path.startswith("/obs/")}


def test_a_mask_that_allows_everything_changes_no_bit(configure: Configure) -> None:
    """So networks and statistics do not see it."""
    words, found = ["env.id=Steps-v0", "+env.kwargs.masked=false", "algo.normalize_obs=true"], []
    for shown in ("true", "false"):
        ppo, _ = ppo_in(configure, *words, f"+env.kwargs.shown={shown}")
        for _ in range(2):
            ppo.train_iteration()
        found.append({path: value for path, value in learned(ppo).items() if path != "/obs"})
        ppo.close()
    assert found[0] == found[1]
    masked, _ = ppo_in(configure, "env.id=Steps-v0", "algo.normalize_obs=true")
    masked.train_iteration()
    masked.train_iteration()
    assert learned(masked)["/net/params"] != found[0]["/net/params"]
    masked.close()


@pytest.mark.parametrize("env", MASKED)
def test_a_resumed_run_has_the_masks_of_the_running_episodes(configure: Configure, env: str) -> None:
    straight, again, other = (ppo_in(configure, *MASKED[env])[0] for _ in range(3))
    straight.train_iteration()
    state = straight.state_dict()
    again.load_state_dict(state)
    without = state["obs"].clone()
    without[:, -sum(straight.envs.codec.nvec) :] = 0.0  # the first action, whether it is allowed or not
    other.load_state_dict({**state, "obs": without})
    for ppo in (straight, again):
        ppo.train_iteration()
    assert learned(straight) == learned(again)
    if env == "Taxi":  # the other environment refuses the action
        other.train_iteration()
        assert learned(straight) != learned(other)
    for ppo in (straight, again, other):
        ppo.close()


def test_observations_that_allow_nothing_break_no_policy(configure: Configure) -> None:
    """Checks of policies make up observations, which no environment gives."""
    ppo, _ = ppo_in(configure, *MASKED["Dict"])
    obs = np.random.default_rng(0).normal(size=(200, ppo.envs.codec.obs_size)).astype(np.float32)
    obs[:100, -5:] = 0.0
    action = ppo.act(obs)
    assert not action[:100].any()
    allowed = obs[100:, -5:] > 0.5
    some = allowed[:, :3].any(1) & allowed[:, 3:].any(1)
    assert np.take_along_axis(allowed, action[100:] + np.array([0, 3]), 1)[some].all()
    passes = ppo.forward_passes()
    for each in passes.values():
        assert each.network(torch.randn(7, each.size)).isfinite().all()
    ppo.close()


@pytest.mark.long
def test_compiled_updates_have_the_masks_too(configure: Configure, programs: Programs) -> None:
    results = []
    for compiles in ("false", "true"):
        ppo, decisions = ppo_in(configure, *MASKED["Dict"], f"compile={compiles}", "algo.ent_coef=0.1")
        ppo.train_iteration()
        results.append((ppo.state.net.params, decisions.rollouts[-1].action))
        ppo.close()
    assert programs() > 0
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_runs_films_and_policy_files_have_masks(
    fork: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = small("ppo", "env.infos=[action_mask]", "total_env_steps=128", "logger=none", env="Taxi-v4")
    run_dir = tmp_path / "run"
    run_train(fork, tmp_path, *words, "env.max_episode_steps=20", f"run_dir={run_dir}", status=0)
    assert main(["evaluate", f"run={run_dir}", "episodes=2", "json=true"]) == 0
    returns = json.loads(capsys.readouterr().out)["returns"]
    assert main(["film", f"run={run_dir}", "episodes=1", f"out={tmp_path / 'film.mp4'}"]) == 0
    assert float(capsys.readouterr().err.splitlines()[0].rpartition(" ")[2]) == round(returns[0], 1)
    export_policy(run_dir, tmp_path / "taxi.zip")
    assert main(["evaluate", f"policy={tmp_path / 'taxi.zip'}", "episodes=2", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["returns"] == returns


def test_the_variant_of_the_page_gives_its_update_the_temperature_again(configure: Configure) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / "masks.md").read_text(), re.M | re.S)
    scope: dict[str, Any] = {"torch": torch, "nn": torch.nn, "NamedTuple": NamedTuple, **vars(ppo_module)}
    exec(code, scope)
    ppo, _ = ppo_in(configure, *MASKED["Dict"])
    variant: Any = scope["TemperedPPO"](ppo.config, ppo.envs, ppo.streams, 1000, ppo.engine)
    net = variant.state.net
    variant.state = variant.state._replace(net=net._replace(params=3.0 * net.params))
    assert float(variant.train_iteration().metrics["policy/first_ratio_max_error"]) < 1e-5
    collect = variant.collect

    def forgetful(obs: Tensor) -> Rollout:
        rollout: Rollout = collect(obs)
        return rollout._replace(extras=rollout.extras._replace(temperature=()))  # type: ignore[attr-defined]

    variant.collect = forgetful
    assert float(variant.train_iteration().metrics["policy/first_ratio_max_error"]) > 1e-3
    variant.close()
