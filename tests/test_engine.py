"""Functions run as compiled programs: nothing is frozen between two calls."""

from __future__ import annotations

import itertools
import signal
import subprocess
from typing import Any, NamedTuple, cast

import pytest
import torch
from conftest import ON_LEARNING, TRIED_IN, Configure, Programs, small
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import fresh_cache
from torch.profiler import profile
from torch.utils import _pytree as pytree

from rltemplate import train
from rltemplate.learning.networks import mlp
from rltemplate.learning.optim import FlatModule, gradient
from runlab import engine as engines
from runlab.determinism import onednn as products
from runlab.engine import CompilerError, Engine, _one_by_one
from runlab.envs.global_rng import global_rng_state, seed_global_rng
from runlab.interfaces import Algorithm, Probe
from runlab.run.trace import digest, entries
from runlab.trial import WrongProgramError, compare_programs


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


def test_signals_do_not_reach_the_processes_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C goes to the whole process group, and would end them: they inherit what is blocked."""

    def compiles(x: Tensor) -> Tensor:
        status = subprocess.run(
            ["cat", "/proc/self/status"], capture_output=True, text=True, check=True
        ).stdout
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        return x + bool(blocked & 1 << signal.SIGINT - 1)

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    engine = Engine(compiles=True)
    seen = [int(engine.run(compiles, torch.zeros(()))) for _ in range(9)]
    assert seen == [1] * 8 + [0]  # a program that has been called so often does not compile any more


class Row(NamedTuple):
    x: Tensor  # (3,)
    weight: Tensor  # ()


class State(NamedTuple):
    mean: Tensor  # (3,)
    kept: Tensor  # (3,) handed on as it is; at the start the same memory as `mean`
    steps: Tensor  # ()


class Report(NamedTuple):
    metrics: Tensor  # (3,)
    new: tuple[Tensor, ...]  # the memory of the state; the last loop returns another number of them


class Shown(Probe):
    """The results of each update."""

    def __init__(self, stepwise: bool) -> None:
        self.stepwise = stepwise
        self.seen: list[Any] = []

    def results(self, event: str, values: Any, whole: bool = False) -> None:
        assert event == "update"
        self.seen.append(values)


class Chain:
    factor = 0.5

    def update(self, state: State, row: Row, rate: Tensor, bias: float) -> tuple[Report, State]:
        error = self.factor * row.weight * (row.x - state.mean) + bias
        new = State(state.mean + rate * error, state.kept, state.steps + 1.0)
        return Report(error, (new.mean, new.kept) if self.factor < 0.5 else (new.mean,)), new


def chained(engine: Engine, updates: int = 4) -> list[Any]:
    """States and metrics of three loops, of which each goes on from the one before with other numbers."""
    chain, zeros, results = Chain(), torch.zeros(3), []
    state = State(zeros, zeros, torch.zeros(()))
    rows = Row(torch.linspace(-1.0, 1.0, 3 * updates).view(updates, 3), torch.arange(1.0, updates + 1.0))
    for number in (1.0, 2.0, 3.0):
        chain.factor = 0.5 if number < 3.0 else 0.25
        state, metrics = engine.scan(chain.update, state, rows, torch.tensor(0.1 * number), 0.01 * number)
        results.append((state, metrics))
    return results


@pytest.mark.parametrize("updates", [1, 4])
def test_a_loop_of_updates_is_one_program_with_the_results_of_single_ones(
    updates: int, programs: Programs
) -> None:
    """Numbers that change between loops are not frozen in it, handed over or read."""
    plain = chained(Engine(), updates)
    assert programs() == 0
    torch.testing.assert_close(chained(Engine(compiles=True), updates), plain)
    assert programs() == 3  # of both factors, and of the start, whose leaves share memory
    assert [tuple(state.steps.tolist() for state, _ in plain)] == [(updates, 2.0 * updates, 3.0 * updates)]
    assert all(metrics.shape == (updates, 3) for _, metrics in plain)


@pytest.mark.long
def test_the_next_process_finds_the_program_of_a_loop_and_no_other(programs: Programs) -> None:
    """The number is a constant of the program. Only the compiler's files are left between two of these."""
    rows, zeros, found = Row(torch.ones(4, 3), torch.arange(1.0, 5.0)), torch.zeros(3), []
    with fresh_cache():
        for factor in (0.5, 0.75, 0.5):
            torch.compiler.reset()
            counters.clear()
            chain, start = Chain(), State(zeros, zeros + 1.0, torch.zeros(()))
            chain.factor = factor
            plain, compiled = (
                Engine(compiles).scan(chain.update, start, rows, zeros + 0.1, 0.2)
                for compiles in (False, True)
            )
            torch.testing.assert_close(compiled, plain)
            found.append((programs(), counters["aot_autograd"]["autograd_cache_hit"]))
    assert found == [(1, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize("deterministic", [True, False])
def test_programs_for_a_gpu_are_graphs_whose_results_are_copied(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Tried without a GPU: torch then runs the same program without a graph."""
    options, compile_ = list[Any](), cast(Any, torch.compile)

    def noted(function: Any, **how: Any) -> Any:
        options.append(how["options"])
        program, kept = compile_(function, **how) if deterministic else function, torch.zeros(3)
        return lambda *args: kept.copy_(program(*args)) if function.__name__ == "shift" else program(*args)

    def shift(x: Tensor) -> Tensor:
        return x + 1.0

    monkeypatch.setattr(torch, "compile", noted)
    torch.use_deterministic_algorithms(deterministic)
    try:
        engine = Engine(compiles=True, device=torch.device("cuda"))
        first, second = engine.run(shift, torch.zeros(3)), engine.run(shift, torch.ones(3))
        assert (first.tolist(), second.tolist()) == ([1.0] * 3, [2.0] * 3)
        torch.testing.assert_close(chained(engine), chained(Engine()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert options == [{"triton.cudagraphs": True, "deterministic": deterministic}] * 2


@pytest.mark.parametrize("stepwise", [False, True])
def test_updates_of_a_loop_are_shown_one_by_one_if_they_are_looked_at(stepwise: bool) -> None:
    plain, compiled = Engine(), Engine(compiles=True)
    for engine in (plain, compiled):
        engine.probe = Shown(stepwise)
        chained(engine)
    assert isinstance(plain.probe, Shown)
    assert isinstance(compiled.probe, Shown)
    assert len(plain.probe.seen) == 12
    torch.testing.assert_close(compiled.probe.seen, plain.probe.seen if stepwise else [])


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


@needs_onednn
@pytest.mark.parametrize("faster", [True, False])
def test_large_products_are_computed_by_onednn_where_it_is_faster(
    faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward with and without bias, backward to inputs and weights; the layer to one output is small."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: faster)
    network: FlatModule[Tensor] = FlatModule(
        mlp([256, 256, 256, 1], "relu", torch.Generator().manual_seed(0))
    )
    x, mixing = torch.linspace(-1.0, 1.0, 256 * 256).sin().view(256, 256), torch.eye(256)

    def loss(params: Tensor) -> tuple[Tensor, Tensor]:
        y = network.apply(params, x @ mixing).square().mean()
        return y, y

    def update(params: Tensor) -> tuple[Tensor, Tensor]:
        return gradient(loss, params)

    compiled = Engine(compiles=True)
    compiled.run(update, network.init_params)
    with profile() as seen:
        results = compiled.run(update, network.init_params)
    torch.testing.assert_close(results, Engine().run(update, network.init_params))
    calls = {event.key: event.count for event in seen.key_averages()}
    assert calls.get("runlab::product", 0) == (6 if faster else 0)


@needs_onednn
@pytest.mark.parametrize(
    ("vendor", "family", "faster"),
    [("AuthenticAMD", 26, True), ("AuthenticAMD", 25, False), ("GenuineIntel", 26, False)],
)
def test_onednn_is_taken_from_zen_5_on(
    vendor: str, family: int, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "cpu_identity", lambda: (vendor, frozenset({"avx512f"})))
    monkeypatch.setattr(products, "cpu_family", lambda: family)
    assert products.onednn_is_faster() is faster


@needs_onednn
def test_onednn_multiplies_views_of_any_stride() -> None:
    # Small: with 256 rows these products took half a minute.
    x, vector = torch.linspace(-1.0, 1.0, 64 * 64).sin().view(64, 64), torch.linspace(0.0, 1.0, 64)
    views = [x[:32, :32].contiguous(), x[:32, ::2], x.t()[3:35, 5:37], vector[:1].expand(32, 32)]
    for a, b in itertools.product(views, repeat=2):
        for bias in (vector[:32], vector[::2], vector[5:6].expand(32)):
            by_onednn = torch.ops.runlab.product(a, b, bias)
            torch.testing.assert_close(by_onednn, torch.addmm(bias, a, b), atol=1e-4, rtol=1e-4)


def state_of(algorithm: Algorithm) -> Any:
    """Digests of all that an algorithm and the global generators hold."""
    return {
        name: digest(value)
        for part in (algorithm.state_dict(), global_rng_state())
        for name, value in entries(part, "")
    }


@pytest.mark.usefixtures("traced_only")
@pytest.mark.long
@pytest.mark.parametrize(("algo", "stepwise"), [*((name, False) for name in ON_LEARNING), ("ppo", True)])
def test_a_trial_compiles_what_the_run_will_call_and_changes_nothing(
    algo: str, stepwise: bool, configure: Configure, programs: Programs
) -> None:
    config = configure(*small(algo, "compile=true", "algo.policy_delay=2", env=TRIED_IN[algo]))
    counted, ends = list[int](), list[Any]()
    for tries in (True, False):
        torch.compiler.reset()
        seed_global_rng(1)
        algorithm: Any = train.build(config)[0]
        algorithm.probe = Probe()
        algorithm.probe.stepwise = stepwise
        begun, before = programs(), state_of(algorithm)
        if tries:
            compare_programs(algorithm, stepwise)
            assert state_of(algorithm) == before
            assert programs() - begun > 2
        for _ in range(3):
            algorithm.train_iteration()
        counted.append(programs() - begun)
        ends.append(state_of(algorithm))
        algorithm.close()
    assert ends[0] == ends[1]
    assert counted[0] - counted[1] == 1  # the one that asks whether anything is compiled


@pytest.mark.parametrize("algo", ON_LEARNING)
def test_a_wrong_program_is_named(algo: str, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that was made for other vector instructions, in any result of any function."""
    algorithm: Any = train.build(configure(*small(algo, "compile=true", env=TRIED_IN[algo])))[0]
    places, wrong = set[tuple[str, int]](), ("", 0)

    def compiled(function: Any, **_: Any) -> Any:
        name = function.__name__

        def program(*arguments: Any) -> Any:
            leaves, form = pytree.tree_flatten(function(*arguments))
            places.update((name, place) for place in range(len(leaves)))
            leaves = [1.01 * x + 0.01 if (name, at) == wrong else x for at, x in enumerate(leaves)]
            return torch.ones(()) if name == "_is_compiled" else pytree.tree_unflatten(leaves, form)

        return program

    def loop(function: Any, _: bool) -> Any:
        def update(state: Any, inputs: Any, *constants: Any) -> Any:
            return _one_by_one(function, state, inputs, constants)

        return update

    monkeypatch.setattr(engines, "_loop", loop)
    monkeypatch.setattr(torch, "compile", compiled)
    compare_programs(algorithm, False)
    tried = {place for place in places if place[0] != "_is_compiled"}
    assert {name for name, _ in tried} == {"policy_step", "update"}
    for wrong in tried:
        with pytest.raises(WrongProgramError, match=rf"{wrong[0]}: its compiled program is wrong"):
            compare_programs(algorithm, False)
    algorithm.close()


def test_a_compiler_that_is_switched_off_or_fails_is_named(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def branches(x: Tensor) -> Any:
        return x + 1.0 if x.sum() > 0 else x

    with pytest.raises(CompilerError, match=r"branches: Data-dependent.*test_engine\.py\", line \d+"):
        Engine(compiles=True).run(branches, torch.zeros(3))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(CompilerError, match="TORCHDYNAMO_DISABLE or"):
        compare_programs(cast(Any, train.build(configure(*small("ppo")))[0]), False)
    failed = CppCompileError(["g++", "-c"], "In file a.h\nx.cpp:3:1: error: too long\nmore")
    assert engines._cause(failed) == "the C++ compiler fails: x.cpp:3:1: error: too long"
    assert engines._cause(PermissionError(13, "Permission denied", "/a")) == "/a: Permission denied"
