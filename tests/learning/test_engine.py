"""Functions run as compiled programs: the same values, with nothing frozen or kept between two calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from conftest import Programs
from torch import Tensor

from rltemplate.learning.engine import Engine
from rltemplate.learning.optim import AdamState, adam, gradient


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def mixed(pair: Pair, rest: list[Tensor]) -> tuple[Pair, Tensor, list[Tensor]]:
    total = pair.first @ pair.second + sum(rest)
    return Pair(total.tanh(), pair.second + 1.0), total.mean(), [total.sum(1), rest[0] * 2.0]


def arguments(rows: int, seed: int = 0) -> tuple[Pair, list[Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    first, second = torch.randn(rows, 4, generator=rng), torch.randn(4, 3, generator=rng)
    return Pair(first, second), [torch.randn(rows, 3, generator=rng), torch.randn(3, generator=rng)]


def step(state: AdamState, x: Tensor, rate: Tensor) -> tuple[Tensor, AdamState]:
    """One step of Adam down a slope."""
    grad, loss = gradient(lambda w: (((x @ w).tanh() - 1.0).square().mean(),) * 2, state.params)
    return loss, adam(state, grad, rate, 1e-5)


def test_a_program_gives_what_its_function_gives_and_keeps_nothing(programs: Programs) -> None:
    program = Engine(compiles=True)(mixed)
    kept = []
    for rows in (5, 1, 5, 8):
        given = arguments(rows)
        copies = [x.clone() for x in (*given[0], *given[1])]
        kept.append((program(*given), mixed(*given)))
        assert all(torch.equal(x, copy) for x, copy in zip((*given[0], *given[1]), copies, strict=True))
    torch.testing.assert_close([got for got, _ in kept], [expected for _, expected in kept])
    assert type(kept[0][0][0]) is Pair
    assert programs() == 3


def test_a_whole_update_is_one_program(programs: Programs) -> None:
    rng = torch.Generator().manual_seed(3)
    flat, x, rate = torch.randn(6, generator=rng), torch.randn(32, 6, generator=rng), torch.tensor(0.01)
    engine, start = Engine(compiles=True), AdamState.start(flat)
    with torch.no_grad():
        plain, fast = (engine.scan(each, start, [x] * 30, rate) for each in (step, engine(step)))
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    assert (plain[0].params - flat).abs().min() > 0.05
    assert programs() == 1


class Toy:
    """Explores less and less: by a number that is handed over, and by one that is read."""

    def __init__(self, engine: Engine) -> None:
        self.noise, self.factor = 0.5, 2.0
        self.act = engine(self.policy_step)

    def policy_step(self, x: Tensor, noise: float) -> Tensor:
        return x.tanh() * self.factor + noise

    def iterations(self, factors: list[float]) -> list[Tensor]:
        actions = []
        for self.factor in factors:
            actions.append(self.act(torch.linspace(-1.0, 1.0, 5), self.noise))
            self.noise -= 0.04
        return actions


def test_a_number_that_is_annealed_is_not_frozen(programs: Programs) -> None:
    annealed = [2.0] * 8 + [1.5] * 3 + [0.0]
    plain, compiled = (Toy(Engine(flag)).iterations(annealed) for flag in (False, True))
    torch.testing.assert_close(compiled, plain)
    assert programs() == 3
    assert len({float(action[0]) for action in plain}) == 12
    with pytest.raises(
        RuntimeError, match=r"Toy\.policy_step was compiled too often.*make the number an arg"
    ):
        Toy(Engine(compiles=True)).iterations([float(i) for i in range(12)])


def test_a_function_that_cannot_be_one_program_is_refused() -> None:
    def branches(x: Tensor) -> Any:
        return x + 1.0 if x.sum() > 0 else x

    with pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        Engine(compiles=True)(branches)(torch.zeros(3))
    assert Engine()(branches)(torch.ones(3)).tolist() == [2.0] * 3
