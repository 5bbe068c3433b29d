"""Running statistics as values.

Observations are scaled by statistics of earlier iterations, rewards by statistics that include them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RunningMeanStd(NamedTuple):
    """Mean and variance (size,) over all rows so far, and their number (), in float64.

    A value, of which `merged` gives the next one. A float32 count stops growing at 2^24.
    """

    mean: Tensor
    var: Tensor
    num_rows: Tensor

    @classmethod
    def empty(cls, size: int, device: torch.device | None = None) -> RunningMeanStd:
        """Statistics of no rows; their scaling changes nothing."""
        zeros = torch.zeros(size, dtype=torch.float64, device=device)
        return cls(zeros, torch.ones_like(zeros), zeros.new_zeros(()))

    def merged(self, batch: Tensor) -> RunningMeanStd:
        """The statistics of earlier rows and of `batch` (B, size) (Chan et al. 1979, parallel variance)."""
        rows = batch.to(torch.float64)
        batch_mean = rows.mean(0)
        batch_var = (rows - batch_mean).square().mean(0)
        total = self.num_rows + rows.shape[0]
        delta = batch_mean - self.mean
        share = rows.shape[0] / total
        var = (1.0 - share) * self.var + share * batch_var + delta.square() * share * (1.0 - share)
        return RunningMeanStd(self.mean + delta * share, var, total)

    def scaling(self) -> Scaling:
        """Shift and scale in torch's default type, for normalisation in two operations."""
        precision = torch.get_default_dtype()
        return Scaling(self.mean.to(precision), (self.var + 1e-8).rsqrt().to(precision))


class Scaling(NamedTuple):
    """Mean and inverse deviation (size,)."""

    shift: Tensor
    scale: Tensor


def normalize(x: Tensor, scaling: Scaling | None, clip: float) -> Tensor:
    """`x` (..., size) with zero mean and unit deviation, clipped; unchanged if `scaling` is None."""
    return x if scaling is None else ((x - scaling.shift) * scaling.scale).clamp(-clip, clip)
