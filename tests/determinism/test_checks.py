"""Rows on their own where the level says so, checks that can tell, and the way `blas` beside torch's own."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ON_LEARNING, TRIED_IN, Configure, build, job_in, small
from gymnasium.envs.toy_text import frozen_lake
from torch import Tensor, nn

from rltemplate.learning.networks import mlp
from runlab.config.cli.preflight import preflight
from runlab.config.loading import from_dict, to_dict
from runlab.config.project import ALGORITHMS
from runlab.determinism import kernels, switches
from runlab.determinism.checks import ROWS, check_repeats, check_rows, differing_rows, passes_of
from runlab.determinism.levels import prepared
from runlab.determinism.libraries import openblas_kernels
from runlab.errors import ConfigError
from runlab.interfaces import ForwardPass
from runlab.launch.worker import run
from runlab.machine import cpu_identity
from runlab.run.training_run import check_level

Network = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(
    ("products", "instead"), [("padded", "products=blas"), ("tiled", "determinism=repeat")]
)
@pytest.mark.parametrize("algo", ON_LEARNING)
def test_rows_are_on_their_own_with_filled_up_batches_and_not_without(
    configure: Configure, algo: str, products: str, instead: str
) -> None:
    words = "determinism=invariant", f"determinism.products={products}", "algo.hidden_sizes=[256,256]"
    device = ["device=cpu"] if products == "padded" else []
    config = configure(*small(algo, *words, *device, env=TRIED_IN[algo]))
    algorithm, _ = build(config)
    kernels.use(products)
    passes = passes_of(algorithm, config, ["rows"])
    assert set(check_rows(config, passes)["networks"]) == {*passes}
    kernels.use("plain")
    if hasattr(ALGORITHMS[algo].config, "hidden_sizes"):
        with pytest.raises(
            ConfigError, match=rf"gives a row other bits in a batch of \d+ rows on .*; use .*{instead}$"
        ):
            check_rows(config, passes)
    algorithm.close()


def widths(seed: int) -> tuple[int, ...]:
    """The widths of a network: of one or two odd layers."""
    rng = np.random.default_rng(seed)
    return tuple(int(width) for width in rng.integers(1, 130, size=rng.integers(3, 5)))


def pass_of(sizes: tuple[int, ...]) -> dict[str, ForwardPass]:
    network = mlp(sizes, "tanh", torch.Generator().manual_seed(1))
    return {"policy": ForwardPass(network, sizes[0], (2, 37))}


AVX512 = pytest.mark.skipif("avx512f" not in cpu_identity()[1], reason="needs a CPU with AVX-512")


@AVX512
def test_kernels_for_haswell_hold_for_rows_where_those_for_avx_512_do_not(configure: Configure) -> None:
    """They come along with `blas`, and are named where others were asked for."""
    blas = "determinism=invariant", "determinism.products=blas"
    config, other = configure(*blas), configure(*blas, "determinism.blas_kernels=SkylakeX")
    assert config.determinism.blas_kernels == "Haswell"
    variables = prepared({"OPENBLAS_CORETYPE": "SkylakeX"}, config.determinism, 1)
    assert variables["OPENBLAS_CORETYPE"] == "Haswell"
    networks, refused = [pass_of(widths(seed)) for seed in range(12)], 0
    kernels.use("blas")
    with openblas_kernels("SkylakeX") as usable:
        assert usable
        for each in networks:
            if differing_rows(each["policy"], torch.device("cpu")) is not None:
                refused += 1
                with pytest.raises(ConfigError, match=r"; use determinism\.blas_kernels=Haswell$"):
                    check_rows(other, each)
    assert refused > len(networks) // 2
    with openblas_kernels("Haswell"):
        assert all(check_rows(config, each)["holds"] for each in networks)


@pytest.mark.parametrize("products", ["padded", "tiled"])
def test_layers_of_odd_width_and_few_outputs_hold_where_their_rows_are_filled_up(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, products: str
) -> None:
    """Such as those behind an encoder, beside whose features an observation has two numbers.

    The other order is that of MKL on CPUs of other vendors than its own.
    """
    config = configure("determinism=invariant", f"determinism.products={products}")
    networks = [pass_of(sizes) for sizes in ((18, 2), (514, 1), (33, 126, 123, 9), (42, 51, 4))]
    kernels.use(products)
    assert all(check_rows(config, each)["holds"] for each in networks)
    monkeypatch.setattr(kernels, "linear", torch.nn.functional.linear)
    vendor, flags = cpu_identity()
    if vendor == "AuthenticAMD" and "avx512f" in flags:
        assert any(differing_rows(each["policy"], torch.device("cpu")) for each in networks)


def test_kernels_come_along_with_blas_only_and_stay_as_they_were_recorded(configure: Configure) -> None:
    for words in (["determinism=fast"], ["determinism=repeat"], ["determinism=invariant"]):
        assert configure(*words).determinism.blas_kernels is None
    values = to_dict(configure("determinism=invariant", "determinism.products=blas"))
    values["determinism"]["blas_kernels"] = None  # a run of before, whose bits are those of its machine
    assert from_dict(values).determinism.blas_kernels is None


def test_only_what_was_tried_is_recommended(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure("determinism=invariant", "determinism.products=padded", "device=cpu")
    chosen: list[str] = []

    def crossed(x: Tensor) -> Tensor:  # no way of products makes its rows independent
        chosen.append(kernels.chosen.products)
        return x + x.mean()

    kernels.use("padded")
    with pytest.raises(ConfigError, match=r"; use determinism=repeat$"):
        check_rows(config, {"policy": ForwardPass(crossed, 3, (4,))})
    assert "blas" in chosen
    assert kernels.chosen.products == "padded"
    # Without the kernels, or another one among the networks that does not hold.
    monkeypatch.setattr("runlab.determinism.checks.blas_kernels", lambda _: None)
    kernels.use("plain")
    with pytest.raises(ConfigError, match=r"; use determinism=repeat$"):
        check_rows(config, pass_of((11, 64, 64, 3)) | {"value": ForwardPass(crossed, 3, (4,))})


@pytest.mark.parametrize("level", ["fast", "repeat"])
def test_an_environment_that_does_not_repeat_is_refused_where_the_level_says_so(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two drawn maps may be alike in all places that the trial visits.
    maps = itertools.cycle([["SF", "FG"], ["SH", "FG"]])
    monkeypatch.setattr(frozen_lake, "generate_random_map", lambda **_: next(maps))
    lake = "env=FrozenLake-v1", "env.kwargs.desc=null", "env.kwargs.map_name=null"
    (config,) = preflight([*lake, f"determinism={level}", "num_threads=1", "compile=false"]).configs
    algorithm, _ = build(config)
    refused = pytest.raises(ConfigError, match="two environments FrozenLake-v1 with the same seed")
    with contextlib.nullcontext() if level == "fast" else refused:
        check_level(config, switches.read_back(), algorithm)
    algorithm.close()


def test_a_sum_has_one_order_where_the_level_asks_for_it() -> None:
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    sums: dict[str, list[float]] = {}
    for products in ("plain", "padded"):
        kernels.use(products)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sums.setdefault(products, []).append(kernels.total(x).item())
    assert sums["padded"] == [sums["padded"][0]] * 2 == pytest.approx([x.double().sum().item()] * 2, rel=1e-4)
    assert len({*sums["plain"]}) == 2, "torch's own sum depends on the number of threads"


def test_a_network_that_does_not_repeat_is_found(configure: Configure) -> None:
    calls = iter(range(1000))

    def drifting(x: Tensor) -> Tensor:
        return x + next(calls) * 1e-6

    def passes(network: Network) -> dict[str, ForwardPass]:
        return {"policy": ForwardPass(network, 3, (4,))}

    with pytest.raises(ConfigError, match="the policy network gives different bits for equal inputs"):
        check_repeats(configure("device=cpu"), passes(drifting))
    assert check_repeats(configure("device=cpu"), passes(lambda x: x * 2))["holds"]


@pytest.mark.parametrize("convolves", [False, True])
def test_convolutions_alone_are_tried_in_fewer_batches(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, convolves: bool
) -> None:
    """In the largest of a run they are tried all the same."""
    monkeypatch.setattr("runlab.determinism.checks._MOST_NUMBERS", 30)
    tried: list[int] = []

    def network(x: Tensor) -> Tensor:
        tried.append(len(x))
        return x * 2

    passes = {"policy": ForwardPass(network, 3, (4, 200), convolves)}
    check_rows(configure("device=cpu"), passes)
    assert {*tried[1:]} == {*(size for size in ROWS if size <= 10 or not convolves), 200}
    tried.clear()
    check_repeats(configure("device=cpu"), passes)
    assert {*tried} == {10 if convolves else 200}


def numbers(*shape: int, double: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(shape, generator=generator, dtype=torch.float64 if double else torch.float32)


def agree(compute: Callable[[], list[Tensor]], products: str, atol: float, rtol: float = 0.0) -> None:
    """Results in the way `plain` and in another, which stays in force, are nearly the same.

    Without `rtol` the distance is one from the largest element of a tensor.
    """
    kernels.use("plain")
    plain = compute()
    kernels.use(products)
    for a, b in zip(plain, compute(), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = 1.0 if rtol else max(a.abs().max().item(), 1e-3)
        assert torch.allclose(a, b, rtol=rtol, atol=atol * scale, equal_nan=True)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("number", [1, 8, 9, 305, 700])
def test_networks_and_their_gradients_agree_with_torch(activation: str, number: int) -> None:
    """Rows that were filled up leave no trace in what is learned."""
    for double, close in ((False, 2e-5), (True, 1e-12)):
        net = mlp((11, 40, 33, 3), activation, torch.Generator().manual_seed(3))
        net = net.double() if double else net

        def compute(net: nn.Module = net, double: bool = double) -> list[Tensor]:
            leaf = numbers(number, 11, double=double).requires_grad_()
            y = net(leaf)
            return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *net.parameters()])]

        for products in ("blas", "padded", "tiled"):
            agree(compute, products, close)


@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "tanh"])
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

            agree(compute, "blas", 1e-14 if double else 2e-7, rtol=1e-6)
    assert torch.autograd.gradcheck(function, [(numbers(9, double=True).abs() + 0.1).requires_grad_()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # infinities are no errors
        x = torch.tensor([-torch.inf, -1.0, 0.0, 200.0, torch.inf, torch.nan])
        agree(lambda: [function(x)], "blas", 1e-8, rtol=1e-5)


def test_a_run_is_refused_where_its_level_does_not_hold(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every start the checks of the level are tried with the networks of the run."""
    config = configure("determinism=invariant", "determinism.products=plain", "env=CartPole")
    for name, value in prepared({}, config.determinism, config.num_threads).items():
        monkeypatch.setenv(name, value)
    refused = "with products=plain the policy network gives a row other bits in a batch of"
    try:
        with pytest.raises(ConfigError, match=refused):
            run(replace(job_in(tmp_path / "run", configure), config=config))
    finally:
        torch.set_deterministic_debug_mode("default")
    assert not (tmp_path / "run").exists()
