"""Digests of known computations name the first part that is computed differently, and change nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import flipped_bits
import numpy as np
import pytest
import torch
from conftest import Configure
from test_switches import answer
from torch.nn import functional

from runlab.determinism import computations, kernels, switches
from runlab.machine import cpu_identity
from runlab.run.computed import ComputationFacts, OtherComputation, first_other

SCRIPT = """
import json, sys
from runlab.config.loading import from_dict
from runlab.determinism import computations, switches

config = from_dict(json.loads(sys.stdin.read()))
settings = switches.apply(config)
print(json.dumps(computations.digests(computations.CPU, False, False, f"{settings}")))
"""
# Variables by which libraries take code for another processor, and the parts that this code computes.
OTHERS = {
    "ATEN_CPU_CAPABILITY": ("default", {"elementary"}),
    "MKL_CBWR": ("COMPATIBLE", {"elementary", "products"}),
    "ONEDNN_MAX_CPU_ISA": ("SSE41", {"convolution"}),
}
numbers = count()


def now() -> ComputationFacts:
    """The digests of this process, without those that were computed before."""
    made = computations.digests(computations.CPU, False, True, f"{next(numbers)}")
    return ComputationFacts(definition=computations.definition(), digests=made)


def first(a: dict[str, str], b: dict[str, str]) -> OtherComputation | None:
    return first_other(ComputationFacts(digests=a), ComputationFacts(digests=b))


@pytest.mark.skipif("avx2" not in cpu_identity()[1], reason="the variables are about processors with AVX2")
@pytest.mark.long
def test_other_code_of_a_library_and_other_threads_are_named_and_equal_processes_are_not(
    configure: Configure,
) -> None:
    base, two = (configure(f"num_threads={threads}") for threads in (1, 2))
    jobs = [(base, {}), (base, {"PYTHONHASHSEED": "5", "SOME_VARIABLE": "x" * 999}), (two, {})]
    jobs += [(base, {name: value}) for name, (value, _) in OTHERS.items()]
    with ThreadPoolExecutor(2) as pool:
        here, again, threads, *others = pool.map(lambda job: answer(SCRIPT, *job), jobs)
    assert list(here) == [name for name in computations.PARTS if name not in ("compiled products", "physics")]
    assert first(here, again) is None
    other = first(here, threads)
    assert other is not None
    assert other.part in ("sums", "products")
    for (name, (_, parts)), digests in zip(OTHERS.items(), others, strict=True):
        other = first(here, digests)
        assert other is not None, name
        assert other.part in parts, name


def with_flipped_bit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose results have another last bit; a gradient is that of the function."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        y = function(*args, **kwargs)
        if isinstance(y, torch.Tensor):
            y.data.copy_(flipped_bits.flipped(y))
            return y
        return flipped_bits.flipped(y)

    return wrong


ALL = [name for name in computations.PARTS if name != "compiled products"]


@pytest.mark.parametrize(
    ("place", "name", "changed"),
    [
        (math, "tan", ["libm"]),
        (np, "tanh", ["numpy"]),
        (torch, "randperm", ["random"]),
        (torch, "log1p", ["elementary"]),
        (kernels, "tanh", ["elementary"]),
        (kernels, "sqrt", ["elementary", "update"]),
        (kernels, "total", ["sums", "update"]),
        (kernels, "linear", ["products", "update"]),
        (kernels, "by_rows", ["products"]),
        (functional, "conv2d", ["convolution"]),
        (kernels, "elu", ["update"]),
    ],
)
def test_one_bit_is_named_by_its_part(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, changed: list[str]
) -> None:
    before = now()
    assert list(before.digests) == ALL
    monkeypatch.setattr(place, name, with_flipped_bit(getattr(place, name)))
    after = now()
    assert [part for part in ALL if before.digests[part] != after.digests[part]] == changed
    other = first_other(before, after)
    assert other is not None
    assert (other.part, other.before) == (changed[0], ALL[: ALL.index(changed[0])])
    assert {*other.before, *other.after, *changed} == {*ALL}
    monkeypatch.undo()
    assert first_other(before, now()) is None


def test_nothing_of_the_process_is_changed_or_drawn() -> None:
    def state() -> list[Any]:
        generators = [random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist()]  # noqa: NPY002
        return [*map(repr, generators), switches.read_back()]

    before = state()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            now()
    assert state() == before
    torch.rand(())
    assert state() != before  # a draw is seen


def test_digests_are_computed_once_for_equal_settings_without_parts_that_cannot_be_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[torch.device] = []

    def sums(device: torch.device) -> list[Any]:
        calls.append(device)
        return []

    def cannot(_: torch.device) -> list[Any]:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(computations, "PARTS", {"random": cannot, "sums": sums, "physics": sums})
    name = f"{next(numbers)}"
    one, again = (computations.digests(computations.CPU, False, False, name) for _ in range(2))
    assert (one, [*one], calls) == (again, ["sums"], [computations.CPU])
    computations.digests(computations.CPU, False, False, f"{next(numbers)}")
    assert len(calls) == 2


@pytest.mark.parametrize("part", ["elementary", "sums", "products", "convolution", "update"])
def test_every_tensor_is_on_the_device_of_the_run(part: str) -> None:
    """On a device without numbers, which refuses operations with tensors of the CPU as a GPU does."""
    results = [*computations.PARTS[part](torch.device("meta"))]
    assert len(results) > 5
    assert {each.device.type for each in results} == {"meta"}
