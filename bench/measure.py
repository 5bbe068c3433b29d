"""The measurements, each made in the process that it is called in. A process makes one, and ends."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.contenders import Contender, Ours, build
from bench.works import WORKS, BenchJob, MeasurementError, Work
from runlab.run import paths
from runlab.run.git.snapshot import GitRecord, withdraw_run
from runlab.run.paths import PROJECT
from runlab.run.record import RunRecord

_TOLERANCE = 0.01  # of the updates that optimisers counted, against those announced


def measure(job: BenchJob, begun: float) -> dict[str, Any]:
    """The answer to a job; `begun` is the time at which its process was started."""
    if job.part == "startup":
        return {"result": time_to_first_step(WORKS[job.work])}
    if job.part == "observers":
        return {"result": observers(job)}
    contender = build(job)
    seconds: dict[str, float] = {}
    if isinstance(contender, Ours) and job.part == "time":
        seconds = watch(contender)
    try:
        result = rate(contender, job, begun, seconds)
    finally:
        contender.close()
    return {"result": result, "facts": contender.facts()}


def rate(contender: Contender, job: BenchJob, begun: float, seconds: dict[str, float]) -> dict[str, float]:
    """Speed of training, and the share of each of `seconds`, which the calls that it watches add up."""
    first, start, end = 0.0, (0, 0.0, 0.0, 0.0), (0, 0.0, 0.0, 0.0)
    warm_up = 2 * WORKS[job.work].first_steps

    def tick(env_steps: int) -> bool:
        nonlocal first, start, end
        if not first and env_steps >= WORKS[job.work].first_steps:
            first = time.time() - begun
        if not start[0]:
            if env_steps >= warm_up:
                gc.collect()
                seconds.update(dict.fromkeys(seconds, 0.0))
                start = (env_steps, contender.updates(), time.perf_counter(), time.process_time())
            return True
        if time.perf_counter() - start[2] < job.seconds:
            return True
        end = (env_steps, contender.updates(), time.perf_counter(), time.process_time())
        return False

    contender.train(tick)
    steps, updates, wall_s, cpu_s = (b - a for a, b in zip(start, end, strict=True))
    if not start[0] or steps <= 0:
        raise MeasurementError("training ended before anything was measured")
    announced = contender.facts()["updates_per_step"]
    if abs(updates / steps - announced) > _TOLERANCE * announced:
        raise MeasurementError(
            f"{updates / steps:.4g} updates per environment step were counted instead of {announced:.4g}"
        )
    result = {"steps_per_s": steps / wall_s, "cpu_s_per_step": cpu_s / steps, "first_s": first}
    shares = {name: spent / wall_s for name, spent in seconds.items()}
    rest = {"rest": 1.0 - sum(shares.values())} if shares else {}
    return result | {"peak_bytes": peak_bytes()} | shares | rest


def peak_bytes() -> int:
    """The most memory that this process has had. Linux hands `ru_maxrss` down from a parent: hence /proc."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def watch(contender: Ours) -> dict[str, float]:
    """Seconds in the environments' step and in updates, which grow while the contender trains."""
    seconds, under_way = {"environments": 0.0, "updates": 0.0}, set[str]()
    algorithm: Any = contender.algorithm

    def timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if name in under_way:  # an update of a loop that is timed as a whole
                return call(*args, **kwargs)
            start = time.perf_counter()
            under_way.add(name)
            try:
                return call(*args, **kwargs)
            finally:
                under_way.remove(name)
                seconds[name] += time.perf_counter() - start

        return run

    algorithm.envs.step = timed(algorithm.envs.step, "environments")
    engine, run = algorithm.engine, algorithm.engine.run
    updates = timed(run, "updates")
    engine.run = lambda function, *args: (updates if function == algorithm.update else run)(function, *args)
    engine.scan = timed(engine.scan, "updates")
    return seconds


# Observers by what is switched on; `nothing` compares iterations that are alike.
_WATCHING = {"log": ("off", 1), "trace=iteration": ("iteration", 0), "trace=step": ("step", 0)}


def observers(job: BenchJob) -> dict[str, float]:
    """Time that observers add to an iteration, as shares: medians of iterations that take turns."""
    from runlab.config.loading import to_dict
    from runlab.config.schema import TraceDetail
    from runlab.determinism import switches
    from runlab.interfaces import Probe, attach_probe
    from runlab.run.files import LineFile, to_stderr
    from runlab.run.logger import Logger
    from runlab.run.observers import RunObservers
    from runlab.run.sinks import make_sinks
    from runlab.run.sinks.sink import RunFacts

    ours = Ours(dataclasses.replace(job, overrides=(*job.overrides, "logger=local")))
    quiet = dataclasses.replace(ours.config, eval_every=0, video_every=0, checkpoint_every=0)
    watching: dict[str, RunObservers] = {}
    settings = switches.read_back()
    with tempfile.TemporaryDirectory() as scratch:
        for name, switched in _WATCHING.items():
            config = dataclasses.replace(quiet, trace=TraceDetail[switched[0]], log_every=switched[1])
            folder = Path(scratch) / name
            folder.mkdir()
            facts = RunFacts("bench", folder, to_dict(config), GitRecord(), None, to_stderr)
            logger = Logger(make_sinks(config.logger, facts), LineFile(folder / paths.METRICS))
            observer = RunObservers(
                config, folder, ours.algorithm, ours.envs, logger, lambda: False, settings
            )
            watching[name] = observer

        def iteration(name: str) -> tuple[float, float]:
            algorithm, observer = ours.algorithm, watching.get(name)
            attach_probe(algorithm, (None if observer is None else observer.trace) or Probe())
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            with contextlib.nullcontext() if observer is None else observer.iteration():
                result = algorithm.train_iteration()
            if observer is not None:
                observer.observe(result)
            return time.perf_counter() - wall_s, time.process_time() - cpu_s

        names = ["alone", "nothing", *_WATCHING]
        while ours.algorithm.env_steps < 2 * WORKS[job.work].first_steps:
            iteration("alone")
        rounds: list[dict[str, tuple[float, float]]] = []
        end = time.perf_counter() + job.seconds * len(names)
        while time.perf_counter() < end or len(rounds) < 3:
            turn = len(rounds) % len(names)  # so that no observer always comes after the same one
            rounds.append({name: iteration(name) for name in [*names[turn:], *names[:turn]]})
    ours.close()
    shares = {}
    for name in ("nothing", *_WATCHING):
        for clock, label in enumerate(("wall", "cpu")):
            added = statistics.median(each[name][clock] - each["alone"][clock] for each in rounds)
            shares[f"{name} {label}"] = added / statistics.median(each["alone"][clock] for each in rounds)
    return shares


# Overrides that make an iteration one step of the environments.
ONE_STEP = {
    "ppo": ["algo.num_steps=1", "algo.num_minibatches=1", "algo.update_epochs=1"],
    "sac": ["algo.steps_per_iteration=1"],
}


def time_to_first_step(work: Work) -> dict[str, float]:
    """Seconds from a command to the first environment step of its run, with its checks and git snapshot.

    The first line of the trace tells when an iteration of one step was made; the run is killed then.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run_dir, log = Path(scratch) / "run", Path(scratch) / "output.txt"
        words = [f"algo={work.algo}", f"env={work.env}", *ONE_STEP[work.algo], f"run_dir={run_dir}"]
        with log.open("wb") as out:
            began = time.perf_counter()
            command = [sys.executable, "scripts/train.py", *words]
            process = subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        trace, ended = run_dir / paths.TRACE, os.WEXITED | os.WNOHANG | os.WNOWAIT  # its times stay known
        while not (trace.exists() and trace.stat().st_size) and not os.waitid(os.P_PID, process.pid, ended):
            time.sleep(0.002)
        wall_s, started = time.perf_counter() - began, trace.exists()
        if started:
            os.kill(RunRecord.read(run_dir).pid or process.pid, signal.SIGKILL)
        _, _, used = os.wait4(process.pid, 0)
        if not started:
            lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise MeasurementError(f"the command ended before its first step: {lines[-1]}")
        withdraw_run(PROJECT, RunRecord.read(run_dir).git)
    return {"wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime}
