"""Fields of the configuration with their ranges, which are checked when it is loaded."""

from __future__ import annotations

from dataclasses import field
from typing import Any

# Upper bounds: of environment steps, three years at 10,000 a second; and of all other counts.
MOST_STEPS = 10**12
MOST = 10**9


def number(low: float, high: float = MOST, *, open_low: bool = False) -> Any:
    """A configuration field without a default whose value must lie in [low, high] (or (low, high])."""
    return field(metadata={"low": low, "high": high, "open_low": open_low})


def positive(high: float = float(MOST)) -> Any:
    """A configuration field without a default whose value must be greater than zero."""
    return number(0.0, high, open_low=True)


def fraction() -> Any:
    """A configuration field without a default whose value must lie in [0, 1]."""
    return number(0.0, 1.0)


def count(high: float = MOST) -> Any:
    """A configuration field without a default that counts something, or lists counts: 1 or more."""
    return number(1, high)
