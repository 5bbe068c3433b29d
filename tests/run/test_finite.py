"""What is no number is found, by name and place; and what merely adds up to none is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rltemplate.run.finite import first_not_finite
from rltemplate.types import IterationResult

HUGE = 3e38  # twice as much is more than a float32 can be


def result(probes: dict[str, Tensor], **metrics: Tensor) -> IterationResult:
    """An iteration that shows `probes` and reports `metrics`."""
    return IterationResult({name.replace("_", "/"): value for name, value in metrics.items()}, [], probes)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_single_element_is_found_wherever_it_is(bad: float, kind: torch.dtype) -> None:
    for place in range(6):
        values = torch.ones(2, 3, dtype=kind)
        values.view(-1)[place] = bad
        found = first_not_finite(result({"first": torch.ones(3), "second": values, "third": values}))
        assert found is not None
        assert (found.item, found.place, found.others) == ("second", [place // 3, place % 3], ["third"])
        assert found.value == bad or (math.isnan(found.value) and math.isnan(bad))


def test_infinities_do_not_cancel() -> None:
    both = torch.tensor([math.inf, -math.inf])
    found = first_not_finite(result({"a": both}))
    assert found is not None
    assert found.place == [0]
    # Nor over two tensors.
    found = first_not_finite(result({"a": both[:1], "b": both[1:]}))
    assert found is not None
    assert (found.item, found.others) == ("a", ["b"])


def test_numbers_that_add_up_to_more_than_their_type_holds_are_numbers() -> None:
    huge = torch.full((8,), HUGE)
    assert math.isinf(huge.sum().item())
    assert (
        first_not_finite(result({"huge": huge, "half": torch.full((9,), 6e4, dtype=torch.float16)})) is None
    )
    # Beside them something else is still found, and they are not blamed.
    found = first_not_finite(result({"huge": huge, "bad": torch.tensor([0.0, math.nan])}))
    assert found is not None
    assert (found.item, found.place, found.others) == ("bad", [1], [])


def test_losses_are_looked_at_and_other_metrics_are_not() -> None:
    nan = torch.tensor(math.nan)
    found = first_not_finite(result({}, loss_policy=nan))
    assert found is not None
    assert (found.item, found.place) == ("loss/policy", [])
    assert first_not_finite(result({}, value_explained=nan)) is None
