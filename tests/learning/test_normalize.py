"""Running statistics keep float64 for rows in float32. The rest is in test_references.py."""

from __future__ import annotations

import torch

from rltemplate.learning.normalize import Statistics


def test_merged_batches_equal_one_pass_in_float64() -> None:
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) * 5.0 + 100.0
    statistics = Statistics.empty(3)
    for batch in x.split([1, 7, 300, 692]):
        statistics = statistics.merged(batch)
    torch.testing.assert_close(statistics.mean, x.double().mean(0))
    torch.testing.assert_close(statistics.var, x.double().var(0, correction=0))
    many = statistics._replace(num_rows=torch.tensor(2.0**24, dtype=torch.float64))
    assert float(many.merged(x[:1]).num_rows) == 2**24 + 1
