"""Whether what an iteration computed is made of numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

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

    One small transfer from the device; on the CPU some hundredths of a millisecond, as every value is read
    once and none is converted.
    """
    tensors: dict[str, Tensor] = {**result.probes}
    tensors |= {name: value for name, value in result.metrics.items() if name.startswith("loss/")}
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    if _sums_are_finite(floats.values()):
        return None
    # At a closer look it may be that only a sum had become too large.
    found = [name for name, value in floats.items() if not bool(value.isfinite().all())]
    if not found:
        return None
    first = floats[found[0]].detach().cpu()
    place = (~first.isfinite()).nonzero()[0]
    return NotFinite(found[0], place.tolist(), first[tuple(place)].item(), found[1:])


def _sums_are_finite(values: Iterable[Tensor]) -> bool:
    """A sum is finite only if all its terms are. One that overflowed says no too."""
    import torch

    elsewhere: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for value in values:
            if value.device.type != "cpu":
                elsewhere.setdefault(value.device, []).append(value.sum().double())
            elif not math.isfinite(value.sum().item()):
                return False
        return all(math.isfinite(torch.stack(sums).sum().item()) for sums in elsewhere.values())
