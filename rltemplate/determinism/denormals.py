"""Denormal numbers (too small for a full mantissa), which a run must not flush to zero.

Any shared library that was linked with -ffast-math may switch flushing on when it is loaded: in the thread
that loads it and in those that are started from there. With it sums, square roots and Adam give other bits.
"""

from __future__ import annotations

import sys

from rltemplate.interfaces import ConfigError

_SMALLEST = sys.float_info.min  # with a full mantissa


def flushed() -> bool:
    """True if this thread reads denormal numbers as zero, or writes zero in their place."""
    return not _SMALLEST * 0.5 > 0.0


def keep() -> None:
    """Switch flushing off after anything that may have loaded a library; `ConfigError` if it stays on."""
    if flushed():
        import torch  # slow to import, and hardly ever needed

        torch.set_flush_denormal(False)
    if flushed():
        raise ConfigError(
            "a library flushes denormal numbers to zero, and that cannot be switched off here; look for one "
            "that was linked with -ffast-math, among LD_PRELOAD and what the environment loads"
        )
