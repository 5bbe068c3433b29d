"""Functions run as compiled programs: nothing is frozen between two calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Programs
from torch import Tensor

from rltemplate.learning.engine import Engine


class Toy:
    """Explores less and less: by a number that is handed over, and by one that is read."""

    def __init__(self, engine: Engine) -> None:
        self.noise, self.factor = 0.5, 2.0
        self.engine = engine

    def policy_step(self, x: Tensor, noise: float) -> Tensor:
        return x.tanh() * self.factor + noise

    def iterations(self, factors: list[float]) -> list[Tensor]:
        actions = []
        for self.factor in factors:
            actions.append(self.engine.run(self.policy_step, torch.linspace(-1.0, 1.0, 5), self.noise))
            self.noise -= 0.04
        return actions


def test_a_number_that_is_annealed_is_not_frozen(programs: Programs) -> None:
    annealed = [2.0] * 8 + [1.5] * 4
    with torch._dynamo.config.patch(recompile_limit=2):  # instead of 8
        plain, compiled = (Toy(Engine(flag)).iterations(annealed) for flag in (False, True))
        torch.testing.assert_close(compiled, plain)
        assert programs() == 2
        assert len({float(action[0]) for action in plain}) == 12
        with pytest.raises(RuntimeError, match=r"Toy\.policy_step was compiled too often.*make the number"):
            Toy(Engine(compiles=True)).iterations([2.0, 1.5, 1.0])


def test_a_function_that_cannot_be_one_program_is_refused() -> None:
    def branches(x: Tensor) -> Any:
        return x + 1.0 if x.sum() > 0 else x

    with pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        Engine(compiles=True).run(branches, torch.zeros(3))
    assert Engine().run(branches, torch.ones(3)).tolist() == [2.0] * 3
