"""The global generators of Python, numpy and torch. Nothing in this package draws from them.

Environments and libraries may draw from them, and from `determinism=repeat` on these draws must repeat too.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from runlab.rng import seed_sequence


def seed_global_rng(seed: int) -> None:
    """Seed all three, each with its own number made from `seed`."""
    words = seed_sequence(seed, "foreign code").generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002
    torch.manual_seed(int(words[2]))


def global_rng_state() -> dict[str, Any]:
    """The states of all three as tensors and text, with torch's generators of CUDA devices in use."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    return {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps(numpy_state, default=lambda value: value.tolist()),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_global_rng(state: Mapping[str, Any]) -> None:
    """Set all three to the states that `global_rng_state` returned."""
    version, words, gauss = json.loads(state["python"])
    random.setstate((version, tuple(words), gauss))
    numpy_state = json.loads(state["numpy"])
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], np.uint32)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    # The machine of a resume may show fewer devices, of which a run uses one.
    torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


@contextlib.contextmanager
def own_global_rng(seed: int) -> Iterator[None]:
    """Seed all three with `seed` while the block runs, and restore their states after it."""
    before = global_rng_state()
    seed_global_rng(seed)
    try:
        yield
    finally:
        restore_global_rng(before)
