"""What is no number is found, by name and place; and what merely adds up to none is not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rltemplate.run.finite import NotFinite, first_not_finite
from rltemplate.types import IterationResult

HUGE = 3e38  # twice as much is more than a float32 can be


def found_in(state: dict[str, Tensor], **metrics: Tensor) -> NotFinite | None:
    """The search after an iteration that ends with `state` and reports `metrics`."""
    algorithm: Any = SimpleNamespace(state_dict=lambda: state)
    named = {name.replace("_", "/"): value for name, value in metrics.items()}
    return first_not_finite(algorithm, IterationResult(named))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_single_element_is_found_wherever_it_is(bad: float, kind: torch.dtype) -> None:
    for place in range(6):
        values = torch.ones(2, 3, dtype=kind)
        values.view(-1)[place] = bad
        found = found_in({"first": torch.ones(3), "second": values, "third": values})
        assert found is not None
        assert (found.item, found.place, found.others) == (
            "end/second",
            [place // 3, place % 3],
            ["end/third"],
        )
        assert found.value == bad or (math.isnan(found.value) and math.isnan(bad))


def test_infinities_do_not_cancel() -> None:
    both = torch.tensor([math.inf, -math.inf])
    found = found_in({"a": both})
    assert found is not None
    assert found.place == [0]
    # Nor over two tensors.
    found = found_in({"a": both[:1], "b": both[1:]})
    assert found is not None
    assert (found.item, found.others) == ("end/a", ["end/b"])


def test_numbers_that_add_up_to_more_than_their_type_holds_are_numbers() -> None:
    huge = torch.full((8,), HUGE)
    assert math.isinf(huge.sum().item())
    assert found_in({"huge": huge, "half": torch.full((9,), 6e4, dtype=torch.float16)}) is None
    # Beside them something else is still found, and they are not blamed.
    found = found_in({"huge": huge, "bad": torch.tensor([0.0, math.nan])})
    assert found is not None
    assert (found.item, found.place, found.others) == ("end/bad", [1], [])


def test_losses_are_looked_at_and_other_metrics_are_not() -> None:
    nan = torch.tensor(math.nan)
    found = found_in({}, loss_policy=nan)
    assert found is not None
    assert (found.item, found.place) == ("loss/policy", [])
    assert found_in({}, value_explained=nan) is None
