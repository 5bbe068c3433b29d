"""The promises of a level, tried on the run's own networks before the first step.

A check that fails stops the run and says what to use instead: a level is never silently less than its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runlab.determinism import golden, kernels
from runlab.determinism.levels import PROMISES
from runlab.determinism.libraries import openblas_kernels
from runlab.determinism.switches import resolve_device, use_blas_threads
from runlab.errors import ConfigError
from runlab.interfaces import Algorithm, ForwardPass, forward_passes_of
from runlab.machine import blas_kernels

if TYPE_CHECKING:
    from runlab.config.schema import Config, DeterminismConfig

Passes = Mapping[str, ForwardPass]  # of the run's algorithm

# Numbers of rows near the sizes at which libraries change their kernels.
ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 33, 64, 100, 255, 256, 511)
_MOST_NUMBERS = 2**20  # in the images of a call that is made several times: more would take a minute
_THREADS = (1, 2)
_REPETITIONS = 10
_RACES = 100
# Without deterministic algorithms the bits differ sooner or later: on a busy core, threads rarely add at the
# same time. The search ends with the first difference.
_RACES_WITHOUT = 5000


def passes_of(algorithm: Algorithm, config: Config, names: Sequence[str]) -> Passes:
    """The networks of an algorithm for the checks `names`; `ConfigError` if these need networks it hides."""
    passes = forward_passes_of(algorithm)
    if passes is None and "rows" in names:
        level = config.determinism.level.name
        raise ConfigError(
            f"determinism={level}: algo={config.algo.name} shows no networks (forward_passes), so that no "
            "row can be tested; use determinism=repeat"
        )
    return passes or {}


def check_repeats(config: Config, passes: Passes) -> dict[str, Any]:
    """Equal inputs give equal bits, several times: networks, gradients of their inputs, and indexing.

    In the gradient of indexing, torch's fast kernels add in the order in which threads arrive: on the CPU
    those of `table[index]`, on a GPU those of `index_select`.
    """
    generator, device = torch.Generator().manual_seed(0), resolve_device(config.device.name)
    index = torch.randint(50, (50_000,), generator=generator).to(device)
    weight = torch.randn(50_000, generator=generator).to(device)

    def indexed() -> list[Tensor]:
        table = torch.zeros(50, device=device, requires_grad=True)
        rows = table.index_select(0, index) if device.type == "cuda" else table[index]
        return list(torch.autograd.grad((rows * weight).sum(), table))

    races = _RACES if torch.are_deterministic_algorithms_enabled() else _RACES_WITHOUT
    tries: dict[str, tuple[int, Callable[[], list[Tensor]]]] = {"a gradient of indexing": (races, indexed)}
    for name, each in passes.items():
        num_rows = min(_most_rows(each), max(each.batches))
        rows = torch.randn(num_rows, each.size, generator=generator).to(device)
        tries[f"the {name} network"] = _REPETITIONS, partial(_forward_and_backward, each, rows)
    for name, (times, again) in tries.items():
        first = again()
        for _ in range(times - 1):
            if any(not torch.equal(a, b) for a, b in zip(first, again(), strict=True)):
                threads = "num_threads=1, or " if device.type == "cpu" else ""
                raise ConfigError(
                    f"determinism={config.determinism.level.name}: {name} gives different bits for equal "
                    f"inputs on this machine; use {threads}determinism=fast"
                )
    return {"tried": {name: times for name, (times, _) in tries.items()}, "holds": True}


def _most_rows(each: ForwardPass) -> int:
    """The largest batch of a network that is tried several times."""
    return max(1, _MOST_NUMBERS // each.size) if each.convolves else sys.maxsize


def _forward_and_backward(each: ForwardPass, rows: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        leaf = rows.clone().requires_grad_()
        out = each.network(leaf)
        return [out.detach(), *torch.autograd.grad(out.sum(), leaf)]


def check_rows(config: Config, passes: Passes) -> dict[str, Any]:
    """A row's forward pass depends on that row alone: not on the rows beside it, nor on the threads."""
    device, products = resolve_device(config.device.name), config.determinism.products.name
    products = kernels.chosen.products if products == "auto" else products
    for name, each in passes.items():
        where = differing_rows(each, device)
        if where is not None:
            instead = _instead(config, passes, products) if device.type == "cpu" else None
            raise ConfigError(
                f"determinism: with products={products} the {name} network gives a row other bits in a "
                f"batch of {where}; use {instead or 'determinism=repeat'}"
            )
    return {"networks": list(passes), "threads": list(_THREADS), "holds": True}


def _instead(config: Config, passes: Passes, products: str) -> str | None:
    """The argument in the place of `products` with which all networks were tried and hold; None if none does.

    Another branch of MKL cannot be tried in this process.
    """
    kernels_name, before = blas_kernels("blas"), replace(kernels.chosen)
    tried = products == "blas" and config.determinism.blas_kernels == kernels_name
    impossible = any(each.convolves for each in passes.values())
    if kernels_name is None or tried or impossible or products not in ("strict", "padded", "blas"):
        return None
    try:
        use_blas_threads(1)
        kernels.use("blas", before.row_groups)
        with openblas_kernels(kernels_name) as usable:
            holds = usable and not any(differing_rows(each, torch.device("cpu")) for each in passes.values())
    finally:
        kernels.use(before.products, before.row_groups)
    instead = f"blas_kernels={kernels_name}" if products == "blas" else "products=blas"
    return f"determinism.{instead}" if holds else None


def differing_rows(each: ForwardPass, device: torch.device) -> str | None:
    """The first batch in which a row's result depends on more than the row, such as `8 rows on 1 thread`.

    With images, the large batches that training has are tried in one place, and others are not.
    """
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    sizes, most = sorted({*ROWS, *each.batches}), _most_rows(each)
    batches = [(size, first) for size, first in product(sizes, (0, 37)) if size <= most]
    batches += [(size, 0) for size in sizes if most < size and size in each.batches]
    rows = torch.randn(max(size for size, _ in batches) + 37, each.size, generator=generator).to(device)
    try:
        torch.set_num_threads(_THREADS[0])
        with torch.no_grad():
            reference = each.network(rows)
            for threads, (size, first) in product(_THREADS, batches):
                torch.set_num_threads(threads)
                if not torch.equal(each.network(rows[first : first + size]), reference[first : first + size]):
                    return f"{size} rows on {threads} thread{'s' * (threads > 1)}"
    finally:
        torch.set_num_threads(before)
    return None


# The checks by name. Each returns its findings, or raises `ConfigError`.
CHECKS: dict[str, Callable[[Config, Passes], dict[str, Any]]] = {
    # The environments were made before: one that uses MuJoCo has imported it.
    "golden": lambda config, _: golden.check(config.determinism, physics="mujoco" in sys.modules),
    "repeats": check_repeats,
    "rows": check_rows,
}


def promised(switches: DeterminismConfig) -> list[str]:
    """Names of the checks that belong to the promises of the level's name and of its switches."""
    by_switch = {
        "golden": switches.profile is not None,
        "repeats": switches.deterministic_algorithms,
        "rows": kernels.chosen.products != "plain",
    }
    level = PROMISES[switches.level.name]
    return [name for name in CHECKS if name in level or by_switch[name]]
