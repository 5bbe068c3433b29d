"""Functions run as compiled programs: nothing is frozen between two calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import Programs
from torch import Tensor
from torch.profiler import profile

from rltemplate.learning import products
from rltemplate.learning.engine import Engine
from rltemplate.learning.networks import mlp
from rltemplate.learning.optim import FlatModule, gradient


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


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


@needs_onednn
@pytest.mark.parametrize("faster", [True, False])
def test_large_products_are_computed_by_onednn_where_it_is_faster(
    faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward with and without bias, backward to inputs and weights; the layer to one output is small."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: faster)
    network = FlatModule(mlp([256, 256, 256, 1], "relu", torch.Generator().manual_seed(0)))
    x, mixing = torch.linspace(-1.0, 1.0, 256 * 256).sin().view(256, 256), torch.eye(256)

    def loss(flat: Tensor) -> tuple[Tensor, Tensor]:
        y = network.call(flat, x @ mixing).square().mean()
        return y, y

    def update(flat: Tensor) -> tuple[Tensor, Tensor]:
        return gradient(loss, flat)

    compiled = Engine(compiles=True)
    compiled.run(update, network.initial)
    with profile() as seen:
        results = compiled.run(update, network.initial)
    torch.testing.assert_close(results, Engine().run(update, network.initial))
    calls = {event.key: event.count for event in seen.key_averages()}
    assert calls.get("rltemplate::product", 0) == (6 if faster else 0)


@needs_onednn
def test_onednn_multiplies_views_of_any_stride() -> None:
    # Small: with 256 rows these products took half a minute.
    x, vector = torch.linspace(-1.0, 1.0, 64 * 64).sin().view(64, 64), torch.linspace(0.0, 1.0, 64)
    views = [x[:32, :32].contiguous(), x[:32, ::2], x.t()[3:35, 5:37], vector[:1].expand(32, 32)]
    for a, b in itertools.product(views, repeat=2):
        for bias in (vector[:32], vector[::2], vector[5:6].expand(32)):
            by_onednn = torch.ops.rltemplate.product(a, b, bias)
            torch.testing.assert_close(by_onednn, torch.addmm(bias, a, b), atol=1e-4, rtol=1e-4)
