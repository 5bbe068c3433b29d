"""The search for NaN and infinity in the results of an iteration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rltemplate.run.state import END, entries

if TYPE_CHECKING:
    from rltemplate.types import Algorithm, IterationResult


def first_not_finite(algorithm: Algorithm, result: IterationResult) -> str | None:
    """Name, value and index of the first NaN or infinity in the losses, then in the state."""
    losses = [(name, value) for name, value in result.metrics.items() if name.startswith("loss/")]
    for name, values in (*losses, *entries(algorithm.state_dict(), END)):
        if not hasattr(values, "is_floating_point") or not values.is_floating_point():
            continue
        # A finite sum has finite terms, and costs a tenth of a look at each. Some sums only overflow.
        if not math.isfinite(values.sum().item()) and len(bad := (~values.isfinite()).nonzero()):
            return f"{name} became {values[tuple(bad[0])].item()} at {bad[0].tolist()}"
    return None
