"""The search for NaN and infinity in the results of an iteration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from rltemplate.run.state import END, entries

if TYPE_CHECKING:
    from rltemplate.types import Algorithm, IterationResult


class NotFinite(NamedTuple):
    """The first tensor, in causal order, that holds NaN or infinity."""

    item: str
    place: list[int]  # index of the first such element
    value: float
    others: list[str]  # later tensors that hold some too


def first_not_finite(algorithm: Algorithm, result: IterationResult) -> NotFinite | None:
    """Search the losses of an iteration, and the state at its end."""
    tensors = {name: value for name, value in result.metrics.items() if name.startswith("loss/")}
    tensors |= {
        name: x for name, x in entries(algorithm.state_dict(), END) if hasattr(x, "is_floating_point")
    }
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    # A finite sum has finite terms, and costs a tenth of a look at each. Some sums only overflow.
    suspected = [name for name, value in floats.items() if not math.isfinite(value.sum().item())]
    found = [name for name in suspected if not bool(floats[name].isfinite().all())]
    if not found:
        return None
    first = tensors[found[0]].detach().cpu()
    place = (~first.isfinite()).nonzero()[0]
    return NotFinite(found[0], place.tolist(), first[tuple(place)].item(), found[1:])
