"""Running statistics equal the statistics of everything seen, and travel with a module's state."""

from __future__ import annotations

import torch

from rltemplate.learning.normalize import RunningNorm


def test_merged_batches_equal_one_pass() -> None:
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) * 5.0 + 100.0
    norm = RunningNorm(3, clip=10.0)
    for batch in x.split([1, 7, 300, 692]):
        norm.update(batch)
    torch.testing.assert_close(norm.mean, x.double().mean(0))
    torch.testing.assert_close(norm.var, x.double().var(0, correction=0))
    assert float(norm.count) == 1000.0
    normal = norm(x)
    torch.testing.assert_close(normal.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(normal.std(0), torch.ones(3), atol=1e-2, rtol=0)


def test_statistics_travel_with_the_state() -> None:
    norm, other = RunningNorm(2, clip=5.0), RunningNorm(2, clip=5.0)
    norm.update(torch.randn(50, 2, generator=torch.Generator().manual_seed(1)) + 3.0)
    x = torch.tensor([[1.0, 2.0]])
    assert not torch.equal(norm(x), other(x))
    other.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x), other(x))
    norm.update(x)
    other.update(x)
    assert torch.equal(norm(x), other(x))
