"""The benchmark: all do the same work, tables say what was measured, and it goes on when interrupted."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT

from rltemplate.bench import goals, plots, tables
from rltemplate.bench.contenders import Contender, Ours, Sbx, StableBaselines3, activation_of, configuration
from rltemplate.bench.distance import Distance
from rltemplate.bench.measure import (
    Clock,
    TimedProbe,
    array_bytes,
    check_updates,
    flops_per_step,
    rate_of,
    simulation_s,
)
from rltemplate.bench.plan import (
    COMPILED,
    EAGER,
    PARTS,
    SB3,
    SBX,
    WORKER,
    Part,
    Sizes,
    affordable_cores,
    plan,
)
from rltemplate.bench.session import ONE, Processes, Session, environment
from rltemplate.bench.timeline import ACTING, ENVIRONMENT, REST, UPDATE, Timeline
from rltemplate.bench.works import WORKS, Arithmetic, Job, MeasurementError, differences
from rltemplate.children import Children, Interrupted
from rltemplate.types import ConfigError, Probe

SIZES = Sizes(seconds=0.1, repetitions=3, cores=(1,), device="cpu", quick=True)
SAME = Arithmetic(
    env_id="Hopper-v5",
    num_envs=8,
    steps_between=2048,
    batch_size=64,
    value_updates_per_step=0.15625,
    policy_updates_per_step=0.15625,
    hidden_sizes=(64, 64),
    value_hidden_sizes=(64, 64),
    activation="tanh",
    parameters=10119,
    dtype="float32",
    obs_bound=10.0,
    reward_bound=10.0,
    buffer_size=None,
    learning_starts=None,
    gamma=0.99,
    device="cpu",
)
TINY = ("algo.num_steps=32", "algo.num_minibatches=4", "algo.update_epochs=1")
PEERS = {"stable_baselines3": StableBaselines3, "sbx": Sbx}


def peer(library: str, work: str) -> StableBaselines3:
    pytest.importorskip(library)
    return PEERS[library](WORKS[work], 1, "cpu")


def ours(work: str, *words: str) -> Ours:
    return Ours(configuration([*WORKS[work].overrides(), "logger=none", *words]))


def told(contender: Contender) -> dict[str, Any]:
    """What a contender says of itself, as it comes back from its process."""
    arithmetic = json.loads(json.dumps(dataclasses.asdict(contender.arithmetic())))
    contender.close()
    return dict(arithmetic)


def job(contender: str = COMPILED, work: str = "ppo-Hopper", part: str = "peers", **more: Any) -> Job:
    return Job(part, "rate", work, contender, **more)


def rate(steps_per_second: float, **more: Any) -> dict[str, Any]:
    """The result of a measurement."""
    measured = {"env_steps": 10 * steps_per_second, "wall_s": 10.0, "cpu_s": 5.0, "first_s": 4.0}
    return measured | {"peak_bytes": 3e8, "arithmetic": dataclasses.asdict(SAME)} | more


@pytest.fixture
def bench() -> ModuleType:
    """scripts/bench.py as a module."""
    before = signal.getsignal(signal.SIGINT)
    spec = importlib.util.spec_from_file_location("bench", ROOT / "scripts" / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signal.signal(signal.SIGINT, before)
    return module


# --- The same work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "work"),
    [
        ("stable_baselines3", "ppo-Hopper"),
        ("stable_baselines3", "ppo-CartPole"),
        ("stable_baselines3", "sac-Hopper"),
        ("stable_baselines3", "sac-Hopper-8"),
        *(pytest.param("sbx", work, marks=pytest.mark.slow) for work in WORKS),
    ],
)
def test_all_are_built_for_the_same_work(library: str, work: str) -> None:
    assert differences(told(peer(library, work)), told(ours(work))) == []


@pytest.mark.parametrize("library", ["stable_baselines3", pytest.param("sbx", marks=pytest.mark.slow)])
def test_a_peer_that_does_other_work_is_noticed(library: str) -> None:
    expected = told(ours("sac-Hopper"))
    other = peer(library, "sac-Hopper")
    other.model.batch_size = 128
    other.model.gradient_steps = 2
    assert differences(told(other), expected) == [
        "batch_size 128 instead of 256",
        "value_updates_per_step 2.0 instead of 1.0",
        "policy_updates_per_step 2.0 instead of 1.0",
    ]
    wide = dataclasses.replace(WORKS["sac-Hopper"], env_id="HalfCheetah-v5", num_envs=2)
    found = " ".join(differences(told(PEERS[library](wide, 1, "cpu")), expected))
    assert "env_id HalfCheetah-v5 instead of Hopper-v5" in found
    assert "num_envs 2 instead of 1" in found
    assert "parameters" in found


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("algo.hidden_sizes=[64,32]", "hidden_sizes [64, 32] instead of [64, 64]"),
        ("algo.activation=relu", "activation relu instead of tanh"),
        ("algo.num_minibatches=16", "batch_size 128 instead of 64"),
        ("algo.update_epochs=4", "value_updates_per_step 0.0625 instead of 0.15625"),
        ("algo.normalize_obs=false", "obs_bound None instead of 10.0"),
        ("algo.reward_clip=5", "reward_bound 5.0 instead of 10.0"),
    ],
)
def test_other_work_of_this_project_is_noticed(word: str, found: str) -> None:
    assert found in differences(told(ours("ppo-Hopper", word)), told(ours("ppo-Hopper")))


class Counted:
    """A contender that makes so many updates in each of 10 environment steps, and says that it makes one."""

    def __init__(self, made: float) -> None:
        self.counts = iter([0.0, 10.0 * made])

    def arithmetic(self) -> Arithmetic:
        return dataclasses.replace(SAME, value_updates_per_step=1.0, policy_updates_per_step=1.0)

    def updates(self) -> tuple[float, float]:
        count = next(self.counts)
        return count, count

    def train(self, tick: Callable[[int], bool]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_updates_are_counted_and_not_believed() -> None:
    honest, lazy = Counted(1.0), Counted(0.5)
    assert check_updates(honest, honest.updates(), 10) == [1.0, 1.0]
    with pytest.raises(MeasurementError, match=r"updated 0\.5 times per environment step instead of 1"):
        check_updates(lazy, lazy.updates(), 10)


def test_an_activation_is_told_from_what_it_does() -> None:
    assert [activation_of(f) for f in (np.tanh, lambda x: max(x, 0.0), np.expm1)] == ["tanh", "relu", "elu"]
    with pytest.raises(MeasurementError, match="none of tanh, relu, elu"):
        activation_of(lambda x: 0.1 * x)


def test_a_peer_that_does_other_work_is_not_in_the_table(tmp_path: Path) -> None:
    def run(job: Job, cache: Path) -> dict[str, Any]:
        batch = 128 if job.contender == SBX else 64
        return rate(100.0, arithmetic=dataclasses.asdict(dataclasses.replace(SAME, batch_size=batch)))

    session = Session(tmp_path / "bench.json", SIZES, run, lambda line: None)
    failures = session.measure(Part("peers", 1, [job(SB3), job(SBX), job(COMPILED)]))
    assert len(failures) == 1
    assert failures[0].endswith("so the two cannot be compared: batch_size 128 instead of 64")
    text = tables.document(session.document)
    assert f"| {SBX} |" not in text
    assert f"| {COMPILED} |" in text
    assert "**Failed:** peers  ppo-Hopper  1 core(s)  SBX" in text


# --- Measuring -------------------------------------------------------------------------------------------


def test_a_measurement_of_nothing_is_refused() -> None:
    assert rate_of(10, 2.0) == 5.0
    with pytest.raises(MeasurementError, match="nothing was measured"):
        rate_of(0, 2.0)
    with pytest.raises(MeasurementError, match="nothing was measured"):
        rate_of(10, 0.0)
    with pytest.raises(MeasurementError, match="before anything was measured"):
        Clock(1, 1, 1.0, time.time()).result()


def test_the_clock_leaves_the_warm_up_out() -> None:
    now = 0.0
    clock = Clock(first=10, warm_up=20, seconds=5.0, begun=time.time(), now=lambda: now)
    entered: list[float] = []
    clock.entering = lambda: entered.append(now)
    steps = 0
    while clock(steps):
        steps += 10
        now += 100.0 if steps <= 20 else 2.0  # compiling takes long
    assert entered == [200.0]
    assert (clock.result()["env_steps"], clock.result()["wall_s"]) == (30, 6.0)


def test_time_is_told_apart_by_what_it_leads_to() -> None:
    now = [0.0]

    def takes(seconds: float) -> None:
        now[0] += seconds

    class Algorithm:
        _updates_due = 0.0  # no program

        def __init__(self) -> None:
            self.envs = SimpleNamespace(step=lambda action: takes(3.0))

        def _update(self) -> None:
            takes(5.0)

        def train_iteration(self) -> None:
            takes(1.0)  # the policy
            self.envs.step(None)
            takes(2.0)  # drawing a batch
            self._update()

    algorithm, line = Algorithm(), Timeline(lambda: now[0])
    line.watch(algorithm)
    line.start()
    algorithm.train_iteration()
    assert line.spent == pytest.approx(
        {ACTING: 1.0, ENVIRONMENT: 3.0, REST: 2.0, UPDATE: 5.0, "observers": 0.0}
    )
    assert line.shares()[ENVIRONMENT] == pytest.approx(3 / 11)


def test_time_that_cannot_be_seen_is_an_error_and_no_zero() -> None:
    stepping = SimpleNamespace(step=lambda action: None)
    with pytest.raises(MeasurementError, match="no _update of its own"):
        Timeline().watch(SimpleNamespace(envs=stepping))
    with pytest.raises(MeasurementError, match="no step of its environments"):
        Timeline().watch(SimpleNamespace(envs=SimpleNamespace(), _update=lambda: None))
    line = Timeline()
    line.watch(SimpleNamespace(envs=stepping, _update=lambda: None))
    line.start()
    stepping.step(None)
    with pytest.raises(MeasurementError, match="no update was seen"):
        line.shares()


@pytest.mark.parametrize("work", ["ppo-CartPole", "sac-Hopper"])
def test_the_algorithms_have_what_is_timed(work: str) -> None:
    """Of both: their parts are called as `Timeline` expects it."""
    words = {"sac": ["algo.learning_starts=4", "algo.steps_per_iteration=8"], "ppo": ["algo.update_epochs=1"]}
    contender = ours(work, *words[work[:3]])
    line = Timeline()
    line.watch(contender.algorithm)
    line.start()
    contender.algorithm.train_iteration()
    line.mark(REST)
    shares = line.shares()
    contender.close()
    assert all(shares[name] > 0.0 for name in (ENVIRONMENT, ACTING, UPDATE, REST))
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_products_of_an_update_are_counted_as_they_are_on_paper() -> None:
    words = ["algo.hidden_sizes=[16,16]", "algo.batch_size=32", "algo.learning_starts=4"]
    contender = ours("sac-Hopper", *words, "algo.steps_per_iteration=8")
    flops = flops_per_step(contender.algorithm, 16)
    contender.close()
    obs, act, hidden = 11, 3, 16
    actor = obs * hidden + hidden * hidden + hidden * 2 * act  # multiplications of a forward pass
    critic = (obs + act) * hidden + hidden * hidden + hidden
    back = hidden * hidden + hidden  # through a critic's upper layers
    learning_critics = actor + 2 * critic + 2 * (2 * critic + back)  # targets; values and gradients
    learning_actor = 2 * (critic + back + act * hidden) + 2 * actor + hidden * hidden + hidden * 2 * act
    assert flops == 2 * 32 * (learning_critics + learning_actor)


def test_updates_without_products_are_an_error_and_no_zero() -> None:
    class Nothing:
        env_steps = 0

        def train_iteration(self) -> None:
            self.env_steps += 5

    with pytest.raises(MeasurementError, match="no product was seen in the updates of Nothing"):
        flops_per_step(Nothing(), 10)
    with pytest.raises(MeasurementError, match="CartPole-v1 did not call mj_step"):
        simulation_s("CartPole-v1", 0.01)


def test_the_least_that_a_step_takes_is_less_than_it_takes(tmp_path: Path) -> None:
    words = ("algo.learning_starts=8", "algo.steps_per_iteration=8", "algo.batch_size=32")
    small = job(EAGER, "sac-Hopper", part="floor", overrides=words, seconds=0.2, options={"cores": 2})
    result = Processes(Children(), tmp_path)(dataclasses.replace(small, kind="floor"), tmp_path / "cache")
    assert 1e-6 < result["simulation_s"] < 1e-2
    assert 1e8 < result["flop_rate"] < 1e13
    part = Part("floor", 1, [job("the least", "sac-Hopper", part="floor")])
    least = {"flops": 5e8, "flop_rate": 1e11, "simulation_s": 1e-4, "cores": 2}
    text = tables.document(recorded(part, lambda job, i: least, tmp_path))
    assert "| SAC Hopper | 500.0 | 100 | 5,000 | 100 | 392 |" in text  # two in 5.1 ms


def test_bytes_are_those_of_stores_each_counted_once() -> None:
    class Buffer:
        def __init__(self) -> None:
            rows = torch.zeros(100, 4)
            self.rows, self.view = rows, rows[:10]
            self.more = [np.zeros(50), {"a": np.zeros(10, np.float32)}]

    Buffer.__module__ = "rltemplate.somewhere"
    assert array_bytes(Buffer()) == 1600 + 400 + 40


def test_a_measurement_runs_for_real(tmp_path: Path) -> None:
    """In a process of its own, on one core of those that this one may use."""
    small = job(EAGER, "ppo-CartPole", overrides=TINY, seconds=0.2)
    result = Processes(Children(), tmp_path)(small, tmp_path / "cache")
    assert rate_of(result["env_steps"], result["wall_s"]) > 50.0
    assert result["cores"] == 1
    assert result["updates"] == [4 / 256, 4 / 256]
    assert result["arithmetic"]["batch_size"] == 64
    assert result["first_s"] > 0.0


@pytest.mark.parametrize("kind", ["shares", "observers"])
def test_the_real_loop_is_measured_with_its_observers(kind: str, tmp_path: Path) -> None:
    """Whoever changes what observes a run finds here that it is still what is measured."""
    options = {"checkpoint_every": 256}
    small = job(EAGER, "ppo-CartPole", part="x", overrides=TINY, seconds=0.2, options=options)
    result = Processes(Children(), tmp_path)(dataclasses.replace(small, kind=kind), tmp_path / "cache")
    if kind == "shares":
        assert all(share > 0.0 for share in result["shares"].values())
        return
    assert all(seconds["wall_s"] > 0.0 for seconds in result["after"].values())
    assert result["after"]["log"]["wall_s"] > result["after"]["quiet"]["wall_s"]
    assert result["inside"]["trace=iteration"]["wall_s"] > 0.0
    costs = tables.observer_costs(result, "wall_s")
    assert costs["record"] > 0.0
    assert costs["checkpoint"] > 0.0


def test_a_probe_that_is_timed_is_the_probe() -> None:
    class Slow(Probe):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def event(self, name: str, index: int = 0) -> None:
            self.seen.append(f"{name} {index}")

        def __call__(self, item: str, value: Any) -> Any:
            time.sleep(0.01)
            return value + 1  # a fault

    slow = Slow()
    timed = TimedProbe(slow)
    timed.event("step", 3)
    assert timed("obs", 1) == 2
    assert slow.seen == ["step 3"]
    assert timed.spent_s >= 0.01


def test_what_a_process_refuses_is_said_in_a_line(tmp_path: Path) -> None:
    """The environment has no continuous actions; the process says so, and nothing is measured."""
    bad = job(EAGER, "sac-Hopper", overrides=("env=CartPole",), seconds=0.2)
    with pytest.raises(MeasurementError, match="algo=sac needs continuous actions"):
        Processes(Children(), tmp_path)(bad, tmp_path / "cache")


def test_every_library_is_given_as_many_threads() -> None:
    for library in ("rltemplate", "stable_baselines3", "sbx"):
        given = environment(job(library=library, threads=2), {"OMP_NUM_THREADS": "7"}, Path("cache"))
        assert {given[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {"2"}
        assert given["XLA_FLAGS"].endswith("intra_op_parallelism_threads=2")


# --- Keeping and going on --------------------------------------------------------------------------------


def turns(part: Part) -> list[tuple[str, int]]:
    return [(each.contender, number) for number in range(part.repetitions) for each in part.jobs]


def test_contenders_take_turns_and_an_interrupted_bench_goes_on(tmp_path: Path) -> None:
    file, part = tmp_path / "bench.json", Part("peers", 3, [job(SB3), job(COMPILED)])
    ran: list[str] = []

    def run(job: Job, cache: Path) -> dict[str, Any]:
        if len(ran) == 3:
            raise Interrupted(signal.SIGINT)
        ran.append(job.contender)
        return rate(100.0)

    with pytest.raises(Interrupted):
        Session(file, SIZES, run, lambda line: None).measure(part)
    assert ran == [SB3, COMPILED, SB3]
    assert len(json.loads(file.read_text())["parts"]["peers"]["measurements"]) == 3

    ran = ["what was there", *ran]  # never three again
    Session(file, SIZES, run, lambda line: None).measure(part)
    assert ran[4:] == [COMPILED, SB3, COMPILED]
    kept = json.loads(file.read_text())["parts"]["peers"]["measurements"]
    assert [(each["job"]["contender"], each["repetition"] - 1) for each in kept] == turns(part)

    more = Part("peers", 4, part.jobs)
    assert [number for number, _ in Session(file, SIZES, run, print).todo(more)] == [4, 4]
    slower = Part("peers", 3, [job(SB3, seconds=9.0), job(COMPILED, seconds=9.0)])
    assert len(Session(file, SIZES, run, print).todo(slower)) == 6
    assert len(Session(file, SIZES, run, print, fresh=True).todo(part)) == 6


def test_other_versions_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, part = tmp_path / "bench.json", Part("peers", 1, [job(SB3)])
    Session(file, SIZES, lambda job, cache: rate(1.0), lambda line: None).measure(part)
    again = Session(file, SIZES, lambda job, cache: rate(2.0), lambda line: None)
    assert again.todo(part) == []
    monkeypatch.setattr("rltemplate.bench.session.versions", lambda: {"torch": "0.0"})
    assert len(again.todo(part)) == 1
    again.measure(part)
    (kept,) = json.loads(file.read_text())["parts"]["peers"]["measurements"]
    assert kept["result"]["env_steps"] == 20.0


def test_what_failed_is_told_and_tried_again(tmp_path: Path) -> None:
    file, part = tmp_path / "bench.json", Part("levels", 1, [job("fast", part="levels")])

    def fail(job: Job, cache: Path) -> dict[str, Any]:
        raise MeasurementError("it died")

    said: list[str] = []
    failures = Session(file, SIZES, fail, said.append).measure(part)
    assert failures == ["levels  ppo-Hopper  1 core(s)  fast: it died"]
    assert "FAILED: it died" in said[0]
    assert Session(file, SIZES, lambda job, cache: rate(1.0), said.append).measure(part) == []
    assert "it died" not in file.read_text()


def test_it_is_kept_and_told_how_far_apart_the_cores_were(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    part = Part("peers", 2, [job(SB3, cores=2), job(COMPILED, cores=2), job(EAGER, cores=1)])
    found = iter([60.0, 55.0, 58.0, 340.0, 900.0, 900.0, 61.0, 62.0, 57.0, 170.0, 59.0, 59.0])
    session = Session(file, SIZES, lambda job, cache: rate(1.0), print, distance=lambda: next(found))
    session.measure(part)
    kept = json.loads(file.read_text())["parts"]["peers"]["measurements"]
    assert [each["core_to_core_ns"] for each in kept[:2]] == [[60.0, 55.0], [58.0, 340.0]]
    said = " ".join(tables.document(session.document).split())
    assert (  # a single core is near itself
        "Data took 55 to 340 ns from one core to the other and back; 3 times the least and more beside 2 "
        "of 4 measurements, here with their repetition: PPO Hopper, rltemplate, compile=true (1); "
        "PPO Hopper, rltemplate, compile=true (2)."
    ) in said


@pytest.mark.parametrize("distance", [lambda: None, lambda: 60.0])
def test_nothing_is_said_of_cores_that_were_near_or_are_not_known(
    distance: Callable[[], float | None], tmp_path: Path
) -> None:
    part = Part("peers", 1, [job(SB3, cores=2)])
    session = Session(tmp_path / "bench.json", SIZES, lambda job, cache: rate(1.0), print, distance=distance)
    session.measure(part)
    text = tables.document(session.document)
    assert "3 times" not in text
    assert ("Data took 60 to 60 ns" in text) == (distance() is not None)


@pytest.mark.skipif(len(affordable_cores()) < 2 or sys.platform != "linux", reason="needs two cores")
def test_data_takes_longer_where_two_threads_share_a_core(tmp_path: Path) -> None:
    """Then each has to wait until the other one is put aside, which takes a thousand times as long."""
    here, there = affordable_cores()[:2]
    apart = Distance([here, there], tmp_path)()
    on_one = Distance([here, here], tmp_path)()
    assert apart is not None
    assert on_one is not None
    assert 0.0 < 10.0 * apart < on_one


def test_a_compiler_that_does_not_work_is_no_reason_to_measure_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/bin/false")
    assert Distance([0, 1], tmp_path)() is None


def test_a_single_core_has_no_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Distance(affordable_cores()[:1], tmp_path)() is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert Distance([0, 1], tmp_path)() is None


def test_a_cold_cache_is_empty_and_a_warm_one_is_not(tmp_path: Path) -> None:
    part = Part(
        "startup", 2, [job(cache, part="startup", options={"cache": cache}) for cache in ("cold", "warm")]
    )
    found: list[tuple[str, bool]] = []

    def run(job: Job, cache: Path) -> dict[str, Any]:
        found.append((job.contender, cache.exists()))
        cache.mkdir(exist_ok=True)
        return rate(1.0)

    Session(tmp_path / "bench.json", SIZES, run, lambda line: None).measure(part)
    assert found == [("cold", False), ("warm", True)] * 2
    found.clear()
    only_warm = Part("startup", 1, part.jobs[1:])
    Session(tmp_path / "other.json", SIZES, run, lambda line: None).measure(only_warm)
    assert found == [("warm", False), ("warm", True)]  # filled first, and that is not counted


@pytest.mark.parametrize("content", ["{", "[]", '{"peers": {}}'])
def test_a_file_that_cannot_be_gone_on_with_is_not_lost(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="fresh=true"):
        Session(file, SIZES, lambda job, cache: rate(1.0), print)
    assert file.read_text() == content
    assert Session(file, SIZES, lambda job, cache: rate(1.0), print, fresh=True).document["parts"] == {}


# --- Tables and pictures ---------------------------------------------------------------------------------


SPEEDS = {
    SB3: [100.0, 130.0, 110.0],
    SBX: [200.0, 260.0, 220.0],
    EAGER: [220.0, 200.0, 400.0],
    COMPILED: [550.0, 550.0, 550.0],
}


def recorded(part: Part, results: Callable[[Job, int], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What a bench with these results leaves."""
    number: dict[str, int] = {}

    def run(job: Job, cache: Path) -> dict[str, Any]:
        key = job.work + job.contender
        number[key] = number.get(key, -1) + 1
        return results(job, number[key])

    session = Session(folder / "bench.json", SIZES, run, lambda line: None)
    assert session.measure(part) == []
    return session.document


def test_the_table_of_peers_has_medians_and_ratios(tmp_path: Path) -> None:
    part = Part("peers", 3, [job(name) for name in SPEEDS], ["nobody: left out"])
    text = tables.document(recorded(part, lambda job, i: rate(SPEEDS[job.contender][i]), tmp_path))
    assert f"| PPO Hopper | {SB3} | 1 | 110 (100 to 130) | 1.00 | 0.50 | 4.0 | 300 |" in text
    # Of 2.20, 1.54 and 3.64: each repetition is compared in itself.
    assert f"| PPO Hopper | {EAGER} | 1 | 220 (200 to 400) | 2.20 | 1.10 | 4.0 | 300 |" in text
    assert f"| PPO Hopper | {COMPILED} | 1 | 550 (550 to 550) | 5.00 | 2.50 | 4.0 | 300 |" in text
    assert "`make bench only=peers quick=true seconds=0.1 repetitions=3 cores=1`" in text
    assert "Left out: nobody: left out." in text
    assert max(map(len, text.splitlines())) < 1000


def test_the_table_of_levels_compares_within_a_repetition(tmp_path: Path) -> None:
    speeds = {"fast": [99.0, 100.0, 50.0], "repeat": [99.0, 80.0, 49.0]}
    speeds["fast, compile=true"] = [200.0, 150.0, 150.0]
    part = Part("levels", 3, [job(name, part="levels") for name in speeds])
    text = tables.document(recorded(part, lambda job, i: rate(speeds[job.contender][i]), tmp_path))
    # In CPU time, of which there was half as much.
    assert "| PPO Hopper | repeat | 160 (198, 160, 98) | 1.020 |" in text  # of 1.000, 1.250 and 1.020
    assert "| PPO Hopper | fast, compile=true | 300 (400, 300, 300) | 1.000 |" in text


def test_goals_are_held_against_the_fastest_form_and_missed_where_they_are(tmp_path: Path) -> None:
    def measured(**speeds: float) -> dict[str, Any]:
        named = {"ours": COMPILED, "worker": WORKER, "sb3": SB3, "sbx": SBX, "plain": EAGER}
        part = Part("peers", 1, [job(named[name]) for name in speeds])
        by_name = {named[name]: speed for name, speed in speeds.items()}
        return recorded(part, lambda job, i: rate(by_name[job.contender]), Path(mkdtemp(dir=tmp_path)))

    lines = goals.table(measured(plain=99e3, ours=5e3, worker=9e3, sb3=2e3, sbx=4e3))
    assert "| PPO Hopper | 10,000 steps/s | 9,000 steps/s (compile=true env.num_workers=1) | no |" in lines
    assert f"| PPO Hopper | 3 times {SBX} | 2.25 times | no |" in lines
    assert f"| PPO Hopper | 4 times {SB3} | 4.50 times | yes |" in lines
    assert "| PPO Hopper | 10,000 steps/s | 11,000 steps/s (compile=true) | yes |" in goals.table(
        measured(ours=11e3, worker=10e3)
    )
    assert goals.table(measured(plain=99e3)) == []


@pytest.mark.parametrize(
    ("profile", "met"),
    [
        ([100.0, 98.0, 97.0], "1.020 (1.000 to 1.031) | yes"),
        ([95.0, 90.0, 94.0], "1.064 (1.053 to 1.111) | no"),
        ([100.0, 98.0, 90.0], "1.020 (1.000 to 1.111) | cannot be told"),
    ],
)
def test_a_level_whose_repetitions_do_not_agree_is_not_judged(
    profile: list[float], met: str, tmp_path: Path
) -> None:
    speeds = {"fast": [100.0, 100.0, 100.0], "profile": profile}
    part = Part("levels", 3, [job(name, part="levels") for name in speeds])
    lines = goals.table(recorded(part, lambda job, i: rate(speeds[job.contender][i]), tmp_path))
    assert f"| `determinism=profile` | 1.05 times the time of `fast` | PPO Hopper {met} |" in lines


def observed() -> dict[str, Any]:
    def both(seconds: float) -> dict[str, float]:
        return {"wall_s": seconds, "cpu_s": seconds}

    return rate(1.0) | {
        "steps_per_iteration": 2000,
        "iteration": both(1.0),
        "inside": {name: both(0.0) for name in ("quiet", "log", "trace=iteration")}
        | {"trace=step": both(0.05)},
        "after": {"quiet": both(0.001), "log": both(0.011)}
        | {"trace=iteration": both(0.003), "trace=step": both(0.021)},
        "log_every": 10_000,
        "checkpoint_every": 100_000,
        "total_env_steps": 1_000_000,
        "checkpoint": both(0.5),
        "record": both(1.0),
    }


def test_observers_are_counted_as_often_as_they_come() -> None:
    costs = tables.observer_costs(observed(), "wall_s")
    assert costs["log"] == pytest.approx(0.001 + 0.01 / 5)
    assert costs["trace=iteration"] == pytest.approx(0.002)
    assert costs["trace=step"] == pytest.approx(0.07)
    assert costs["checkpoint"] == pytest.approx(0.5 / 50)
    assert costs["record"] == pytest.approx(1.0 / 500)
    assert costs["all, with trace=iteration"] == pytest.approx(0.003 + 0.002 + 0.01 + 0.002)


def test_every_part_has_a_table_and_the_pictures_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rltemplate.bench.plan._installed", lambda name: True)

    def results(job: Job, i: int) -> dict[str, Any]:
        shares = {"environment": 0.5, "choosing actions": 0.1, "updates": 0.3, "around updates": 0.1}
        sized = {"transitions": 100, "buffer_bytes": 300_000 if job.contender == SB3 else 150_000}
        least = {"flops": 1e6, "flop_rate": 1e9, "simulation_s": 1e-3, "cores": 1, "resident_bytes": 400_000}
        return observed() | {"shares": shares | {"observers": 0.0}} | sized | least

    document: dict[str, Any] = {}
    for part in plan([name for name in PARTS if name != "peers"], SIZES):
        document = recorded(part, results, tmp_path)
    with_peers = Part("peers", 3, [job(name) for name in SPEEDS])
    document = recorded(with_peers, lambda job, i: rate(SPEEDS[job.contender][i]), tmp_path)
    text = tables.document(document)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [f"## {name}" for name in PARTS]
    assert "| rltemplate | 1,500 | 4,000 | 1,500 | 50% |" in text
    assert (
        "| PPO Hopper | rltemplate, compile=true | 1 (1 to 1) | 50.0% | 10.0% | 30.0% | 10.0% | 0.0% |"
        in text
    )
    files = plots.draw(document, tmp_path / "bench")
    assert [file.suffix for file in files] == [".png", ".svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    svg = files[1].read_text()
    assert plots.draw(document, tmp_path / "bench")[1].read_text() == svg
    assert plots.draw({"parts": {}}, tmp_path / "none") == []


# --- The command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("repetitions=0", "must be at least 1"),
        ("seconds=inf", "finite"),
        ("thread=2", "did you mean repetitions=? allowed: only="),
        ("only=peers,level", "did you mean levels?"),
        ("only=peers,peers", "peers is given twice"),
        ("cores=1,1000", "must be from 1 to"),
        ("device=gpu", "expected cpu or cuda"),
    ],
)
def test_bad_words_are_refused(
    bench: ModuleType, word: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([f"out={tmp_path / 'new'}", word]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {word}: ")
    if word != "thread=2":
        assert message in said
    assert not (tmp_path / "new").exists()


@pytest.fixture
def recording(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command with processes that do nothing."""
    ran: list[str] = []

    class Nothing:
        def __init__(self, children: Children, scratch: Path) -> None:
            pass

        def __call__(self, job: Job, cache: Path) -> dict[str, Any]:
            ran.append(job.contender)
            return rate(100.0)

    monkeypatch.setattr(bench, "Processes", Nothing)
    return ran


def test_the_command_measures_writes_and_goes_on(
    bench: ModuleType, recording: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["only=levels", "quick=true", "repetitions=2", f"out={tmp_path}"]
    assert bench.main(words) == 0
    assert recording == ["fast", "repeat", "invariant", "profile"] * 2
    table = (tmp_path / "bench-quick.md").read_text()
    assert table in capsys.readouterr().out
    assert bench.main(words) == 0
    assert len(recording) == 8
    assert bench.main([*words, "fresh=true"]) == 0
    assert len(recording) == 16


def test_what_a_processor_does_at_the_least_is_not_held_against_a_gpu(tmp_path: Path) -> None:
    (part,) = plan(["floor"], Sizes(seconds=1.0, repetitions=1, cores=(1,), device="cuda", quick=True))
    assert part.jobs == []
    text = tables.document(recorded(part, lambda job, i: rate(1.0), tmp_path))
    assert "Left out: what a processor does" in text
    assert "at most" not in text


def test_a_full_bench_fits_into_an_evening() -> None:
    """Counted in measurements: one takes its seconds and some ten to start and to warm up."""
    full = Sizes(seconds=15.0, repetitions=3, cores=(1, 2), device="cpu", quick=False)
    quick = Sizes(seconds=2.0, repetitions=1, cores=(2,), device="cpu", quick=True)

    def minutes(sizes: Sizes) -> float:
        every = [(each, part.repetitions) for part in plan(list(PARTS), sizes) for each in part.jobs]
        return sum(times * (each.seconds + 8.0) for each, times in every) / 60

    assert minutes(quick) < 6
    assert minutes(full) < 95


def test_a_process_of_ours_is_asked_for_one_job(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned: list[list[int]] = []
    monkeypatch.setattr(bench.measure, "pin", pinned.append)
    monkeypatch.setattr(bench.measure, "measure", lambda job, begun: {"job": job.to_dict(), "begun": begun})
    wanted = job(options={"cores": 4}, overrides=("compile=true",))
    asked = json.dumps({"job": wanted.to_dict(), "cores": affordable_cores()[:1], "begun": 5.0})
    assert bench.main([ONE, asked]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert pinned == [affordable_cores()[:1]]
    assert Job.from_dict(answer["job"]) == wanted
    assert answer["begun"] == 5.0
