"""Running statistics equal the statistics of everything seen."""

from __future__ import annotations

import torch

from rltemplate.learning.normalize import Statistics, normalize, rescale


def test_merged_batches_equal_one_pass() -> None:
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) * 5.0 + 100.0
    statistics = Statistics.empty(3)
    torch.testing.assert_close(normalize(x, statistics.scaling(), 1000.0), x)
    for batch in x.split([1, 7, 300, 692]):
        statistics = statistics.merged(batch)
    torch.testing.assert_close(statistics.mean, x.double().mean(0))
    torch.testing.assert_close(statistics.var, x.double().var(0, correction=0))
    assert float(statistics.num_rows) == 1000.0
    normal = normalize(x, statistics.scaling(), 10.0)
    torch.testing.assert_close(normal.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(normal.std(0), torch.ones(3), atol=1e-2, rtol=0)
    assert normalize(x, statistics.scaling(), 0.5).abs().max() == 0.5
    assert rescale(x, statistics.scaling(), 1e9).mean() > 15.0
    assert normalize(x, None, 0.5) is x
