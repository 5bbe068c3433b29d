"""Parameters as one vector, with values for parts of it.

Adam with equal values for all parameters is in test_references.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rltemplate.learning.networks import mlp
from rltemplate.learning.optim import FlatModule


def made() -> tuple[nn.Sequential, FlatModule, Tensor, Tensor]:
    """A network, and inputs and outputs of it."""
    rng = torch.Generator().manual_seed(0)
    module = mlp([4, 8, 2], "tanh", rng)
    return module, FlatModule(module), torch.randn(16, 4, generator=rng), torch.randn(16, 2, generator=rng)


def test_flat_parameters_are_the_modules_parameters() -> None:
    module, flat, x, _ = made()
    before = module(x)
    other = flat.initial + 0.1
    expected = flat.call(other, x)
    with torch.no_grad():  # here the module takes the parameters over
        for _ in range(2):
            assert torch.equal(flat.call(flat.initial, x), before)
            assert torch.equal(flat.call(other, x), expected)
    assert not torch.equal(before, expected)
