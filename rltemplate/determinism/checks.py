"""The promises of a level, tried on the run's own networks before the first step.

A check that fails stops the run and says what to use instead: a level is never silently less than its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rltemplate.determinism import golden, kernels, libraries
from rltemplate.determinism.levels import PROMISES, Switches
from rltemplate.types import ConfigError, ForwardPass

# Numbers of rows around those at which libraries change their kernels.
ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 33, 64, 100, 255, 256, 511)
_THREADS = (1, 2)
_REPETITIONS = 10
_RACES = 100
# Without deterministic algorithms a difference is a matter of time: threads that share a core with another
# program seldom meet. The search ends with the first difference.
_RACES_WITHOUT = 5000


def check_repeats(passes: Mapping[str, ForwardPass], device: torch.device, level: str) -> dict[str, Any]:
    """Equal inputs give equal bits, several times over: networks, back to their inputs, and indexing.

    The gradient of indexing is where torch's fast kernels add in the order in which threads arrive.
    """
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(50, (50_000,), generator=generator).to(device)
    weight = torch.randn(50_000, generator=generator).to(device)

    def indexed() -> list[Tensor]:
        table = torch.zeros(50, device=device, requires_grad=True)
        return list(torch.autograd.grad((table[index] * weight).sum(), table))

    tries: dict[str, Callable[[], list[Tensor]]] = {"a gradient of indexing": indexed}
    for name, each in passes.items():
        rows = torch.randn(max(each.batches), each.size, generator=generator).to(device)
        tries[f"the {name} network"] = partial(_forward_and_backward, each, rows)
    races = _RACES if torch.are_deterministic_algorithms_enabled() else _RACES_WITHOUT
    for name, again in tries.items():
        first = again()
        for _ in range((races if again is indexed else _REPETITIONS) - 1):
            if any(not torch.equal(a, b) for a, b in zip(first, again(), strict=True)):
                raise ConfigError(
                    f"determinism={level}: {name} gives different bits for equal inputs on this machine; "
                    "use num_threads=1, or determinism=fast"
                )
    return {"tried": list(tries), "repetitions": _REPETITIONS, "of_indexing": races, "holds": True}


def _forward_and_backward(each: ForwardPass, rows: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        leaf = rows.clone().requires_grad_()
        out = each.network(leaf)
        return [out.detach(), *torch.autograd.grad(out.sum(), leaf)]


def differing_rows(each: ForwardPass, device: torch.device) -> list[str]:
    """The batches in which a row's result depends on more than the row: empty if there are none.

    Each entry names a number of rows, and the threads: `8 rows on 1 thread`.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = sorted({*ROWS, *each.batches})
    rows = torch.randn(sizes[-1] + 37, each.size, generator=generator).to(device)
    found = []
    with torch.no_grad():
        with _threads(_THREADS[0]):
            reference = each.network(rows)
        for threads in _THREADS:
            with _threads(threads):
                for size in sizes:
                    for first in (0, 37):
                        part = each.network(rows[first : first + size])
                        if not torch.equal(part, reference[first : first + size]):
                            found.append(f"{size} rows on {threads} thread{'s' * (threads > 1)}")
                            break
    return found


def check_rows(passes: Mapping[str, ForwardPass], device: torch.device, products: str) -> dict[str, Any]:
    """A row's forward pass depends on that row alone: not on the rows beside it, nor on the threads."""
    for name, each in passes.items():
        found = differing_rows(each, device)
        if found:
            other = {"strict": "padded", "padded": "blas"}.get(products if device.type == "cpu" else "")
            instead = "determinism=repeat" if other is None else f"determinism.products={other}"
            raise ConfigError(
                f"determinism: with products={products} the {name} network gives a row other bits in a batch "
                f"of {found[0]} ({len(found)} such sizes); use {instead}"
            )
    sizes = sorted({*ROWS, *(size for each in passes.values() for size in each.batches)})
    return {"networks": list(passes), "rows": sizes, "threads": list(_THREADS), "holds": True}


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Trial:
    """A run that is about to begin.

    `products` is the way of matrix products in force, `physics` whether the environment uses MuJoCo.
    """

    switches: Switches
    passes: Mapping[str, ForwardPass]
    device: torch.device
    products: str
    physics: bool


def choose_products(trial: Trial) -> tuple[str, str | None]:
    """The way of matrix products for a level that leaves it open, and the problem of the usual way, if any.

    The usual way is in force. Where it is `padded` and a row depends on more than the row all the same, as
    for many layers of odd width, products are left to numpy's BLAS. What is decided here depends neither on
    the number of threads nor on groups of rows, for neither is to change a bit.
    """
    if trial.products != "padded" or libraries.openblas() is None:
        return trial.products, None
    try:
        with kernels.grouped(0):
            check_rows(trial.passes, trial.device, trial.products)
    except ConfigError as error:
        return "blas", str(error).partition("; use ")[0].removeprefix("determinism: ")
    return trial.products, None


# By name; each gives what it found, or raises `ConfigError`.
CHECKS: dict[str, Callable[[Trial], dict[str, Any]]] = {
    "golden": lambda trial: golden.check(trial.switches, trial.device.type, trial.physics),
    "repeats": lambda trial: check_repeats(trial.passes, trial.device, trial.switches.level.name),
    "rows": lambda trial: check_rows(trial.passes, trial.device, trial.products),
}


def promised(trial: Trial) -> list[str]:
    """Names of the checks that belong to what the level's name or one of its switches promises."""
    by_switch = {
        "golden": trial.switches.profile is not None,
        "repeats": trial.switches.deterministic_algorithms,
        "rows": trial.products != "plain",
    }
    level = PROMISES[trial.switches.level.name]
    return [name for name in CHECKS if name in level or by_switch[name]]
