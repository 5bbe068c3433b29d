"""The measurements, each made in the process that it is called in. A process makes one, and ends."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rltemplate.bench.contenders import Contender, Ours, build, configuration
from rltemplate.bench.timeline import OBSERVERS, REST, Timeline
from rltemplate.bench.works import WORKS, Job, MeasurementError
from rltemplate.types import Algorithm, Probe, V

if TYPE_CHECKING:
    from rltemplate.config import Config
    from rltemplate.train import Observers
    from rltemplate.types import IterationResult

# How far what the optimisers counted may be from what was announced: nowhere but for rounding.
_TOLERANCE = 0.01
_NEVER = 10**9  # environment steps


def pin(cores: Iterable[int]) -> None:
    """Let this process, and all that it starts, run on these cores only, where the system can see to that.

    Libraries choose the number of their threads when they are loaded, some by what they are allowed to use:
    so this comes first.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cores))


def measure(job: Job, begun: float) -> dict[str, Any]:
    """What the measurement of this job gives, ready for JSON; `begun` is when its process was started."""
    return KINDS[job.kind](job, begun)


def rate_of(steps: float, seconds: float) -> float:
    """Steps per second. `MeasurementError` for a measurement of nothing."""
    if steps <= 0 or seconds <= 0.0:
        raise MeasurementError(f"{steps:g} environment steps in {seconds:g} s: nothing was measured")
    return steps / seconds


# --- Training --------------------------------------------------------------------------------------------


class Clock:
    """Starts when the warm-up is over, says no when the time is over, and knows what was done in between."""

    def __init__(
        self,
        first: int,
        warm_up: int,
        seconds: float,
        begun: float,
        sync: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`first` is the number of environment steps after which something has been learned."""
        self.first_s: float | None = None  # from the start of the process to there
        self._first, self._warm_up, self._seconds, self._begun = first, warm_up, seconds, begun
        self._sync, self._now = sync, now
        self._from: tuple[int, float, float] | None = None
        self._to: tuple[int, float, float] | None = None
        self.entering: Callable[[], None] = lambda: None  # called when the warm-up is over

    def __call__(self, env_steps: int) -> bool:
        """Whether to go on."""
        self._sync()
        if self.first_s is None and env_steps >= self._first:
            self.first_s = time.time() - self._begun
        if self._from is None:
            if env_steps >= self._warm_up and self.first_s is not None:
                gc.collect()
                self.entering()
                self._from = (env_steps, self._now(), time.process_time())
            return True
        if self._now() - self._from[1] < self._seconds or env_steps == self._from[0]:
            return True
        self._to = (env_steps, self._now(), time.process_time())
        return False

    def result(self) -> dict[str, float]:
        """Steps, seconds on the clock and of the processor. `MeasurementError` if there were none."""
        if self._from is None or self._to is None or self.first_s is None:
            raise MeasurementError("training ended before anything was measured")
        steps, wall_s, cpu_s = (b - a for a, b in zip(self._from, self._to, strict=True))
        rate_of(steps, wall_s)
        return {"env_steps": steps, "wall_s": wall_s, "cpu_s": cpu_s, "first_s": self.first_s}


def rate(job: Job, begun: float) -> dict[str, Any]:
    """Training without observers: speed, what was done for it, and the memory that it took."""
    work = WORKS[job.work]
    contender = build(job)
    try:
        clock = Clock(work.first, work.warm_up, job.seconds, begun, _sync(job.device))
        before: list[tuple[float, float]] = []
        clock.entering = lambda: before.append(contender.updates())
        contender.train(clock)
        result: dict[str, Any] = dict(clock.result())
        result["arithmetic"] = contender.arithmetic()
        result["updates"] = check_updates(contender, before[0], result["env_steps"])
        result["peak_bytes"] = peak_bytes()
        result["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    finally:
        contender.close()
    result["arithmetic"] = dataclasses.asdict(result["arithmetic"])
    return result


def check_updates(contender: Contender, before: tuple[float, float], env_steps: float) -> list[float]:
    """Updates of value and policy per environment step since `before`, as the optimisers counted them.

    `MeasurementError` if these are not the ones that the contender says it makes.
    """
    said = contender.arithmetic()
    counted = [(b - a) / env_steps for a, b in zip(before, contender.updates(), strict=True)]
    wanted = (said.value_updates_per_step, said.policy_updates_per_step)
    for name, made, announced in zip(("value", "policy"), counted, wanted, strict=True):
        if abs(made - announced) > _TOLERANCE * announced:
            raise MeasurementError(
                f"{name} was updated {made:.4g} times per environment step instead of {announced:.4g}"
            )
    return counted


def _sync(device: str) -> Callable[[], None]:
    """Waits for the accelerator, where there is one: what was asked for is not what has been done."""
    if device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def shares(job: Job, begun: float) -> dict[str, Any]:
    """Where the time of the real training loop goes, with logging and trace at their default intervals."""
    from rltemplate.train import Stop, train

    work = WORKS[job.work]
    ours = Ours.ready(configuration([*job.words(), "logger=local"]))
    line, clock = Timeline(), Clock(work.first, work.warm_up, job.seconds, begun, _sync(job.device))
    clock.entering = line.start
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(ours.config, eval_every=0, video_every=0, checkpoint_every=0)
        stop = Stop()
        observers = _observers(config, Path(folder), ours, stop)
        ours.algorithm.probe = observers.trace or Probe()
        line.watch(ours.algorithm, _sync(job.device))

        def after(result: IterationResult, before: int, seconds: float) -> None:
            line.mark(REST)
            observers.after_iteration(result, before, seconds)
            line.mark(OBSERVERS)
            if not clock(ours.algorithm.env_steps):
                stop.signal = 0

        train(ours.algorithm, config.total_env_steps, stop, after)
        observers.close()
    ours.close()
    return {**clock.result(), "shares": line.shares()}


# --- The least that it takes --------------------------------------------------------------------------------

_SIDE = 256  # of the matrices whose products say how fast a core can be


def floor(job: Job, begun: float) -> dict[str, Any]:
    """What a core does for an environment step at the least: products of matrices, and the simulation.

    `flops` are those of the products in the programs that the updates are made of, by environment step,
    `flop_rate` the most of them that a core did in a second, of products of 256 x 256 matrices, and
    `simulation_s` the seconds of MuJoCo's own `mj_step`.
    """
    ours = Ours.ready(configuration([*job.words(), "compile=false"]))
    flops = flops_per_step(ours.algorithm, WORKS[job.work].first)
    ours.close()
    return {
        "flops": flops,
        "flop_rate": product_rate(job.seconds / 2),
        "simulation_s": simulation_s(WORKS[job.work].env_id, job.seconds / 2),
        "cores": int(job.options["cores"]),
    }


def flops_per_step(algorithm: Any, first: int) -> float:
    """Of the products in updates, after `first` environment steps. `MeasurementError` if there are none."""
    counting, counted = False, 0.0
    known: dict[str, float] = {}

    def counted_call(name: str, update: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal counted
            if counting:
                if name not in known:
                    known[name] = _flops(update, args)
                counted += known[name]
            return update(*args)

        return call

    for name, value in list(vars(algorithm).items()):
        if name.startswith("_update") and callable(value):
            setattr(algorithm, name, counted_call(name, value))
    while algorithm.env_steps < first:
        algorithm.train_iteration()
    before, counting = algorithm.env_steps, True
    algorithm.train_iteration()
    if counted == 0.0:
        raise MeasurementError(f"no product was seen in the updates of {type(algorithm).__name__}")
    return float(counted / (algorithm.env_steps - before))


def _flops(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Of the products in the program that `function` becomes."""
    from torch.utils.flop_counter import FlopCounterMode

    from rltemplate.programs import Flat, flatten, traced

    leaves = flatten(args)
    program = traced(Flat(function, args), leaves)
    with FlopCounterMode(display=False) as counter:
        program(*leaves)
    return float(counter.get_total_flops())


def product_rate(seconds: float) -> float:
    """The most floating point operations in a second, on the threads that this process has."""
    import torch

    left, right = torch.randn(2, _SIDE, _SIDE, generator=torch.Generator().manual_seed(1))
    result, best = torch.empty(_SIDE, _SIDE), math.inf
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(20):
            torch.mm(left, right, out=result)
        best = min(best, (time.perf_counter() - start) / 20)
    return float(2 * _SIDE**3 / best)


def simulation_s(env_id: str, seconds: float) -> float:
    """Seconds that `mj_step` takes in a step of an environment that acts at random, the mean."""
    import gymnasium as gym
    import mujoco

    env, simulate = gym.make(env_id), mujoco.mj_step
    spent, calls = 0.0, 0

    def timed(*args: Any, **kwargs: Any) -> None:
        nonlocal spent, calls
        start = time.perf_counter()
        simulate(*args, **kwargs)
        spent += time.perf_counter() - start
        calls += 1

    mujoco.mj_step = timed
    try:
        env.action_space.seed(1)
        env.reset(seed=1)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
    finally:
        mujoco.mj_step = simulate
        env.close()
    if not calls:
        raise MeasurementError(f"{env_id} did not call mj_step")
    return spent / calls


# --- Observers -------------------------------------------------------------------------------------------


def _observers(config: Config, folder: Path, ours: Ours, stop: Any) -> Observers:
    """What observes a run of this configuration in this folder."""
    from rltemplate.config import to_dict
    from rltemplate.run import paths
    from rltemplate.run.lines import LineFile, to_stderr
    from rltemplate.run.logger import Logger
    from rltemplate.run.sinks import RunFacts, make_sinks
    from rltemplate.train import Observers, make_trace

    facts = RunFacts(
        "bench", folder, "bench", config.total_env_steps, to_dict(config), {}, None, (), to_stderr
    )
    logger = Logger(make_sinks(config.logger, facts), LineFile(folder / paths.METRICS))
    observers = Observers(config, folder, ours.algorithm, ours.envs, logger, stop)
    observers.trace = make_trace(config, folder)
    return observers


# Who looks at an iteration, by what is switched on: `quiet` keeps what was reported and looks for NaN, as
# every run does.
_WATCHING: dict[str, dict[str, Any]] = {
    "quiet": {"trace": "off", "log_every": 0},
    "log": {"trace": "off", "log_every": 1},
    "trace=iteration": {"trace": "iteration", "log_every": 0},
    "trace=step": {"trace": "step", "log_every": 0},
}


class TimedProbe(Probe):
    """Another probe, and the seconds that it takes."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.spent_s = 0.0

    def begin(self, algorithm: Algorithm) -> None:
        """As the other."""
        start = time.perf_counter()
        self._probe.begin(algorithm)
        self.spent_s += time.perf_counter() - start

    def event(self, name: str, index: int = 0) -> None:
        """As the other."""
        start = time.perf_counter()
        self._probe.event(name, index)
        self.spent_s += time.perf_counter() - start

    def __call__(self, item: str, value: V) -> V:
        """As the other."""
        start = time.perf_counter()
        value = self._probe(item, value)
        self.spent_s += time.perf_counter() - start
        return value


def observers(job: Job, begun: float) -> dict[str, Any]:
    """What each observer takes, in seconds on the clock and of the processor.

    Iterations take turns: one that nobody looks at, and one for each of `_WATCHING`. `after` is what they
    take when an iteration has ended. A trace also works `inside` of it. There it is timed itself, but for
    `trace=step`, which lets the algorithm work otherwise: by how much its iterations are longer than those
    nobody looks at, the median over rounds. `quiet` does nothing there, so that what it seems to take says
    how exact such a difference is. A log row is written after every iteration that is for it, and `tables`
    counts it as often as it is due by default. So it is with a checkpoint, which is made after as many steps
    as lie between two.
    """
    from rltemplate.config import TraceDetail
    from rltemplate.train import Stop

    work = WORKS[job.work]
    ours = Ours.ready(configuration([*job.words(), "logger=local"]))
    config = dataclasses.replace(ours.config, eval_every=0, video_every=0, checkpoint_every=0)
    clock = Clock(work.first, work.warm_up, job.seconds, begun, _sync(job.device))
    sync = _sync(job.device)
    inside: dict[str, list[tuple[float, float]]] = {name: [] for name in ("none", *_WATCHING)}
    after: dict[str, list[tuple[float, float]]] = {name: [] for name in _WATCHING}
    traced: list[tuple[float, float]] = []
    steps = 0
    with tempfile.TemporaryDirectory() as folder:
        watching = {}
        for name, what in _WATCHING.items():
            (Path(folder) / name).mkdir()
            own = dataclasses.replace(config, trace=TraceDetail[what["trace"]], log_every=what["log_every"])
            watching[name] = _observers(own, Path(folder) / name, ours, Stop())

        def forget() -> None:
            for times in (*inside.values(), *after.values(), traced):
                times.clear()

        clock.entering = forget
        while clock(ours.algorithm.env_steps):
            names = list(inside)
            turn = len(inside["none"]) % len(names)
            for name in [*names[turn:], *names[:turn]]:  # so that nobody always comes after the same
                observer = watching.get(name)
                trace = None if observer is None else observer.trace
                timed = TimedProbe(trace or Probe())
                ours.algorithm.probe = timed if name == "trace=iteration" else trace or Probe()
                before, start = ours.algorithm.env_steps, _times()
                result = ours.algorithm.train_iteration()
                sync()
                middle = _times()
                if name == "trace=iteration":
                    took = _passed(start, middle)
                    # It does nothing but compute, and so has the share of the core that all the rest has.
                    traced.append((timed.spent_s, timed.spent_s * min(1.0, took[1] / took[0])))
                steps = ours.algorithm.env_steps - before
                inside[name].append(_passed(start, middle))
                if observer is not None:
                    observer.after_iteration(result, before, middle[0] - start[0])
                    after[name].append(_passed(middle, _times()))
        for observer in watching.values():
            observer.close()
    ours.close()
    every = min(config_default(job, "checkpoint_every"), int(job.options.get("checkpoint_every", _NEVER)))
    return {
        **clock.result(),
        "steps_per_iteration": steps,
        "iteration": _middle(inside["none"]),
        "inside": {
            name: _middle([_passed(a, b) for a, b in zip(inside["none"], inside[name], strict=True)])
            for name in ("quiet", "trace=step")
        }
        | {"trace=iteration": _middle(traced)},
        "after": {name: _middle(times) for name, times in after.items()},
        "log_every": config.log_every,
        "total_env_steps": config_default(job, "total_env_steps"),
        "checkpoint_every": every,
        "checkpoint": _checkpoint(job, every),
        "record": _record(ours.config),
    }


def config_default(job: Job, key: str) -> int:
    """What a run of the job's recipe has under this root key when nobody says otherwise."""
    work = WORKS[job.work]
    return int(getattr(configuration([f"algo={work.algo}", f"env={work.env}"]), key))


def _times() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _passed(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    return end[0] - start[0], end[1] - start[1]


def _middle(times: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "wall_s": statistics.median(wall for wall, _ in times),
        "cpu_s": statistics.median(cpu for _, cpu in times),
    }


def _checkpoint(job: Job, every: int) -> dict[str, float]:
    """The pause for a checkpoint with all that has come in since the last one, which is `every` steps ago."""
    from rltemplate.train import Stop

    # Steps of random actions are enough: a checkpoint does not ask what they were good for.
    sac = WORKS[job.work].algo == "sac"
    quick = (
        [f"algo.learning_starts={_NEVER}", "env.num_envs=8", "compile=false"] if sac else ["compile=false"]
    )
    ours = Ours.ready(configuration([*job.words(), *quick]))
    config = dataclasses.replace(ours.config, eval_every=0, video_every=0, log_every=0)
    config = dataclasses.replace(config, checkpoint_every=every, trace=type(config.trace)["off"])
    with tempfile.TemporaryDirectory() as folder:
        observer = _observers(config, Path(folder), ours, Stop())
        while True:
            before = ours.algorithm.env_steps
            if not sac:  # nothing but weights, whenever it is
                config.checkpoint_every = ours.algorithm.env_steps + 1
            result = ours.algorithm.train_iteration()
            start = _times()
            observer.after_iteration(result, before, 1.0)
            passed = _passed(start, _times())
            if any((Path(folder) / "checkpoints").glob("*")):
                break
        observer.close()
    ours.close()
    return {"wall_s": passed[0], "cpu_s": passed[1]}


def _record(config: Config) -> dict[str, float]:
    """What it takes to record a run once: its code, its configuration and how it ended."""
    from rltemplate.config import to_yaml
    from rltemplate.launch import PROJECT
    from rltemplate.run.machine import machine_facts, package_versions
    from rltemplate.run.paths import new_id
    from rltemplate.run.record import Record
    from rltemplate.run.snapshot import commit_run, take_snapshot, withdraw_run

    with tempfile.TemporaryDirectory() as folder:
        start = _times()
        snapshot = take_snapshot(PROJECT)
        middle = _times()
        git = commit_run(snapshot, new_id("bench"), to_yaml(config))
        committed = _passed(middle, _times())
        withdraw_run(snapshot, git)
        again = _times()
        facts = {"versions": package_versions(), "machine": machine_facts()}
        Record.create(Path(folder), facts).finish("finished", {})
        end = _times()
    parts = (_passed(start, middle), committed, committed, _passed(again, end))  # the outcome is one more
    return {"wall_s": sum(wall for wall, _ in parts), "cpu_s": sum(cpu for _, cpu in parts)}


# --- Memory and start ------------------------------------------------------------------------------------


def memory(job: Job, begun: float) -> dict[str, Any]:
    """A replay buffer that is filled by stepping environments with random actions.

    `buffer_bytes` are those of the arrays that the buffer holds then, `resident_bytes` by how much the
    process has grown while it was filled.
    """
    work = WORKS[job.work]
    transitions = int(job.options["transitions"])
    contender: Contender
    if job.library == "rltemplate":
        words = [f"algo.buffer_size={transitions}", f"algo.learning_starts={_NEVER}", "env.num_envs=8"]
        ours = Ours.ready(configuration([*job.words(), *words]))
        contender, holder = ours, cast(Any, ours.algorithm)
    else:
        from rltemplate.bench.contenders import StableBaselines3

        peer = StableBaselines3(dataclasses.replace(work, num_envs=8), job.threads, job.device)
        model = peer.model
        model.buffer_size, model.learning_starts = transitions, _NEVER
        kind: Any = type(model.replay_buffer)
        model.replay_buffer = kind(
            transitions, model.observation_space, model.action_space, model.device, n_envs=8
        )
        contender, holder = peer, model
    before = resident_bytes()
    contender.train(lambda env_steps: env_steps < transitions)
    grown = resident_bytes() - before
    held = array_bytes(holder.replay if job.library == "rltemplate" else holder.replay_buffer)
    contender.close()
    if grown <= 0 or held <= 0:
        raise MeasurementError(f"{held} bytes in the buffer, and {grown} more resident: nothing was filled")
    return {
        "transitions": transitions,
        "buffer_bytes": held,
        "resident_bytes": grown,
        "peak_bytes": peak_bytes(),
    }


def array_bytes(thing: Any) -> int:
    """Bytes of all arrays and tensors among the attributes of an object, each store counted once."""
    import numpy as np
    import torch

    stores: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            stores[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(part, np.ndarray):
            owner = part if part.base is None or not isinstance(part.base, np.ndarray) else part.base
            stores[owner.__array_interface__["data"][0]] = owner.nbytes
        elif isinstance(part, list | tuple | set):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
        elif type(part).__module__.partition(".")[0] in ("rltemplate", "stable_baselines3"):
            waiting += vars(part).values() if hasattr(part, "__dict__") else []
    return sum(stores.values())


def startup(job: Job, begun: float) -> dict[str, Any]:
    """Seconds from `scripts/train.py` to the first environment step."""
    from rltemplate.startup import time_to_first_step

    return time_to_first_step(job.options["words"])._asdict()


def _status(name: str) -> int | None:
    """Bytes from Linux's account of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith(f"{name}:")]
    return int(found[0].split()[1]) * 1024 if found else None


def resident_bytes() -> int:
    """Memory of this process now."""
    return _status("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """The most memory that this process has had.

    Linux hands `ru_maxrss` down from the process that started this one, so its account is asked instead.
    """
    return _status("VmHWM") or _maxrss()


def _maxrss() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


KINDS: dict[str, Callable[[Job, float], dict[str, Any]]] = {
    "rate": rate,
    "shares": shares,
    "floor": floor,
    "observers": observers,
    "memory": memory,
    "startup": startup,
}
