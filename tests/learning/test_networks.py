"""Distributions at their extremes; initialisation. Their values are in test_references.py and test_ppo.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rltemplate.learning.distributions import Categorical, SquashedGaussian
from rltemplate.learning.networks import mlp
from rltemplate.learning.optim import FlatModule, gradient
from runlab.determinism import kernels
from runlab.errors import ConfigError


def test_categorical_takes_the_lowest_index_of_a_tie_and_the_ends_of_uniform_noise() -> None:
    assert Categorical((3,)).mode(torch.tensor([[1.0, 2.0, 2.0]])).tolist() == [[1]]
    edge = torch.tensor([[0.0, 0.999999999], [1.0, 0.0]])
    assert Categorical((2,)).sample(torch.zeros(2, 2), edge).tolist() == [[1], [0]]
    # At both ends the noise is finite: equal noise leaves the choice to the logits.
    for end in torch.zeros(2), torch.ones(2):
        assert Categorical((2,)).sample(torch.tensor([[0.0, 1.0]]), end[None]).tolist() == [[1]]


def test_the_squashed_deviation_stays_within_its_bounds_and_reaches_them() -> None:
    dist, raw = SquashedGaussian(1, -5.0, -1.0), torch.tensor([-1e4, -20.0, 0.0, 20.0, 1e4])
    params = torch.stack([torch.zeros(5), raw], -1)
    deviation = torch.atanh(dist.sample(params, torch.ones(5, 1)).double()).squeeze(-1)
    log_std = torch.tensor([-5.0, -5.0, -3.0, -1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(deviation.log(), log_std, atol=1e-5, rtol=0.0)


def test_squashed_gaussian_stays_finite_where_tanh_saturates() -> None:
    dist = SquashedGaussian(1, -5.0, 2.0)
    params = torch.tensor([[50.0, 3.0], [-50.0, -3.0]], requires_grad=True)
    action, log_prob = dist.sample_log_prob(params, torch.tensor([[2.0], [-2.0]]))
    (grad,) = torch.autograd.grad(log_prob.sum(), params)
    assert action.abs().max() <= 1.0
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(grad).all()


def test_a_network_with_state_beside_its_parameters_is_refused() -> None:
    usual = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    usual.register_buffer("scale", torch.ones(3), persistent=False)  # a constant
    FlatModule(usual)
    FlatModule(nn.Sequential(usual[0], usual[0]))  # with weights that are shared
    with pytest.raises(ConfigError, match=r"the network has the buffer 1.running_mean"):
        FlatModule(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def test_parameters_of_another_type_are_refused_and_not_computed_unseen() -> None:
    network: FlatModule[torch.Tensor] = FlatModule(mlp([3, 2], "tanh", torch.Generator()))
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(TypeError, match=r"of torch\.bfloat16 for a network of"),
        ):
            network.apply(network.init_params.bfloat16(), torch.zeros(1, 3))
    assert network.apply(network.init_params.clone(), torch.zeros(1, 3)).dtype == torch.float32


def test_default_initialisation_is_torchs_distribution() -> None:
    layer = mlp([400, 1000], "relu", torch.Generator())
    for values in layer.get_parameter("0.weight").detach(), layer.get_parameter("0.bias").detach():
        assert float(values.abs().max()) == pytest.approx(1 / 20, rel=0.01)
        assert float(values.std()) == pytest.approx(1 / 20 / math.sqrt(3), rel=0.05)


class Threads(torch.autograd.Function):
    """The identity; its gradient notes the number of threads."""

    seen: list[int] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Threads.seen.append(torch.get_num_threads())
        return gradients[0]


@pytest.mark.parametrize(("products", "threads"), [("plain", 2), ("padded", 1)])
def test_above_repeat_gradients_have_one_thread(products: str, threads: int) -> None:
    """MKL adds in another order on two threads, for 5 or 6 outputs among others."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 64, generator=rng)

    def loss(params: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        noted: torch.Tensor = Threads.apply(params)  # type: ignore[no-untyped-call]
        return (F.linear(rows, noted.view(-1, 64)) * target).sum(), ()

    kernels.use(products)
    Threads.seen.clear()
    for outputs in range(1, 13):
        target, weight = (torch.randn(64 * outputs, generator=rng) for _ in range(2))
        grads = []
        for count in (1, 2):
            torch.set_num_threads(count)
            grads.append(gradient(loss, weight, target.view(64, outputs))[0])
            assert torch.get_num_threads() == count
        assert torch.equal(*grads) or products == "plain"
    assert Threads.seen == 12 * [1, threads]
