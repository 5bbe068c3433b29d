"""The choice of experts, and its replay. What an iteration computes is in test_references.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Configure, build, small
from torch import Tensor
from torch.nn import functional as F

from rltemplate.algos import ppo_moe
from rltemplate.algos.ppo import PPO
from rltemplate.algos.ppo_moe import OWN_CHOICE, PPOMoE, Routing, balance, largest, loads, rounded
from rltemplate.learning.on_policy import Rollout, shuffled
from rltemplate.learning.optim import gradient
from runlab.analysis.traces import first_difference, open_trace
from runlab.determinism import kernels
from runlab.errors import ConfigError
from runlab.run.trace import TraceWriter

LOW = "algo.rollout_dtype=bfloat16"
# 1,024 samples from a policy whose actions depend on its experts: at its start the last layer hides them.
LARGE = "env.num_envs=8", "algo.num_steps=128", "algo.update_epochs=1"


def moe(configure: Configure, *words: str, env: str = "Pendulum") -> PPOMoE:
    """The algorithm in an environment."""
    algorithm = build(configure(*small("ppo_moe", *words, env=env)))[0]
    assert isinstance(algorithm, PPOMoE)
    return algorithm


def weights(ppo: PPOMoE, params: Tensor) -> dict[str, Tensor]:
    """Views of a vector of parameters, by name."""
    named = dict(ppo.net.module.named_parameters())
    parts = params.split([p.numel() for p in named.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(named.items(), parts, strict=True)}


def changed(ppo: PPOMoE, **scales: float) -> Tensor:
    """The parameters with weights that are multiplied, by the layer of the policy."""
    params = ppo.state.net.params.clone()
    for layer, scale in scales.items():
        weights(ppo, params)[f"actor.{layer}.0.weight"].mul_(scale)
    return params


def with_large_head(ppo: PPOMoE) -> PPOMoE:
    """The last layer has gain 1."""
    params = changed(ppo, head=100.0)
    ppo.state = ppo.state._replace(net=ppo.state.net._replace(params=params))
    return ppo


def rollout_of(ppo: PPO) -> Rollout:
    """The next rollout."""
    with torch.no_grad():
        return ppo.collect(ppo.begin_iteration())


def test_of_equal_logits_the_first_are_chosen_in_ascending_order() -> None:
    for rows in (1, 500):
        assert largest(torch.zeros(rows, 8), 3).unique(dim=0).tolist() == [[0, 1, 2]]
    assert largest(torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]]), 3).tolist() == [[1, 2, 3]]
    logits = torch.randn(100_000, 8, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    stable = logits.sort(dim=-1, descending=True, stable=True).indices[:, :2].sort(-1).values
    assert torch.equal(largest(logits, 2), stable)
    assert not torch.equal(logits.topk(2).indices.sort(-1).values, stable)  # topk takes any of them


def test_replay_of_the_own_choice_changes_no_bit_and_of_another_set_changes_all(configure: Configure) -> None:
    ppo = moe(configure)
    obs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    (own,) = ppo.net.apply(ppo.state.net.params, obs, Routing(), "experts")

    def loss(params: Tensor, experts: Any) -> tuple[Tensor, Tensor]:
        policy, used = ppo.net.apply(params, obs, Routing(experts=experts), "policy", "experts")
        return policy.square().sum(), torch.cat([policy, used], 1)

    grad, results = gradient(loss, ppo.state.net.params, ())
    for experts in own, torch.full_like(own, OWN_CHOICE), torch.where(obs[:, :1] > 0.0, own, OWN_CHOICE):
        again, same = gradient(loss, ppo.state.net.params, experts)
        assert torch.equal(again, grad)
        assert torch.equal(same, results)
    _, others = gradient(loss, ppo.state.net.params, ((own + 1) % 8).sort(-1).values)
    assert (others != results)[:, 0].all()
    ppo.close()


def test_the_set_is_replayed_and_not_its_weights_and_the_router_has_a_gradient(configure: Configure) -> None:
    """Also in the rows of recorded experts that it would not choose."""
    ppo = moe(configure)
    obs, recorded = torch.tensor([[0.3, -0.8, 0.5]]), torch.tensor([[2, 5]])
    for experts in recorded, torch.tensor([[1, 6]]):
        (own,) = ppo.net.apply(ppo.state.net.params, obs, Routing(), "experts")
        assert not torch.equal(own, experts)
        extras = Routing(experts=experts)

        def loss(params: Tensor, extras: Routing) -> tuple[Tensor, Tensor]:
            (policy,) = ppo.net.apply(params, obs, extras, "policy")
            return policy[0, 0], policy

        grad, before = gradient(loss, ppo.state.net.params, extras)
        rows = weights(ppo, grad)["actor.router.0.weight"].abs().sum(1).nonzero().squeeze(1)
        assert rows.tolist() == experts[0].tolist()
        after = ppo.net.apply(changed(ppo, router=2.0), obs, extras, "policy")[0]
        assert not torch.equal(before, after)
    ppo.close()


@pytest.fixture(scope="module")
def first_metrics(configure: Configure) -> dict[str, dict[str, float]]:
    """Metrics of a first iteration whose rollout is in bfloat16, by `replay_routing`; "float32" is not."""
    found = {}
    for replay in ("all", "flipped", "none", "float32"):
        words = (LOW, f"algo.replay_routing={replay}") if replay != "float32" else ()
        ppo = with_large_head(moe(configure, *LARGE, *words))
        metrics = ppo.train_iteration().metrics
        found[replay] = {name: float(value) for name, value in metrics.items()}
        ppo.close()
    return found


def test_replay_removes_the_divergence_of_a_policy_that_acts_in_bfloat16(
    first_metrics: dict[str, dict[str, float]],
) -> None:
    kl = {replay: metrics["policy/rollout_kl"] for replay, metrics in first_metrics.items()}
    flips = {replay: metrics["moe/flip_fraction"] for replay, metrics in first_metrics.items()}
    assert kl["none"] > 1e-4
    assert kl["all"] < kl["none"] / 20
    assert kl["flipped"] == pytest.approx(kl["all"], rel=0.5)
    assert kl["float32"] < 1e-12
    assert flips["all"] == flips["none"] == flips["flipped"] > 0.0 == flips["float32"]
    assert first_metrics["none"]["policy/rollout_extreme"] > 0.0
    assert all(metrics["moe/drift_fraction"] > 0.0 for metrics in first_metrics.values())
    assert all(1.0 < metrics["moe/load_max"] <= 4.0 for metrics in first_metrics.values())


def test_flips_are_replayed_and_others_follow_the_router(configure: Configure) -> None:
    ppo = with_large_head(moe(configure, *LARGE, "algo.replay_routing=flipped", "algo.rollout_bits=3"))
    given: list[Rollout] = []
    log_ratio = ppo.log_ratio

    def noted(params: Tensor, rollout: Rollout) -> Tensor:
        given.append(rollout)
        return log_ratio(params, rollout)

    ppo.log_ratio = noted  # type: ignore[method-assign]
    rollout = rollout_of(ppo)
    ppo.collect = lambda obs: rollout  # type: ignore[method-assign]
    obs, recorded = rollout.normalized_obs.flatten(0, 1), rollout.extras[1].flatten(0, 1)
    (own,) = ppo.net.apply(ppo.state.net.params, obs, Routing(), "experts")
    flipped = (own != recorded).any(1)
    ppo.train_iteration()
    experts = given[0].extras[1].flatten(0, 1)
    assert 0 < int(flipped.sum()) < len(flipped) / 2
    assert torch.equal(experts[flipped], recorded[flipped])
    assert (experts[~flipped] == OWN_CHOICE).all()
    # With a router that has learned something else.
    params = changed(ppo, router=-1.0)
    (used,) = ppo.net.apply(params, obs, Routing(experts=experts), "experts")
    (own,) = ppo.net.apply(params, obs, Routing(), "experts")
    assert torch.equal(used[flipped], recorded[flipped])
    assert torch.equal(used[~flipped], own[~flipped])
    assert (own != recorded).any(1).all()
    ppo.close()


@pytest.mark.parametrize("fp32_head", [True, False])
def test_acting_in_bfloat16_casts_torso_router_and_experts_and_leaves_the_head(
    configure: Configure, fp32_head: bool
) -> None:
    ppo = with_large_head(
        moe(configure, LOW, f"algo.fp32_head={fp32_head}".lower(), "algo.hidden_sizes=[16,8]")
    )
    obs = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    of, low = weights(ppo, ppo.state.net.params), torch.bfloat16

    def layer(x: Tensor, name: str, kind: torch.dtype = low) -> Tensor:
        return F.linear(x.to(kind), *(of[f"actor.{name}.0.{each}"].to(kind) for each in ("weight", "bias")))

    x = layer(obs, "torso").tanh()
    logits, outputs = layer(x, "router").float(), layer(x, "experts").tanh().view(30, 8, 8)
    chosen = largest(logits, 2)
    first, second = (outputs[torch.arange(30), chosen[:, j]] for j in range(2))
    shares = logits.gather(1, chosen).softmax(1)
    mixed = shares[:, :1] * first + shares[:, 1:] * second
    expected = layer(mixed, "head", torch.float32 if fp32_head else low).float()
    with torch.no_grad():
        acted, experts = ppo.net.apply(ppo.state.net.params, obs, Routing(), "act", "experts")
        learned, value = ppo.net.apply(ppo.state.net.params, obs, Routing(), "policy", "value")
        acting_value = ppo.net.apply(ppo.state.net.params, obs, Routing(), "act", "value")[1]
    assert torch.equal(acted[:, :1], expected)
    assert torch.equal(experts, chosen)
    assert (acted != learned)[:, 0].all()
    assert torch.equal(value, acting_value)
    ppo.close()


def test_only_rollouts_have_other_numbers_and_evaluations_choose_themselves(configure: Configure) -> None:
    plain, low = moe(configure), moe(configure, LOW, "algo.rollout_bits=3")
    obs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(low.policy(obs), plain.policy(obs))
    assert not torch.equal(rollout_of(low).action, rollout_of(plain).action)
    assert torch.equal(low.state.net.params, plain.state.net.params)
    plain.close()
    low.close()


def test_rounded_weights_are_those_of_shorter_mantissas() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 20.0
    assert torch.equal(rounded(values, 7), values.bfloat16().float())
    normal = values[(values.abs() > 0.02) & (values.abs() < 400.0)]
    assert torch.equal(rounded(normal, 3), normal.to(torch.float8_e4m3fn).float())
    for bits in (23, 24):
        assert torch.equal(rounded(values, bits), values)
    assert rounded(torch.tensor([0.0, 1.0, 1.25, 1.75, -1.25]), 1).tolist() == [0.0, 1.0, 1.0, 2.0, -1.0]


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_where_rows_are_on_their_own_no_choice_flips(configure: Configure, num_envs: int) -> None:
    """What a level promises about rows is tried in test_checks.py."""
    ppo = with_large_head(moe(configure, f"env.num_envs={num_envs}", "algo.num_steps=128", env="Hopper"))
    params, apart = ppo.state.net.params, {}
    for products in ("padded", "plain"):
        kernels.use(products)
        rollout = rollout_of(ppo)
        torch.set_num_threads(2)
        with torch.no_grad():
            apart[products] = float(ppo.log_ratio(params, rollout).abs().max())
            flips = ppo.changed(params, rollout.normalized_obs, rollout.extras[1])
        torch.set_num_threads(1)
        assert not flips.any()
    ppo.close()
    assert apart["padded"] == 0.0
    assert num_envs > 1 or apart["plain"] > 0.0


def test_shuffled_extras_stay_with_their_samples() -> None:
    index = torch.arange(12)
    experts = torch.stack([index, index + 100], 1)
    data: tuple[Any, ...] = index.float()[:, None], Routing(experts=experts)
    obs, (_, moved) = shuffled(data, torch.randperm(12, generator=torch.Generator().manual_seed(0)), 3)
    assert moved.shape == (3, 4, 2)
    assert torch.equal(moved[..., 0], obs[..., 0].long())
    assert torch.equal(moved[..., 1], obs[..., 0].long() + 100)
    assert not torch.equal(obs.flatten(), index.float())


def test_another_choice_is_the_first_difference_that_a_comparison_names(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the mean that it changes."""
    for name, at in (("plain", None), ("other", 40)):
        (tmp_path / name).mkdir()
        ppo, calls = moe(configure, "algo.num_steps=64"), iter(range(10_000))

        def chosen(logits: Tensor, count: int, at: int | None = at, calls: Iterator[int] = calls) -> Tensor:
            return largest(-logits if next(calls) == at else logits, count)

        monkeypatch.setattr(ppo_moe, "largest", chosen)
        trace = TraceWriter(tmp_path / name, "step", "ppo_moe")
        ppo.probe = trace
        trace.begin(ppo)
        trace.end(ppo, ppo.train_iteration().metrics)
        trace.lines.close()
        ppo.close()
    monkeypatch.undo()
    difference = first_difference(*(open_trace(tmp_path / name, "") for name in ("plain", "other")))
    assert difference is not None
    assert (difference.index, difference.item.partition("#")[0]) == (40, "extras/experts")


def test_the_balance_is_one_for_even_loads_and_largest_where_few_get_all() -> None:
    even, few = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]]), torch.tensor([[0, 1]] * 4)
    assert loads(even, 8).tolist() == [1 / 8] * 8
    assert float(balance(loads(even, 8), torch.randn(4, 8))) == pytest.approx(1.0)
    logits = torch.tensor([[50.0, 50.0, *[0.0] * 6]] * 4)
    assert float(balance(loads(few, 8), logits)) == pytest.approx(4.0)
    logits = torch.randn(
        6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    load = loads(largest(logits, 2), 5).double()
    assert torch.autograd.gradcheck(lambda x: balance(load, x), logits)


def test_one_expert_is_a_dense_layer_and_learns_what_ppo_learns(configure: Configure) -> None:
    # The norm of its gradient has further terms, all 0, and is therefore not used.
    shared = "~recipe", "algo.max_grad_norm=1e9", "algo.num_experts=1", "algo.num_chosen=1"
    dense: Any = build(configure(*small("ppo", *shared, env="Pendulum")))[0]
    ppo = moe(configure, *shared)
    ours, theirs = rollout_of(ppo), rollout_of(dense)
    assert torch.equal(ours.action, theirs.action)
    for _ in range(2):
        dense.train_iteration()
        ppo.train_iteration()
    of = weights(ppo, ppo.state.net.params)
    own = torch.cat([each.flatten() for name, each in of.items() if "router" not in name])
    torch.testing.assert_close(own, dense.state.net.params, rtol=1e-5, atol=1e-6)
    dense.close()
    ppo.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algo.num_chosen=9", r"algo.num_chosen=9: must be at most algo.num_experts=8"),
        ("algo.rollout_bits=0", r"algo.rollout_bits=0: must be at least 1 and at most 22"),
        ("algo.rollout_bits=23", r"algo.rollout_bits=23: must be at least 1 and at most 22"),
        ("algo.replay_routing=some", r"algo.replay_routing=some: .*allowed: all, flipped, none"),
        (f"{LOW} determinism=profile", r"algo.rollout_dtype=bfloat16: not with determinism.products=blas, "),
        (f"{LOW} determinism=invariant determinism.products=blas", r"algo.rollout_dtype=bfloat16: not with "),
    ],
)
def test_values_that_cannot_work_are_refused(configure: Configure, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{message}"):
        configure("algo=ppo_moe", *words.split())
    configure("algo=ppo_moe", "determinism=profile", "algo.num_chosen=8", "algo.rollout_bits=22")


def test_a_first_ratio_of_one_is_asked_for_only_where_acting_and_learning_are_the_same(
    configure: Configure,
) -> None:
    for words, same in (((), True), ((LOW,), False), (("algo.rollout_bits=3",), False)):
        assert configure("algo=ppo_moe", *words).algo.acts_as_it_learns() is same
    assert configure("algo=sac").algo.acts_as_it_learns()
