"""Functions as compiled programs: the same values, for every shape, with nothing kept between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rltemplate.learning.engine import Programs, traced
from rltemplate.learning.optim import (
    AdamState,
    adam,
    adam_init,
    gradient,
)


class Products(TorchDispatchMode):
    """Notes how many columns products of matrices have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.columns: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.columns.append(result.shape[-1])
        return result


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def mixed(pair: Pair, rest: list[Tensor]) -> tuple[Pair, Tensor, list[Tensor]]:
    total = pair.first @ pair.second + sum(rest)
    return Pair(total.tanh(), pair.second), total.mean(), [total.sum(1), *rest]


def arguments(rows: int, seed: int = 0) -> tuple[Pair, list[Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    first, second = torch.randn(rows, 4, generator=rng), torch.randn(4, 3, generator=rng)
    return Pair(first, second), [torch.randn(rows, 3, generator=rng), torch.randn(3, generator=rng)]


def step(flat: Tensor, state: AdamState, x: Tensor, rate: Tensor) -> tuple[Tensor, AdamState, Tensor]:
    """One step of Adam down a slope."""
    grad, loss = gradient(lambda w: (((x @ w).tanh() - 1.0).square().mean(),) * 2, flat)
    flat, state = adam(flat, grad, state, rate, 1e-5)
    return flat, state, loss


def test_a_program_gives_what_its_function_gives_in_the_same_nesting() -> None:
    programs = Programs(compiles=True)
    program = programs(mixed)
    for rows in (5, 1, 5, 8):  # each number of rows has strides of its own
        torch.testing.assert_close(program(*arguments(rows)), mixed(*arguments(rows)))
    assert type(program(*arguments(5))[0]) is Pair
    assert programs.made == 3


def test_rows_that_lie_otherwise_in_memory_are_not_mistaken() -> None:
    program = Programs(compiles=True)(lambda x: x.cumsum(0) * 2.0)
    x = torch.arange(12.0).view(3, 4)
    for given in (x, x.T, x[:, ::2], x.T.contiguous().T):
        torch.testing.assert_close(program(given), given.cumsum(0) * 2.0)


def test_results_stay_what_they_are_and_arguments_too() -> None:
    program = Programs(compiles=True)(mixed)
    pair, rest = arguments(5)
    copies = [x.clone() for x in (*pair, *rest)]
    first = program(pair, rest)
    kept = first[0].first.clone()
    program(*arguments(5, seed=1))
    assert torch.equal(first[0].first, kept)
    assert all(torch.equal(x, copy) for x, copy in zip((*pair, *rest), copies, strict=True))


def test_a_whole_update_is_one_program() -> None:
    programs = Programs(compiles=True)
    rng = torch.Generator().manual_seed(3)
    flat, x, rate = torch.randn(6, generator=rng), torch.randn(32, 6, generator=rng), torch.tensor(0.01)
    plain = fast = (flat, adam_init(flat), torch.zeros(()))
    update = programs(step)
    for _ in range(30):
        plain, fast = step(*plain[:2], x, rate), update(*fast[:2], x, rate)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    assert (plain[0] - flat).abs().min() > 0.05
    assert programs.made == 1


def test_a_compiled_tanh_is_as_good_as_its_promise() -> None:
    """On every 97th float32 between 1e-30 and 20, of either sign."""
    bits = torch.arange(0x0DA24260, 0x41A00000, 97, dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    y = Programs(compiles=True)(torch.tanh)(x)
    exact = x.double().tanh()
    assert (y - exact).abs().max() <= 4e-7
    small = x.abs() < 1.0
    assert ((y - exact) / exact)[small].abs().max() <= 3e-7
    assert y.abs().max() == 1.0
    assert not torch.equal(y, x.tanh())  # or nothing was replaced


def test_a_compiled_tanh_has_a_gradient_and_keeps_what_is_no_number() -> None:
    x = torch.tensor([-torch.inf, -30.0, -0.5, 0.0, 1e-40, 0.7, 30.0, torch.inf, torch.nan])
    program = Programs(compiles=True)(lambda x: (x.tanh(), torch.func.grad(lambda z: z.tanh().sum())(x)))
    y, slope = program(x)
    torch.testing.assert_close(y, x.tanh(), rtol=3e-7, atol=4e-7, equal_nan=True)
    torch.testing.assert_close(slope, 1.0 - x.tanh().square(), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_compiled_tanh_of_doubles_is_the_compilers_own() -> None:
    x = torch.linspace(-4.0, 4.0, 999, dtype=torch.float64)
    torch.testing.assert_close(Programs(compiles=True)(torch.tanh)(x), x.tanh(), rtol=1e-14, atol=1e-15)


def slope(weights: Tensor, obs: Tensor, action: Tensor) -> Any:
    """Of the sum of two layers by the action alone, which stands beside observations."""

    def outputs(action: Tensor) -> Any:
        inputs = torch.cat([obs, action], 1)
        first, second = weights
        return ((inputs @ first).square() + (inputs @ second).cos()).sum()

    return torch.func.grad(outputs)(action)


def test_columns_that_nobody_uses_are_not_computed() -> None:
    rng = torch.Generator().manual_seed(1)
    arguments = [torch.randn(*shape, generator=rng) for shape in ((2, 9, 5), (6, 7), (6, 2))]
    module = traced(lambda *values: [slope(*values)], arguments)
    module.graph.lint()
    (result,) = module(*arguments)
    torch.testing.assert_close(result, slope(*arguments), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(Programs(compiles=True)(slope)(*arguments), result, rtol=1e-5, atol=1e-5)
    with Products() as seen:
        module(*arguments)
    # Two forwards of 5 columns, two backwards of 2 in the place of 9.
    assert sorted(seen.columns) == [2, 2, 5, 5]
    with Products() as plain:
        slope(*arguments)
    assert sorted(plain.columns) == [5, 5, 9, 9]


CUT: dict[str, tuple[Callable[[Tensor, Tensor], list[Tensor]], list[int]]] = {
    # And how many columns are computed of products with six.
    "once": (lambda x, y: [(x @ y)[:, 1:4]], [3]),
    "once more": (lambda x, y: [(x @ y)[:, 1:6][:, :2]], [2]),
    "a sum": (lambda x, y: [((x @ y)[:, 1:5] + (x @ (y * 2.0))[:, 1:5])[:, 1:2]], [1, 1]),
    "from the end": (lambda x, y: [(x @ y)[:, -2:]], [2]),
    "one twice": (lambda x, y: [(lambda p: p + p)(x @ y)[:, :2]], [6]),
    "used elsewhere": (lambda x, y: [(lambda p: p[:, 1:3] * p.sum())(x @ y)], [6]),
    "a sum used elsewhere": (lambda x, y: [(lambda p: p[:, 1:3] * p.sum())(x @ y + x @ y.cos())], [6, 6]),
    "rows": (lambda x, y: [(x @ y)[1:3]], [6]),
    "with something else": (lambda x, y: [(x @ y + 1.0)[:, 3:]], [6]),
    "broadcast": (lambda x, y: [(x @ y + x[:1] @ y)[:, 3:]], [6, 6]),
}


@pytest.mark.parametrize("way", CUT)
def test_columns_are_left_out_where_nobody_else_uses_them(way: str) -> None:
    function, expected = CUT[way]
    arguments = [torch.randn(4, 3), torch.randn(3, 6)]
    module = traced(function, arguments)
    module.graph.lint()
    with Products() as seen:
        (result,) = module(*arguments)
    torch.testing.assert_close(result, function(*arguments)[0])
    torch.testing.assert_close(Programs(compiles=True)(function)(*arguments)[0], result)
    assert sorted(seen.columns) == expected


def test_a_function_that_uses_what_may_change_is_refused() -> None:
    """Its value of today would be in the program for good."""
    hidden = torch.ones(3)
    with pytest.raises(AssertionError, match="FakeTensor"):
        Programs(compiles=True)(lambda x: x + hidden)(torch.zeros(3))


def test_without_compiling_a_function_is_itself() -> None:
    programs = Programs()
    torch.testing.assert_close(programs(mixed)(*arguments(5)), mixed(*arguments(5)), rtol=0, atol=0)
    assert programs.made == 0
