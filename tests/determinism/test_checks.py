"""Rows on their own where the level says so, checks that can tell, and the way `blas` beside torch's own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Configure, small
from torch import Tensor, nn

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.determinism import kernels
from rltemplate.determinism.checks import Trial, check_repeats, check_rows
from rltemplate.learning.networks import mlp
from rltemplate.train import build_algorithm
from rltemplate.types import ConfigError, ForwardPass

CPU = torch.device("cpu")
Network = Callable[[Tensor], Tensor]
ELEMENTARY = ("exp", "log", "sqrt", "tanh")


@pytest.fixture(autouse=True)
def plain_afterwards() -> Iterator[None]:
    yield
    kernels.use("plain")


def tried(configure: Configure, network: Network, products: str = "padded") -> Trial:
    passes = {"policy": ForwardPass(network, 3, (4,))}
    return Trial(configure("determinism=invariant").determinism, passes, CPU, products, physics=False)


@pytest.mark.parametrize("products", ["padded", "tiled"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_rows_are_on_their_own_with_filled_up_batches_and_not_without(
    configure: Configure, algo: str, products: str
) -> None:
    algorithm, _ = build_algorithm(configure(*small(algo, "algo.hidden_sizes=[256,256]", env="Pendulum")))
    level = configure("determinism=invariant").determinism
    trial = Trial(level, algorithm.forward_passes(), CPU, products, physics=False)
    kernels.use(products)
    assert set(check_rows(trial)["networks"]) == set(trial.passes)
    kernels.use("plain")
    if hasattr(ALGORITHMS[algo].config, "hidden_sizes"):
        with pytest.raises(ConfigError, match=r"gives a row other bits in a batch of \d+ rows on"):
            check_rows(trial)
    algorithm.close()


def test_a_sum_has_one_order_where_the_level_asks_for_it() -> None:
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    sums: dict[str, set[float]] = {"plain": set(), "padded": set()}
    for products, seen in sums.items():
        kernels.use(products)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            seen.add(kernels.total(x).item())
    torch.set_num_threads(before)
    assert len(sums["padded"]) == 1
    assert len(sums["plain"]) == 2, "torch's own sum depends on the number of threads"
    assert sums["padded"].pop() == pytest.approx(x.double().sum().item(), rel=1e-4)


def test_a_network_that_does_not_repeat_is_found(configure: Configure) -> None:
    calls = iter(range(1000))

    def drifting(rows: Tensor) -> Tensor:
        return rows + next(calls) * 1e-6

    with pytest.raises(ConfigError, match="the policy network gives different bits for equal inputs"):
        check_repeats(tried(configure, drifting))
    assert check_repeats(tried(configure, lambda rows: rows * 2))["holds"]


def test_a_network_that_looks_at_its_neighbours_is_found(configure: Configure) -> None:
    def centred(rows: Tensor) -> Tensor:
        return rows - rows.mean(0)

    assert check_rows(tried(configure, torch.tanh))["holds"]
    for products, instead in (("padded", "determinism.products=blas"), ("blas", "determinism=repeat")):
        with pytest.raises(ConfigError, match=rf"other bits in a batch of \d+ rows on .*; use {instead}"):
            check_rows(tried(configure, centred, products))


def numbers(*shape: int, double: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(shape, generator=generator, dtype=torch.float64 if double else torch.float32)


def values_and_gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = net(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *net.parameters()])]


def in_both_ways(compute: Callable[[], list[Tensor]], products: str = "blas") -> list[tuple[Tensor, Tensor]]:
    """Pairs of results of `compute`, in the way `plain` and another, which stays in force."""
    kernels.use("plain")
    plain = compute()
    kernels.use(products)
    return list(zip(plain, compute(), strict=True))


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("rows", [1, 8, 9, 305, 700])
def test_networks_and_their_gradients_agree_with_torch(activation: str, rows: int) -> None:
    """Rows that were filled up leave no trace in what is learned."""
    ways = itertools.product(("blas", "padded", "tiled"), ((False, 2e-5), (True, 1e-12)))
    for products, (double, close) in ways:
        net = mlp((11, 40, 33, 3), activation, torch.Generator().manual_seed(3))
        net = net.double() if double else net
        x = numbers(rows, 11, double=double)
        for plain, ours in in_both_ways(partial(values_and_gradients, net, x), products):
            assert ours.shape == plain.shape
            assert ours.dtype == plain.dtype
            scale = plain.abs().max().item()
            assert torch.allclose(ours, plain, rtol=0.0, atol=close * max(scale, 1e-3))


@pytest.mark.parametrize("name", ELEMENTARY)
def test_elementary_functions_agree_with_torch(name: str) -> None:
    function: Callable[[Tensor], Tensor] = getattr(kernels, name)
    for double in (False, True):
        base = numbers(30, 14, double=double).abs() + 0.1
        for x in (base, base.T, base[:, ::3], base[2, 2], base[:1].expand(5, 14), base[:0]):

            def compute(x: Tensor = x) -> list[Tensor]:
                leaf = x.detach().requires_grad_()
                y = function(leaf)
                assert torch.equal(function(x), y.detach()), "the gradient changes the value"
                return [y.detach(), *torch.autograd.grad(y.sum(), leaf)]

            for plain, ours in in_both_ways(compute):
                assert ours.shape == plain.shape == x.shape
                assert torch.allclose(ours, plain, rtol=1e-6, atol=1e-14 if double else 2e-7)
                assert ours.dtype == plain.dtype
    assert torch.autograd.gradcheck(function, [(numbers(9, double=True).abs() + 0.1).requires_grad_()])


def test_infinities_are_no_errors() -> None:
    x = torch.tensor([-torch.inf, -1.0, 0.0, 200.0, torch.inf, torch.nan])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plain, ours in in_both_ways(lambda: [getattr(kernels, name)(x) for name in ELEMENTARY]):
            assert torch.equal(plain.isnan(), ours.isnan())
            assert torch.allclose(plain.nan_to_num(), ours.nan_to_num())
        assert mlp((6, 20, 2), "tanh", torch.Generator())(x[None]).isnan().all()


def train(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/train.py"), *words, "logger=none", "video_every=0"]
    # Two threads that wait for each other by spinning take minutes where another program has their core.
    patient = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | environment
    return subprocess.run([*command, f"run_dir={folder}"], env=patient, capture_output=True, text=True)


def first_ratios(folder: Path) -> set[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {json.loads(line)["policy/first_ratio_max_error"] for line in lines}


def test_the_first_ratio_is_exactly_one_at_invariant_and_not_at_repeat(tmp_path: Path) -> None:
    """Rollouts with two rows, updates with other numbers of rows."""
    words = ["algo=ppo", "env=CartPole", "env.num_envs=2", "algo.num_steps=64", "algo.num_minibatches=2"]
    words += ["total_env_steps=640", "log_every=1", "eval_every=0"]
    for threads in (1, 2):
        done = train(tmp_path / f"{threads}", *words, "determinism=invariant", f"num_threads={threads}")
        assert done.returncode == 0, done.stderr
        assert first_ratios(tmp_path / f"{threads}") == {0.0}
    assert train(tmp_path / "repeat", *words).returncode == 0
    assert max(first_ratios(tmp_path / "repeat")) > 0.0
