"""Training speed side by side with Stable-Baselines3: `python scripts/bench.py [threads=1] [repetitions=3]`.

Every measurement is a process of its own with pinned threads, and contenders take turns, so that a change of
the machine's load falls on all of them. The same environment, number of environments, networks, batch,
epochs and updates per step; warm-up and compilation are not counted. Writes `results/bench.json` and
`results/bench.md`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rltemplate.config import Config  # noqa: E402
from rltemplate.types import ConfigError  # noqa: E402
from rltemplate.words import parse_words  # noqa: E402

ENV = "Hopper-v5"
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


def configuration(algo: str, compile_update: bool) -> Config:
    """The recipe of Hopper, with what the peer does otherwise."""
    from hydra import compose, initialize_config_dir

    from rltemplate.config import register_schemas, to_config

    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        overrides = [f"algo={algo}", "env=Hopper", f"compile={compile_update}", *SAME[algo]]
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


def peer_is_installed() -> bool:
    """Whether the optional extra `bench` is there."""
    return importlib.util.find_spec("stable_baselines3") is not None


def measure(contender: str, algo: str, seconds: float, threads: int) -> float:
    """One measurement in a fresh process."""
    from rltemplate.run.determinism import process_environment

    level = process_environment(configuration(algo, False).determinism, threads)
    environment = os.environ | {name: value for name, value in level.items() if value is not None}
    command = [sys.executable, __file__, "--one", contender, algo, str(seconds)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def report(speeds: dict[str, dict[str, list[float]]], threads: int, facts: dict[str, Any]) -> str:
    """A Markdown table: medians of all repetitions, their range, and ratios to the peer."""
    lines = [
        f"Measured by `make bench` with {threads} thread(s), {facts['cpu']}, torch {facts['torch']}.",
        "Environment steps per second, median (lowest to highest) of repetitions that took turns.",
        "",
        "| work | contender | steps/s | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for algo, contenders in speeds.items():
        peer = statistics.median(contenders.get("Stable-Baselines3", [float("nan")]))
        for name, values in contenders.items():
            middle = statistics.median(values)
            span = f"{middle:,.0f} ({min(values):,.0f} to {max(values):,.0f})"
            lines.append(f"| {SETTINGS[algo]} | {name} | {span} | {middle / peer:.2f} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Measure, print and write the table."""
    if argv[:1] == ["--one"]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--one", nargs=3)
        contender, algo, duration = parser.parse_args(argv).one
        print(json.dumps(CONTENDERS[contender](algo, float(duration))))
        return 0
    try:
        kinds = {"threads": int, "repetitions": int, "seconds": float, "out": str}
        given = parse_words(argv, kinds)
        threads, repetitions = given.get("threads", 1), given.get("repetitions", 3)
        seconds, out = given.get("seconds", 15.0), Path(given.get("out", "results"))
        if threads < 1 or repetitions < 1 or seconds <= 0:
            raise ConfigError("threads and repetitions must be at least 1, and seconds greater than 0")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    names = list(CONTENDERS)
    if not peer_is_installed():
        print(
            "stable-baselines3 is not installed (.venv/bin/pip install -e '.[bench]'): measuring without it"
        )
        names.remove("Stable-Baselines3")
    speeds: dict[str, dict[str, list[float]]] = {algo: {name: [] for name in names} for algo in SAME}
    for repetition in range(repetitions):
        for algo, contenders in speeds.items():
            for name in names:
                rate = measure(name, algo, seconds, threads)
                contenders[name].append(rate)
                print(f"{repetition + 1}/{repetitions}  {algo}  {name:26s} {rate:10,.0f} steps/s", flush=True)

    from rltemplate.run.machine import machine_facts, package_versions

    versions = package_versions()
    machine = machine_facts()
    facts = {"cpu": machine["cpu"], "torch": versions["torch"]}
    table = report(speeds, threads, facts)
    print("\n" + table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.md").write_text(table)
    document = {
        "threads": threads,
        "seconds": seconds,
        "speeds": speeds,
        "machine": machine,
        "versions": versions,
    }
    (out / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
