"""The way `blas` agrees with torch in values, gradients and corner cases; a row depends on itself alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from conftest import ROOT, Configure
from torch import Tensor, nn

from rltemplate.config.loading import to_dict
from rltemplate.determinism import kernels
from rltemplate.determinism.layers import Rows
from rltemplate.determinism.levels import prepared
from rltemplate.learning.networks import mlp

ELEMENTARY = ("exp", "log", "sqrt", "tanh")
BATCHES = (1, 8, 9, 305, 700)


@pytest.fixture
def by_blas() -> Iterator[None]:
    kernels.use("blas")
    yield
    kernels.use("plain")


def network(*sizes: int, activation: str = "tanh", double: bool = False) -> Rows:
    net = mlp(sizes, activation, torch.Generator().manual_seed(3))
    return net.double() if double else net


def numbers(*shape: int, double: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(shape, generator=generator, dtype=torch.float64 if double else torch.float32)


def values_and_gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = net(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *net.parameters()])]


def in_both_ways(compute: Callable[[], list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of results of `compute`, in the ways `plain` and `blas`."""
    kernels.use("plain")
    plain = compute()
    kernels.use("blas")
    return list(zip(plain, compute(), strict=True))


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("rows", BATCHES)
def test_networks_and_their_gradients_agree_with_torch(by_blas: None, activation: str, rows: int) -> None:
    for double, close in ((False, 2e-5), (True, 1e-12)):
        net = network(11, 40, 33, 3, activation=activation, double=double)
        x = numbers(rows, 11, double=double)
        for plain, ours in in_both_ways(partial(values_and_gradients, net, x)):
            assert ours.shape == plain.shape
            assert ours.dtype == plain.dtype
            scale = plain.abs().max().item()
            assert torch.allclose(ours, plain, rtol=0.0, atol=close * max(scale, 1e-3))


@pytest.mark.parametrize("name", ELEMENTARY)
def test_elementary_functions_agree_with_torch(by_blas: None, name: str) -> None:
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


def test_infinities_are_no_errors(by_blas: None) -> None:
    x = torch.tensor([-torch.inf, -1.0, 0.0, 200.0, torch.inf, torch.nan])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plain, ours in in_both_ways(lambda: [getattr(kernels, name)(x) for name in ELEMENTARY]):
            assert torch.equal(plain.isnan(), ours.isnan())
            assert torch.allclose(plain.nan_to_num(), ours.nan_to_num())
        net = network(6, 20, 2)
        assert net(x[None]).isnan().all()


def test_weights_changed_before_the_gradient_are_noticed(by_blas: None) -> None:
    net, x = network(4, 16, 2), numbers(9, 4)
    y = net(x)
    with torch.no_grad():
        next(iter(net.parameters())).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- Rows, under the kernels of the profile --------------------------------------------------------------

ROWS = """
import json, sys
import torch
from rltemplate.config.loading import from_dict
from rltemplate.determinism import checks, kernels, switches
from rltemplate.determinism.layers import Linear
from rltemplate.types import ForwardPass
config = from_dict(json.loads(sys.stdin.read()))
switches.apply(config.determinism, config.num_threads)
generator = torch.Generator().manual_seed(0)
shapes = [(4, 64), (11, 64), (64, 64), (64, 3), (64, 1), (17, 256), (256, 256), (256, 12), (256, 1)]
shapes += [(376, 256), (256, 34), (33, 320), (64, 7), (1, 64)]
found = {"blas": [], "plain": []}
for size_in, size_out in shapes:
    for kind in (torch.float32, torch.float64):
        layer = Linear(size_in, size_out, dtype=kind)
        layer.weight.data = torch.randn(size_out, size_in, generator=generator, dtype=kind)
        layer.bias.data = torch.randn(size_out, generator=generator, dtype=kind)
        each = ForwardPass(lambda x: layer(x.to(kind)), size_in, (32, 305, 512, 1000, 2048))
        for products, differing in found.items():
            kernels.use(products)
            where = checks.differing_rows(each, torch.device("cpu"))
            differing += [] if where is None else [f"{size_in}x{size_out} {kind}: {where}"]
print(json.dumps(found))
"""


@pytest.mark.long
def test_a_row_depends_on_that_row_alone(configure: Configure) -> None:
    config = configure("determinism=profile")
    environment = prepared({**os.environ, "PYTHONPATH": str(ROOT)}, config.determinism, 1)
    done = subprocess.run(
        [sys.executable, "-c", ROWS],
        input=json.dumps(to_dict(config)),
        env=environment,
        capture_output=True,
        text=True,
    )
    if "this machine cannot be x86-avx2" in done.stderr:
        pytest.skip("this machine does not have the profile's instructions")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["blas"] == []
    assert found["plain"], "torch's own products depend on the batch, or nothing was tried"
