"""NaN and infinity are found by name and index, and sums that merely overflow are not."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rltemplate.run.state import first_not_finite
from rltemplate.types import IterationResult


def found(state: dict[str, Tensor], **metrics: Tensor) -> str | None:
    """The answer for an iteration that ends with `state` and reports `metrics`."""
    algorithm: Any = SimpleNamespace(state_dict=lambda: state)
    named = {name.replace("_", "/"): value for name, value in metrics.items()}
    return first_not_finite(algorithm, IterationResult(named))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
def test_a_single_element_is_found_wherever_it_is(kind: torch.dtype) -> None:
    for bad, index in itertools.product((math.nan, math.inf, -math.inf), range(6)):
        values = torch.ones(2, 3, dtype=kind)
        values.view(-1)[index] = bad
        answer = found({"first": torch.ones(3), "second": values, "third": values})
        assert answer == f"end/second became {bad} at {[index // 3, index % 3]}"


def test_infinities_do_not_cancel_and_large_sums_are_no_infinities() -> None:
    both, huge = torch.tensor([math.inf, -math.inf]), torch.full((8,), 3e38)
    assert found({"a": both}) == "end/a became inf at [0]"
    assert math.isinf(huge.sum().item())
    assert found({"huge": huge, "half": torch.full((9,), 6e4, dtype=torch.float16)}) is None
    assert found({"huge": huge, "bad": torch.tensor([0.0, math.nan])}) == "end/bad became nan at [1]"


def test_losses_are_searched_and_other_metrics_are_not() -> None:
    nan = torch.tensor(math.nan)
    assert found({}, loss_policy=nan) == "loss/policy became nan at []"
    assert found({}, value_explained=nan) is None
