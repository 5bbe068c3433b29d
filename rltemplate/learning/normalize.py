"""Running statistics as module buffers, so that they are saved, moved and loaded with the policy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rltemplate.types import Probe


class RunningNorm(nn.Module):
    """Mean and variance over everything seen, merged batch by batch (Chan et al. 1979, parallel variance).

    Statistics are float64: a float32 count stops growing at 2^24. Before the first `update`, `forward`
    changes nothing but the clipping.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, size: int, clip: float, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.clip = clip
        self.epsilon = epsilon
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self._refresh()

    def _refresh(self) -> None:
        """Keep copies in torch's default type, so that normalising costs two operations and no conversion."""
        precision = torch.get_default_dtype()
        self._shift = self.mean.to(precision)
        self._scale = (self.var + self.epsilon).rsqrt().to(precision)

    @torch.no_grad()
    def update(self, batch: Tensor) -> None:
        """Merge the rows of `batch` (B, size)."""
        rows = batch.to(torch.float64)
        batch_mean = rows.mean(0)
        batch_var = (rows - batch_mean).square().mean(0)
        total = self.count + rows.shape[0]
        delta = batch_mean - self.mean
        share = rows.shape[0] / total
        self.var.copy_((1.0 - share) * self.var + share * batch_var + delta.square() * share * (1.0 - share))
        self.mean.add_(delta * share)
        self.count.copy_(total)
        self._refresh()

    @property
    def scaling(self) -> tuple[Tensor, Tensor]:
        """Mean and inverse deviation (size,) in torch's default type, for `scaled`."""
        return self._shift, self._scale

    def scaled(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """`forward` with its statistics as arguments, for functions that may use nothing that changes."""
        return ((x - shift) * scale).clamp(-self.clip, self.clip)

    def forward(self, x: Tensor) -> Tensor:
        """(x - mean) / sqrt(var + epsilon), clipped; shape (..., size)."""
        return self.scaled(x, *self.scaling)

    def scale_only(self, x: Tensor) -> Tensor:
        """x / sqrt(var + epsilon), clipped: for rewards, whose mean carries meaning."""
        return (x * self._scale).clamp(-self.clip, self.clip)

    def show(self, name: str, probe: Probe) -> dict[str, Tensor]:
        """Hand the statistics through the probe, and return them by name, without copying."""
        self.mean.copy_(probe(f"{name}/mean", self.mean))
        self.var.copy_(probe(f"{name}/var", self.var))
        self._refresh()
        return {f"{name}/mean": self.mean, f"{name}/var": self.var}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the statistics that later updates do not change."""
        return {name: value.clone() for name, value in self.state_dict().items()}

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        module = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._refresh()
        return module

    def _load_from_state_dict(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super()._load_from_state_dict(*args, **kwargs)
        self._refresh()
