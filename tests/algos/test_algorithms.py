"""What holds for every algorithm: each environment, acting, state. A new one is tested unasked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ON_LEARNING, ROOT, SHRUNK, TRIED_IN, Configure, Programs, build, env_config, small
from gymnasium import spaces
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map_only

from rltemplate.algos.ppo_config import PPOConfig
from rltemplate.learning.algorithm import StatefulAlgorithm, columns_mean
from runlab.config.fit import check_actions
from runlab.config.loading import to_dict, to_yaml
from runlab.config.project import ALGORITHMS
from runlab.engine import Engine
from runlab.envs.codec import FlatCodec
from runlab.envs.global_rng import seed_global_rng
from runlab.envs.images import image_shape
from runlab.envs.make import codec_of
from runlab.errors import ConfigError
from runlab.interfaces import Algorithm, attach_probe
from runlab.rerun.policy import load_policy
from runlab.run.checkpoint import Checkpoints
from runlab.run.paths import CONFIG, TRACE
from runlab.run.trace import TraceWriter, entries

ENVS = [f"env={path.stem}" for path in sorted((ROOT / "conf" / "env").glob("[A-Z]*.yaml"))]
ENVS.append("env.id=FrozenLake-v1")  # with observations of a Discrete space


# Of PPO's relatives, which take what PPO takes, one environment of each kind of observation and action.
KINDS = ["env=CartPole", "env=Pendulum", "env=Catch", "env.id=FrozenLake-v1"]


@pytest.mark.parametrize(
    ("algo", "env"),
    [
        (algo, env)
        for algo, entry in ALGORITHMS.items()
        for env in (ENVS if PPOConfig not in entry.config.mro()[1:] else KINDS)
    ],
)
def test_every_pair_trains_for_one_iteration_or_is_refused(configure: Configure, algo: str, env: str) -> None:
    config = configure(f"algo={algo}", env, *SHRUNK[algo])
    if module := config.env.id.rpartition(":")[0]:
        pytest.importorskip(module)
    made = gym.make(config.env.id, **config.env.kwargs)
    entry, discrete = ALGORITHMS[algo], isinstance(made.action_space, spaces.Discrete)
    if (entry.needs_bounded_box and discrete) or (entry.needs_discrete and not discrete):
        with pytest.raises(ConfigError, match=f"algo={algo} needs "):
            build(config)
        return
    if image_shape(made.observation_space) and not entry.takes_images:
        with pytest.raises(
            ConfigError, match=f"algo={algo} takes no images, .* use algo=.*ppo.*, or plain numbers"
        ):
            build(config)
        return
    algorithm, _ = build(config)
    before = flat_tensors(algorithm)
    result = algorithm.train_iteration()
    after = flat_tensors(algorithm)
    assert algo not in ON_LEARNING or "optim/learning_rate" in result.metrics
    assert all(metric.dim() == 0 and not metric.requires_grad for metric in result.metrics.values())
    assert all(bool(torch.isfinite(metric)) for metric in result.metrics.values())
    learned = [name for name in before if algo not in ON_LEARNING or name.endswith("/params")]
    assert any(not torch.equal(before[name], after[name]) for name in learned)
    algorithm.close()


def test_an_algorithm_for_discrete_actions_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(ALGORITHMS["ppo"], needs_discrete=True)
    monkeypatch.setitem(ALGORITHMS, "discrete", entry)
    check_actions("discrete", codec_of(env_config("CartPole-v1")))
    with pytest.raises(ConfigError, match="algo=discrete needs Discrete actions, and Pendulum-v1 has Box"):
        check_actions("discrete", codec_of(env_config("Pendulum-v1")))
    several = FlatCodec("Several", spaces.Box(-1.0, 1.0), spaces.MultiDiscrete([5, 2]))
    with pytest.raises(ConfigError, match="needs Discrete actions, and Several has MultiDiscrete"):
        check_actions("discrete", several)


def flat_tensors(algorithm: Algorithm) -> dict[str, torch.Tensor]:
    """All that an algorithm saves, by its place in the state."""
    saved = entries(algorithm.state_dict(), "")
    return {
        path: value.cpu() if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())
        for path, value in saved
    }


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_seed_decides_everything_and_acting_changes_nothing(configure: Configure, algo: str) -> None:
    """Another seed does, or the comparison could not fail."""
    runs = []
    for seed, acts in ((3, False), (3, True), (4, False)):
        words = [f"algo={algo}", f"env={TRIED_IN[algo]}", *SHRUNK[algo], f"seed={seed}"]
        seed_global_rng(seed)  # as a run does: networks of torch draw their weights there
        algorithm, envs = build(configure(*words))
        algorithm.train_iteration()
        if acts:
            algorithm.act(np.zeros((5, envs.codec.obs_size), np.float32))
        for _ in range(2):
            algorithm.train_iteration()
        runs.append(flat_tensors(algorithm))
        algorithm.close()
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert any(not torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


@pytest.mark.long
@pytest.mark.parametrize("algo", ON_LEARNING)
def test_compiled_updates_repeat_show_the_same_items_and_are_near_the_plain_ones(
    configure: Configure, tmp_path: Path, algo: str, programs: Programs
) -> None:
    states, items, start = [], [], {}
    for number, compiles in enumerate(("false", "true", "true")):
        config = configure(*small(algo, f"compile={compiles}", env=TRIED_IN[algo]))
        algorithm, _ = build(config)
        start = flat_tensors(algorithm)
        (tmp_path / str(number)).mkdir()
        trace = TraceWriter(tmp_path / str(number), "step", algo)
        attach_probe(algorithm, trace)
        trace.begin(algorithm)
        trace.end(algorithm, algorithm.train_iteration().metrics)
        trace.lines.close()
        lines = map(json.loads, (tmp_path / str(number) / TRACE).read_text().splitlines()[1:])
        items.append([line if line[0] == "items" else line[:2] for line in lines])
        assert bool(programs()) == config.compile
        states.append(flat_tensors(algorithm))
        algorithm.close()
    # The others have the updates of these. A fork's own may be such that torch caches none.
    if algo in ("ppo", "sac"):
        assert counters["aot_autograd"]["autograd_cache_bypass"] == 0, "every run would compile it anew"
    assert items[0] == items[1] == items[2]
    plain, first, second = states
    assert all(torch.equal(first[name], second[name]) for name in first)
    learned = [name for name in start if plain[name].is_floating_point()]
    moved = max(float((plain[name] - start[name]).abs().max()) for name in learned)
    apart = max(float((plain[name] - first[name]).abs().max()) for name in learned)
    assert apart < 1e-2 * moved


@pytest.mark.parametrize("algo", ON_LEARNING)
def test_nothing_waits_for_a_value_while_it_learns(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, algo: str
) -> None:
    """Such as `.item()`, `if tensor`, or a number from the CPU in between: a GPU would stand still.

    Tensors on the device "meta" have shapes, and values that nobody can read.
    """
    calls: list[tuple[Callable[..., Any], Any]] = []

    def recorded(engine: Engine, function: Callable[..., Any], *arguments: Any) -> Any:
        calls.append((function, arguments))
        return function(*arguments)

    monkeypatch.setattr(Engine, "run", recorded)
    algorithm, _ = build(configure(*small(algo, "algo.policy_delay=2", env=TRIED_IN[algo])))
    algorithm.train_iteration()
    algorithm.close()
    assert {function.__name__ for function, _ in calls} >= {"policy_step", "update"}
    for function, arguments in calls:
        unreadable = tree_map_only(torch.Tensor, lambda x: x.to("meta"), arguments)
        results = tree_leaves(function(*unreadable))
        assert {x.device.type for x in results} == {"meta"}
    with pytest.raises(RuntimeError):  # that it would be noticed
        results[0].sum().item()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_saved_policy_acts_like_the_live_one(configure: Configure, tmp_path: Path, algo: str) -> None:
    """Observation statistics are part of the policy; without them its parameters must differ."""
    config = configure(*small(algo, "algo.normalize_obs=true", env=TRIED_IN[algo]))
    algorithm, envs = build(config)
    for _ in range(3):
        algorithm.train_iteration()
    (tmp_path / CONFIG).write_text(to_yaml(config))
    state = algorithm.state_dict()
    Checkpoints(tmp_path, to_dict(config), 1).save(algorithm.env_steps, state, None)
    obs = np.linspace(-2, 2, 4 * envs.codec.obs_size, dtype=np.float32).reshape(4, -1)
    live = algorithm.act(obs)
    _, saved, _ = load_policy(tmp_path)
    np.testing.assert_allclose(saved.act(obs), live, rtol=1e-6, atol=1e-7)
    if "obs_norm" in state:
        state["obs_norm"] = {**state["obs_norm"], "mean": state["obs_norm"]["mean"] + 1.0}
        assert isinstance(algorithm, StatefulAlgorithm)
        before = algorithm.policy(algorithm.to_device(obs))
        algorithm.load_state_dict(state)
        assert not torch.allclose(algorithm.policy(algorithm.to_device(obs)), before)
    algorithm.close()
    saved.close()


def test_a_further_metric_changes_no_mean_of_another() -> None:
    """Or a comparison with a run from before would begin with metrics that nobody changed."""
    table = torch.randn(320, 9, generator=torch.Generator().manual_seed(0))
    fewer = table[:, :7].contiguous()
    assert torch.equal(columns_mean(fewer), columns_mean(table)[:7])
    assert not torch.equal(fewer.mean(0), table.mean(0)[:7])  # as torch adds
