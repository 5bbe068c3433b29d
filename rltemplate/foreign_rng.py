"""The global generators of Python, numpy and torch, from which nothing in this package draws.

Environments and libraries of others may, and with `determinism=repeat` their draws must repeat too.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from rltemplate.rng import seed_sequence


def seed_foreign_code(seed: int) -> None:
    """Start all three from `seed`, each from words of its own."""
    words = seed_sequence(seed, "foreign code").generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002
    torch.manual_seed(int(words[2]))
