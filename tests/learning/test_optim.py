"""Parameters as one vector, with values for parts of it.

Adam with equal values for all parameters is in test_references.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rltemplate.learning.networks import mlp
from rltemplate.learning.optim import AdamState, FlatModule, adam, gradient


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


def test_parts_may_have_rates_and_weight_decay_of_their_own() -> None:
    module, (_, flat, x, y) = mlp([4, 8, 2], "tanh", torch.Generator().manual_seed(0)), made()
    first, *_, last = [layer for layer in module if isinstance(layer, nn.Linear)]
    groups: list[dict[str, Any]] = [
        {"params": [*first.parameters()], "lr": 0.01, "weight_decay": 0.1},
        {"params": [*last.parameters()], "lr": 0.03, "weight_decay": 0.1},
    ]
    expected = torch.optim.AdamW(groups, betas=(0.8, 0.99), eps=1e-8, foreach=False)
    state, names = AdamState.start(flat.initial), dict(flat.module.named_parameters())
    rate = 0.01 * flat.by_part({list(names)[-1].partition(".")[0]: 3.0})
    for _ in range(5):
        expected.zero_grad()
        (module(x) - y).square().mean().backward()
        expected.step()
        grad, _ = gradient(lambda p: ((flat.call(p, x) - y).square().mean(), ()), state.params)
        state = adam(state, grad, rate, 1e-8, betas=(0.8, 0.99), weight_decay=0.1)
    torch.testing.assert_close(state.params, nn.utils.parameters_to_vector(module.parameters()))
