"""Parameters as one vector, and gradients that leave nothing behind. Adam is in test_references.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rltemplate.learning.networks import mlp
from rltemplate.learning.optim import FlatModule, gradient


def net(seed: int = 0) -> nn.Sequential:
    return mlp([4, 8, 2], "tanh", torch.Generator().manual_seed(seed))


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(16, 4, generator=g), torch.randn(16, 2, generator=g)


def test_flat_parameters_are_the_modules_parameters() -> None:
    x, _ = data()
    module = net()
    flat = FlatModule(module)
    before = module(x)
    other = flat.initial + 0.1
    expected = flat.call(other, x)
    with torch.no_grad():  # here the module takes the parameters over
        for _ in range(2):
            assert torch.equal(flat.call(flat.initial, x), before)
            assert torch.equal(flat.call(other, x), expected)
    assert not torch.equal(before, expected)


def test_gradient_leaves_nothing_behind_and_detaches() -> None:
    x, y = data()
    flat = FlatModule(net())
    grad, aux = gradient(lambda p: ((loss := (flat.call(p, x) - y).square().mean()), (loss,)), flat.initial)
    assert not grad.requires_grad
    assert not aux[0].requires_grad
    assert not flat.initial.requires_grad
