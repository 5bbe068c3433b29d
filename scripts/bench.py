"""Speed side by side: `python scripts/bench.py [only=peers|levels|trace] [threads=1] [repetitions=3]`.

    peers   training against Stable-Baselines3: the same environment, number of environments, networks,
            batch, epochs and updates per step
    levels  what a level of determinism costs against `fast`
    trace   what fingerprints cost against none, iteration by iteration in one process

Every measurement is a process of its own with pinned threads, and contenders take turns, so that a change of
the machine's load falls on all of them; warm-up and compilation are not counted. Levels and trace are small
differences and are therefore measured in CPU time, which another program does not add to. Writes
`results/bench.json` and `results/bench.md`; a part that was not measured keeps its earlier table.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rltemplate.config import Config  # noqa: E402
from rltemplate.types import Algorithm, ConfigError  # noqa: E402
from rltemplate.words import Kinds, make_folder, one_of, parse_words, readable, whole  # noqa: E402

ENV = "Hopper-v5"
ONE = "--one"  # what this command says to the process of a single measurement
Speeds = dict[str, dict[str, list[float]]]
# What both sides do, in this project's words. Observation and reward are normalised on both sides for PPO.
SAME = {
    "ppo": [
        "env.num_envs=8",
        "algo.num_steps=256",
        "algo.num_minibatches=32",
        "algo.update_epochs=10",
        "algo.recompute_advantage=false",
        "algo.normalize_advantage=true",
    ],
    "sac": [
        "env.num_envs=1",
        "algo.updates_per_step=1",
        "algo.policy_delay=1",
        "algo.learning_starts=1000",
        "algo.steps_per_iteration=250",
    ],
}
WARM_UP = {"ppo": 3 * 2048, "sac": 1500}  # environment steps that are not counted
SETTINGS = {
    "ppo": f"PPO, {ENV}, 8 environments x 256 steps, 64-64 tanh, 10 epochs, minibatch 64, obs, reward scaled",
    "sac": f"SAC, {ENV}, 1 environment, 256-256 relu, batch 256, one update of everything per step",
}


def configuration(algo: str, compile_update: bool, level: str = "repeat") -> Config:
    """The recipe of Hopper, with what the peer does otherwise."""
    from hydra import compose, initialize_config_dir

    from rltemplate.config import register_schemas, to_config

    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        overrides = [f"algo={algo}", "env=Hopper", f"compile={compile_update}", f"determinism={level}"]
        overrides += SAME[algo]
        return to_config(compose("config", overrides=overrides))


def ours(algo: str, seconds: float, compile_update: bool) -> float:
    """Environment steps per second of this project at its default level, observers off."""
    from rltemplate.run import determinism
    from rltemplate.train import build_algorithm

    config = configuration(algo, compile_update)
    determinism.apply(config.determinism, int(os.environ["OMP_NUM_THREADS"]), compile_update)
    algorithm, _ = build_algorithm(config)
    while algorithm.env_steps < WARM_UP[algo]:
        algorithm.train_iteration()
    first, started = algorithm.env_steps, time.perf_counter()
    while time.perf_counter() - started < seconds:
        algorithm.train_iteration()
    return (algorithm.env_steps - first) / (time.perf_counter() - started)


def prepared(algo: str, compile_update: bool, level: str) -> Algorithm:
    """The algorithm at a level, warmed up."""
    from rltemplate.run import determinism
    from rltemplate.train import build_algorithm

    config = configuration(algo, compile_update, level)
    determinism.apply(config.determinism, int(os.environ["OMP_NUM_THREADS"]), compile_update)
    algorithm, _ = build_algorithm(config)
    while algorithm.env_steps < WARM_UP[algo]:
        algorithm.train_iteration()
    return algorithm


def at_level(algo: str, seconds: float, compile_update: bool, level: str) -> float:
    """Environment steps per second of CPU time, observers off."""
    algorithm = prepared(algo, compile_update, level)
    first, started = algorithm.env_steps, time.process_time()
    while time.process_time() - started < seconds:
        algorithm.train_iteration()
    return (algorithm.env_steps - first) / (time.process_time() - started)


def traced(algo: str, seconds: float, compile_update: bool) -> dict[str, float]:
    """Environment steps per second of CPU time by detail of the trace, whose iterations take turns."""
    from rltemplate.run.trace import Trace
    from rltemplate.types import Probe

    algorithm = prepared(algo, compile_update, "repeat")
    spent, steps = dict.fromkeys(DETAILS, 0.0), dict.fromkeys(DETAILS, 0)
    with tempfile.TemporaryDirectory() as folder:
        probes: dict[str, Probe] = {"off": Probe()}
        for detail in ("iteration", "step"):
            (Path(folder) / detail).mkdir()
            probes[detail] = Trace(Path(folder) / detail, detail, algo)
        while sum(spent.values()) < seconds * len(DETAILS):
            for detail, probe in probes.items():
                before, started = algorithm.env_steps, time.process_time()
                algorithm.probe = probe
                result = algorithm.train_iteration()
                if isinstance(probe, Trace):
                    probe.end_iteration(algorithm.env_steps, result.probes)
                spent[detail] += time.process_time() - started
                steps[detail] += algorithm.env_steps - before
    return {detail: steps[detail] / spent[detail] for detail in DETAILS}


def stable_baselines3(algo: str, seconds: float) -> float:
    """Environment steps per second of Stable-Baselines3, logging off."""
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    class Clock(BaseCallback):  # type: ignore[misc, unused-ignore]
        """Starts at the first rollout after the warm-up, stops the training when the time is over.

        It only looks when a rollout begins: then collecting and learning have been done equally often.
        """

        def __init__(self) -> None:
            super().__init__()
            self.begun: tuple[int, float] | None = None
            self.rate = 0.0
            self.over = False

        def _on_rollout_start(self) -> None:
            now = time.perf_counter()
            if self.begun is None:
                if self.num_timesteps >= WARM_UP[algo]:
                    self.begun = (self.num_timesteps, now)
            elif now - self.begun[1] >= seconds:
                self.rate = (self.num_timesteps - self.begun[0]) / (now - self.begun[1])
                self.over = True

        def _on_step(self) -> bool:
            return not self.over

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model: Any
    if algo == "ppo":
        envs: Any = VecNormalize(make_vec_env(ENV, 8, seed=1))
        shape = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}
        model = sb3.PPO(
            "MlpPolicy", envs, n_steps=256, batch_size=64, policy_kwargs=shape, device="cpu", seed=1
        )
    else:
        envs = make_vec_env(ENV, 1, seed=1)
        model = sb3.SAC("MlpPolicy", envs, learning_starts=1000, device="cpu", seed=1)
    clock = Clock()
    model.learn(10**9, callback=clock, log_interval=None)
    return clock.rate


CONTENDERS: dict[str, Callable[[str, float], float]] = {
    "Stable-Baselines3": stable_baselines3,
    "rltemplate, eager": lambda algo, seconds: ours(algo, seconds, False),
    "rltemplate, compile=true": lambda algo, seconds: ours(algo, seconds, True),
}


DETAILS = ("off", "iteration", "step")
EAGER_LEVELS = ("fast", "repeat", "invariant", "profile")
COMPILED_LEVELS = ("fast", "repeat")


def level_contenders() -> dict[str, tuple[str, bool]]:
    """Name to level and whether compiled."""
    eager = {level: (level, False) for level in EAGER_LEVELS}
    return eager | {f"{level}, compile=true": (level, True) for level in COMPILED_LEVELS}


def peer_is_installed() -> bool:
    """Whether the optional extra `bench` is there."""
    return importlib.util.find_spec("stable_baselines3") is not None


def measure(contender: str, algo: str, seconds: float, threads: int, part: str = "peers") -> Any:
    """One measurement in a fresh process."""
    from rltemplate.run.determinism import prepared

    level = level_contenders()[contender][0] if part == "levels" else "repeat"
    environment = prepared(os.environ, configuration(algo, False, level).determinism, threads)
    command = [sys.executable, __file__, ONE, part, contender, algo, str(seconds)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def one(part: str, contender: str, algo: str, seconds: float) -> Any:
    """The measurement of this process."""
    if part == "peers":
        return CONTENDERS[contender](algo, seconds)
    if part == "levels":
        level, compiled = level_contenders()[contender]
        return at_level(algo, seconds, compiled, level)
    return traced(algo, seconds, contender == "compile=true")


def _row(work: str, name: str, values: list[float], against: list[float], digits: str) -> str:
    middle = statistics.median(values)
    span = f"{middle:,.0f} ({min(values):,.0f} to {max(values):,.0f})"
    ratio = middle / statistics.median(against) if against else float("nan")
    return f"| {work} | {name} | {span} | {ratio:{digits}} |"


def peers_table(speeds: Speeds) -> list[str]:
    """Medians of all repetitions, their range, and ratios to the peer."""
    lines = [
        "Environment steps per second, median (lowest to highest) of repetitions that took turns.",
        "",
        "| work | contender | steps/s | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for algo, contenders in speeds.items():
        peer = contenders.get("Stable-Baselines3", [])
        lines += [_row(SETTINGS[algo], name, v, peer, ".2f") for name, v in contenders.items()]
    return lines


def levels_table(speeds: Speeds) -> list[str]:
    """What each level costs: time per step against `fast`, from the best repetition of each.

    Whatever disturbs a measurement makes it slower, so the fastest one is the least disturbed.
    """
    lines = [
        "Cost of a level: CPU time per environment step against `fast`, from the fastest of the repetitions.",
        "",
        "| work | level | steps per CPU second, best (all) | cost |",
        "| --- | --- | --- | --- |",
    ]
    for algo, contenders in speeds.items():
        for name, values in contenders.items():
            base = contenders["fast, compile=true" if "compile" in name else "fast"]
            every = ", ".join(f"{value:,.0f}" for value in values)
            cost = max(base) / max(values)
            lines.append(f"| {algo.upper()} Hopper | {name} | {max(values):,.0f} ({every}) | {cost:.3f} |")
    return lines


def trace_table(rates: dict[str, dict[str, list[dict[str, float]]]]) -> list[str]:
    """What the trace costs: time per step against none, median over processes."""
    lines = [
        "Cost of the trace: CPU time per environment step against `trace=off`, iterations taking turns in",
        "one process; median over processes.",
        "",
        "| work | form | trace=iteration | trace=step |",
        "| --- | --- | --- | --- |",
    ]
    for algo, forms in rates.items():
        for form, processes in forms.items():
            costs = [
                statistics.median(each["off"] / each[detail] for each in processes) for detail in DETAILS[1:]
            ]
            lines.append(f"| {algo.upper()} Hopper | {form} | {costs[0]:.3f} | {costs[1]:.3f} |")
    return lines


TABLES: dict[str, Callable[[Any], list[str]]] = {
    "peers": peers_table,
    "levels": levels_table,
    "trace": trace_table,
}


def contenders(part: str) -> list[str]:
    """Who takes part."""
    if part == "levels":
        return list(level_contenders())
    if part == "trace":
        return ["eager", "compile=true"]
    if peer_is_installed():
        return list(CONTENDERS)
    print("stable-baselines3 is not installed (.venv/bin/pip install -e '.[bench]'): measuring without it")
    return [name for name in CONTENDERS if name != "Stable-Baselines3"]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError("expected a number") from None
    if not 0 < value < math.inf:
        raise ConfigError("must be greater than 0, and finite")
    return value


def earlier(file: Path) -> dict[str, Any]:
    """What was measured earlier, by part; `ConfigError` if that cannot be read and would be lost."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read, {error}; repair or remove it") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{file} holds no measurements; repair or remove it")
    return document


def main(argv: list[str]) -> int:
    """Measure, print and write the tables."""
    if argv[:1] == [ONE] and len(argv) == 5:
        part, contender, algo, duration = argv[1:]
        print(json.dumps(one(part, contender, algo, float(duration))))
        return 0
    kinds: Kinds = {
        "threads": whole(1, os.cpu_count()),
        "repetitions": whole(1),
        "seconds": _seconds,
        "out": str,
        "only": one_of(*TABLES),
    }
    try:
        given = parse_words(argv, kinds)
        threads, repetitions = given.get("threads", 1), given.get("repetitions", 3)
        seconds, out = given.get("seconds", 15.0), Path(given.get("out", "results"))
        document = earlier(out / "bench.json")
        make_folder("out", out)  # before hours of measuring
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    from rltemplate.run.machine import machine_facts, package_versions

    parts = [given["only"]] if "only" in given else list(TABLES)
    file = out / "bench.json"
    for part in parts:
        names = contenders(part)
        rates: dict[str, dict[str, list[Any]]] = {algo: {name: [] for name in names} for algo in SAME}
        for repetition in range(repetitions):
            for algo in rates:
                for name in names:
                    rate = measure(name, algo, seconds, threads, part)
                    rates[algo][name].append(rate)
                    shown = f"{rate:10,.0f} steps/s" if isinstance(rate, float) else json.dumps(rate)
                    print(f"{repetition + 1}/{repetitions}  {part}  {algo}  {name:26s} {shown}", flush=True)
        machine, versions = machine_facts(), package_versions()
        document[part] = {
            "threads": threads,
            "seconds": seconds,
            "repetitions": repetitions,
            "rates": rates,
            "machine": machine,
            "versions": versions,
        }
    text = "\n".join(line for part in TABLES if part in document for line in section(part, document[part]))
    print("\n" + text)
    (out / "bench.md").write_text(text)
    file.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def section(part: str, measured: dict[str, Any]) -> list[str]:
    """The lines of one part, with the machine they were measured on."""
    machine, versions = measured["machine"], measured["versions"]
    where = f"{measured['threads']} thread(s), {machine['cpu']}, torch {versions['torch']}"
    command = f"make bench only={part} repetitions={measured['repetitions']} seconds={measured['seconds']:g}"
    return [f"## {part}", "", f"`{command}`: {where}.", "", *TABLES[part](measured["rates"]), ""]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
