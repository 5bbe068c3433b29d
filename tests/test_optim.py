"""Adam, clipping and gradients against torch's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rltemplate.networks import mlp
from rltemplate.optim import FlatModule, adam, adam_init, clip_by_norm, gradient, polyak


def net(seed: int = 0) -> nn.Sequential:
    return mlp([4, 8, 2], "tanh", torch.Generator().manual_seed(seed))


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(16, 4, generator=g), torch.randn(16, 2, generator=g)


def test_adam_agrees_with_torch_over_many_steps() -> None:
    x, y = data()
    reference = net()
    optimizer = torch.optim.Adam(reference.parameters(), lr=1e-2, eps=1e-5)
    flat = FlatModule(net())
    params, state = flat.flat.clone(), adam_init(flat.flat)
    for _ in range(50):
        optimizer.zero_grad()
        loss = (reference(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        grad, _ = gradient(lambda p: ((flat.call(p, x) - y).square().mean(), None), params)
        params, state = adam(params, grad, state, torch.tensor(1e-2), 1e-5)
    expected = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    torch.testing.assert_close(params, expected, atol=2e-6, rtol=1e-4)
    assert float(state.steps) == 50.0


def test_clipping_agrees_with_torch() -> None:
    for scale in (0.1, 10.0):
        grad = scale * torch.randn(30, generator=torch.Generator().manual_seed(2))
        p = nn.Parameter(torch.zeros(30))
        p.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_([p], 0.5)
        clipped, reported = clip_by_norm(grad, 0.5)
        torch.testing.assert_close(clipped, p.grad)
        torch.testing.assert_close(reported, norm)


def test_flat_parameters_are_the_modules_parameters() -> None:
    x, _ = data()
    module = net()
    flat = FlatModule(module)
    before = module(x)
    assert torch.equal(flat.call(flat.flat, x), before)
    other = flat.flat + 0.1
    expected = flat.call(other, x)
    assert torch.equal(module(x), before), "a call with other parameters must not change the module"
    flat.assign(other)
    assert torch.equal(module(x), expected)


def test_gradient_leaves_nothing_behind_and_detaches() -> None:
    x, y = data()
    flat = FlatModule(net())
    grad, aux = gradient(lambda p: ((loss := (flat.call(p, x) - y).square().mean()), (loss,)), flat.flat)
    assert not grad.requires_grad
    assert not aux[0].requires_grad
    assert not flat.flat.requires_grad


def test_polyak_moves_by_the_share_tau() -> None:
    assert polyak(torch.tensor([1.0]), torch.tensor([3.0]), 0.25).tolist() == [1.5]
