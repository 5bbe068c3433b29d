"""Whether what an iteration computed is made of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from rltemplate.types import IterationResult


class NotFinite(NamedTuple):
    """The first tensor, in causal order, that holds NaN or infinity."""

    item: str
    place: list[int]  # of the first such element
    value: float
    others: list[str]  # later tensors that hold some too


def first_not_finite(result: IterationResult) -> NotFinite | None:
    """Look through everything that the iteration handed out and through its losses.

    One small transfer from the device; on the CPU some hundredths of a millisecond.
    """
    import torch

    tensors: dict[str, Tensor] = {**result.probes}
    tensors |= {name: value for name, value in result.metrics.items() if name.startswith("loss/")}
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in floats.values():
        # A sum is finite only if all its terms are; one that overflowed is looked at more closely.
        by_device.setdefault(value.device, []).append(value.detach().sum(dtype=torch.float64))
    if all(torch.stack(sums).isfinite().all().item() for sums in by_device.values()):
        return None
    found = [name for name, value in floats.items() if not bool(value.isfinite().all())]
    if not found:
        return None
    first = floats[found[0]].detach().cpu()
    place = (~first.isfinite()).nonzero()[0]
    return NotFinite(found[0], place.tolist(), first[tuple(place)].item(), found[1:])
