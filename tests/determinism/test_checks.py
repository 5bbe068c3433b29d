"""A row's result depends on that row alone where the level says so, and the check can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Configure, small

from rltemplate.algos.build import build_algorithm
from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.determinism import kernels, switches
from rltemplate.determinism.checks import Trial, check_repeats, check_rows
from rltemplate.determinism.layers import Elu, Linear, Rows
from rltemplate.determinism.variables import ROW_GROUPS
from rltemplate.types import ConfigError, ForwardPass

CPU = torch.device("cpu")
Network = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def plain_afterwards() -> Iterator[None]:
    yield
    kernels.use("plain")
    kernels.group_rows(0)


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


def test_a_gradient_is_the_gradient_of_the_whole_batch() -> None:
    """Filling up must leave no trace in what is learned."""
    net = Rows(Linear(5, 8), Elu(), Linear(8, 2))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    rows = torch.randn(21, 5, generator=generator)
    gradients = []
    for products in ("plain", "padded", "tiled"):
        kernels.use(products)
        gradients.append(torch.autograd.grad(net(rows).square().sum(), list(net.parameters())))
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, rtol=1e-4, atol=1e-4)


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

    def drifting(rows: torch.Tensor) -> torch.Tensor:
        return rows + next(calls) * 1e-6

    with pytest.raises(ConfigError, match="the policy network gives different bits for equal inputs"):
        check_repeats(tried(configure, drifting))
    assert check_repeats(tried(configure, lambda rows: rows * 2))["holds"]


def test_a_network_that_looks_at_its_neighbours_is_found(configure: Configure) -> None:
    def centred(rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(0)

    assert check_rows(tried(configure, torch.tanh))["holds"]
    for products, instead in (("padded", "determinism.products=blas"), ("blas", "determinism=repeat")):
        with pytest.raises(ConfigError, match=rf"other bits in a batch of \d+ rows on .*; use {instead}"):
            check_rows(tried(configure, centred, products))


def train(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/train.py"), *words, "logger=none", "video_every=0"]
    # Two threads that wait for each other by spinning take minutes where another program has their core.
    patient = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | environment
    return subprocess.run([*command, f"run_dir={folder}"], env=patient, capture_output=True, text=True)


def first_ratios(folder: Path) -> set[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {json.loads(line)["policy/first_ratio_max_error"] for line in lines}


@pytest.mark.parametrize("env", ["CartPole", pytest.param("Hopper", marks=pytest.mark.long)])
def test_the_first_ratio_is_exactly_one_at_invariant_and_not_at_repeat(tmp_path: Path, env: str) -> None:
    """Rollouts with two rows, updates with other numbers of rows."""
    words = ["algo=ppo", f"env={env}", "env.num_envs=2", "algo.num_steps=64", "algo.num_minibatches=2"]
    words += ["total_env_steps=640", "log_every=1", "eval_every=0"]
    for threads in (1, 2):
        done = train(tmp_path / f"{threads}", *words, "determinism=invariant", f"num_threads={threads}")
        assert done.returncode == 0, done.stderr
        assert first_ratios(tmp_path / f"{threads}") == {0.0}
    assert train(tmp_path / "repeat", *words).returncode == 0
    assert max(first_ratios(tmp_path / "repeat")) > 0.0


@pytest.mark.long
def test_threads_and_grouping_change_no_bit_of_a_run_at_invariant(tmp_path: Path) -> None:
    words = ["algo=ppo", "env=Hopper", "env.num_envs=3", "total_env_steps=1536", "algo.num_steps=256"]
    traces: dict[str, set[str]] = {}
    for level in ("invariant", "repeat"):
        for name, threads, groups in (("one", 1, "0"), ("two", 2, "0"), ("groups", 1, "7")):
            folder = tmp_path / f"{level}-{name}"
            given = [*words, f"determinism={level}", f"num_threads={threads}"]
            done = train(folder, *given, RLTEMPLATE_ROW_GROUPS=groups)
            assert done.returncode == 0, done.stderr
            traces.setdefault(level, set()).add((folder / "trace.jsonl").read_text())
    assert len(traces["invariant"]) == 1
    assert len(traces["repeat"]) > 1


@pytest.mark.parametrize("groups", ["-1", "many"])
def test_a_wrong_number_of_rows_is_refused(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, groups: str
) -> None:
    monkeypatch.setenv(ROW_GROUPS, groups)
    with pytest.raises(ConfigError, match="expected a number of rows"):
        switches.apply(configure("determinism=fast").determinism, torch.get_num_threads())
