"""Check that this machine computes the bits of its profile, on fixed inputs before every run.

A profile names a class of machines, and holds one digest for each part of what a run computes with. The parts
go from single functions to whole updates: the first that differs is the cause of later differences. Nothing
here depends on the run's seed or networks, so that one set of digests serves all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from runlab.determinism import computations
from runlab.errors import ConfigError

if TYPE_CHECKING:
    from runlab.config.schema import DeterminismConfig


def check(switches: DeterminismConfig, physics: bool = True) -> dict[str, Any]:
    """Compute the digest of every part here, and compare it with the profile's.

    `physics` says whether the run's environment uses MuJoCo, which takes a tenth of a second to load. Raises
    `ConfigError` naming the parts that differ, the cause first, and what to use instead.
    """
    computed, golden = digests(physics), switches.golden
    differing = [
        f"{part} gives {digest} instead of {golden.get(part)}"
        for part, digest in computed.items()
        if digest != golden.get(part)
    ]
    if differing:
        raise ConfigError(
            f"determinism=profile: this machine is not of the class {switches.profile}: "
            f"{', '.join(differing)}; use determinism=invariant"
        )
    return {"profile": switches.profile, "digests": computed, "holds": True}


def digests(physics: bool = True) -> dict[str, str]:
    """The digest of every part, in order; of physics only if `physics`."""
    return {
        name: computations.digest(results())
        for name, results in PARTS.items()
        if physics or name != "physics"
    }


def _torch() -> computations.Results:
    for double in (False, True):
        yield from computations.pointwise(double)
        yield from computations.sums(double)
    yield from computations.random()


# In the order of `conf/determinism/profile.yaml`, which explains each part.
PARTS: Mapping[str, Callable[[], computations.Results]] = {
    "libm": computations.libm,
    "numpy": computations.numpy,
    "torch": _torch,
    **{name: partial(computations.elementary, name) for name in ("exp", "log", "sqrt", "tanh")},
    "products": computations.products,
    "update": computations.update,
    "physics": computations.physics,
}
