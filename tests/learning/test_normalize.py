"""Running statistics keep float64 for rows in float32. The rest is in test_references.py."""

from __future__ import annotations

import pytest
import torch

from rltemplate.learning.normalize import RunningMeanStd, normalize


@pytest.mark.parametrize("offset", [100.0, 1e6])
def test_merged_batches_equal_one_pass_in_float64(offset: float) -> None:
    """A variance by the difference of two large squares would lose its digits at the larger offset."""
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) * 5.0 + offset
    statistics = RunningMeanStd.empty(3)
    for batch in x.split([1, 7, 300, 692]):
        statistics = statistics.merged(batch)
    expected = RunningMeanStd(
        x.double().mean(0), x.double().var(0, correction=0), torch.tensor(1000.0).double()
    )
    torch.testing.assert_close(statistics, expected, rtol=1e-9, atol=0.0)
    many = statistics._replace(num_rows=torch.tensor(2.0**24, dtype=torch.float64))
    assert float(many.merged(x[:1]).num_rows) == 2**24 + 1


def test_large_offsets_leave_normalised_rows_their_digits() -> None:
    """A difference of two large products would lose them."""
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) * 5.0 + 1e6
    rows = x.double()
    expected = ((rows - rows.mean(0)) / rows.std(0, correction=0)).float()
    scaled = normalize(x, RunningMeanStd.empty(3).merged(x).scaling(), 10.0)
    torch.testing.assert_close(scaled, expected, atol=0.01, rtol=0.0)  # the mean is rounded to 0.03
