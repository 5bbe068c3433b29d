"""Parameters as one vector, with values for parts of it.

Adam with equal values for all parameters is in test_references.py.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from rltemplate.learning.networks import mlp
from rltemplate.learning.optim import AdamState, FlatModule, adam, gradient


def test_parts_may_have_rates_and_weight_decay_of_their_own() -> None:
    rng = torch.Generator().manual_seed(0)
    module = mlp([4, 8, 2], "tanh", rng)
    flat = FlatModule(copy.deepcopy(module))
    x, y = torch.randn(16, 4, generator=rng), torch.randn(16, 2, generator=rng)
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
