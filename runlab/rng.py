"""Named random streams of one seed.

Nothing in the package draws from a global generator: code that needs randomness asks for a stream by name,
so that an extra draw in one place moves nothing in another. Streams are children of numpy's SeedSequence
(O'Neill's seed_seq_fe construction), which spreads adjacent seeds over unrelated states; seed 0 is a seed
like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runlab.interfaces import Probe


def seed_sequence(seed: int, name: str, index: int = 0) -> np.random.SeedSequence:
    """The root of the stream `name`/`index` of `seed`."""
    return np.random.SeedSequence(entropy=seed, spawn_key=(*name.encode(), 0, index))


def env_seeds(seed: int, name: str, num: int, index: int = 0) -> list[int]:
    """`num` independent environment seeds (63 bits each)."""
    words = seed_sequence(seed, name, index).generate_state(num, np.uint64)
    return [int(word) >> 1 for word in words]


class Streams:
    """The generators of one run, made on first use and kept, so that their states can be saved.

    Streams named in `on_cpu` draw there on every device, so that weights and orders are the same.
    """

    def __init__(
        self, seed: int, device: torch.device | str = "cpu", on_cpu: Collection[str] = ("init",)
    ) -> None:
        self.seed, self.on_cpu = seed, on_cpu
        self.device = torch.device(device)
        self.probe = Probe()
        self._torch: dict[str, torch.Generator] = {}

    def torch(self, name: str) -> torch.Generator:
        """The torch generator `name`."""
        if name not in self._torch:
            generator = torch.Generator("cpu" if name in self.on_cpu else self.device)
            generator.manual_seed(int(seed_sequence(self.seed, name).generate_state(1, np.uint64)[0] >> 1))
            self._torch[name] = generator
        return self._torch[name]

    def draw(self, name: str, sample: Callable[..., Tensor], *args: Any) -> Tensor:
        """`sample(*args, generator=...)` from the stream `name`."""
        value = sample(*args, generator=self.torch(name))
        self.probe.draw(name, value)
        return value

    def state_dict(self) -> dict[str, Any]:
        """The state of every stream used so far."""
        return {name: generator.get_state() for name, generator in self._torch.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue every stream from `state`."""
        for name, value in state.items():
            self.torch(name).set_state(value)
