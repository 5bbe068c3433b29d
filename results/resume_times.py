"""How long it takes to keep a run and to go on with it, on this machine.

`python results/resume_times.py`

* checkpoints: writing one whose replay buffer holds 1,000,000 transitions, of which 100,000 are new, and
  reading it again.
* signals: every shipped environment with every algorithm that acts in it and its recipe, from SIGTERM at a
  random moment of training to the end of the process.
* starts: from `make resume` to the first new iteration, eager.

Wall times, so that the machine should have nothing else to do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from runlab.analysis.traces import open_trace
from runlab.errors import ConfigError
from runlab.machine import machine_facts
from runlab.run import paths
from runlab.run.read import raw_config

PROJECT = Path(__file__).resolve().parents[1]
TRAIN, RESUME = ("scripts/train.py",), ("-m", "runlab", "resume")
TRANSITIONS, NEW = 1_000_000, 100_000
LENGTH = 100  # transitions to an episode
QUIET = ["logger=none", "video_every=0", "eval_every=0", "log_every=0", "total_env_steps=100000000"]


def main() -> None:
    """Measure, and write the tables."""
    facts = machine_facts()
    lines = [
        "# What it takes to keep a run",
        "",
        f"Made with `python results/resume_times.py` on {facts['cpu']}, {facts['usable_cores']} cores, one "
        "thread each.",
    ]
    for table in (_checkpoints, _signals, _starts):
        for line in ("", *table()):
            print(line, flush=True)
            lines.append(line)
    Path(__file__).with_name("resume-times.md").write_text("\n".join(lines) + "\n")


def _checkpoints() -> Iterator[str]:
    import torch

    from rltemplate.learning.replay_buffer import ReplayBuffer, Transition
    from runlab.run.checkpoint import Checkpoints, load_checkpoint, load_experience
    from runlab.run.manifest import list_checkpoints

    torch.set_num_threads(1)
    yield "| replay buffer of 1M transitions | on the disk | training waits, each time | reading it again |"
    yield "| --- | --- | --- | --- |"
    for name, obs_size, action_size in (("Hopper", 11, 3), ("HalfCheetah", 17, 6), ("Humanoid", 348, 17)):
        # A recipe with large observations saves more often.
        new = NEW // 4 if obs_size > 300 else NEW
        with tempfile.TemporaryDirectory(dir=PROJECT) as folder:
            device = torch.device("cpu")
            # One step of so many environments adds at once what is new.
            buffer = ReplayBuffer(TRANSITIONS, obs_size, action_size, device, num_envs=new)
            rng = np.random.default_rng(0)
            writer = Checkpoints(Path(folder), {}, keep=3)
            weights = {"net": torch.zeros(3 * (obs_size + action_size) * 256 + 3 * 256 * 256)}
            times = []
            obs = torch.from_numpy(rng.standard_normal((new, obs_size), np.float32))
            ends = torch.arange(new) % LENGTH == 0
            for added in range(new, TRANSITIONS + 3 * new, new):
                rows = torch.from_numpy(rng.standard_normal((new, obs_size + action_size + 1), np.float32))
                next_obs, action, reward = rows.split([obs_size, action_size, 1], dim=1)
                buffer.add(Transition(obs, action, reward[:, 0], next_obs, torch.zeros(new), ends))
                obs = next_obs
                began = time.perf_counter()
                writer.save(added, {**weights, "env_steps": added}, buffer)
                times.append(time.perf_counter() - began)
            size = sum(path.stat().st_size for path in (Path(folder) / paths.CHECKPOINTS).iterdir())
            began = time.perf_counter()
            again = ReplayBuffer(TRANSITIONS, obs_size, action_size, device, num_envs=new)
            checkpoint = load_checkpoint(list_checkpoints(Path(folder))[-1])
            again.restore(added, load_experience(checkpoint, added - TRANSITIONS, added))
            read_s = time.perf_counter() - began
        median, worst = np.median(times), max(times)
        waits = f"{median:.2f} s for {new:,} new ones ({worst:.2f} s at most)"
        yield f"| {name} | {size / 1e6:,.0f} MB | {waits} | {read_s:.1f} s |"


def _signals() -> Iterator[str]:
    rng = np.random.default_rng(0)
    yield "| environment | algorithm | SIGTERM to the end |"
    yield "| --- | --- | --- |"
    for path in sorted((PROJECT / "conf" / "env").glob("[A-Z]*.yaml")):
        for algo in ("ppo", "sac"):
            if not (PROJECT / "conf" / "recipe" / f"{algo}-{path.stem}.yaml").exists():
                continue
            # Learning from the start: an iteration that only collects is over sooner.
            more = ["algo.learning_starts=300"] if algo == "sac" else []
            with tempfile.TemporaryDirectory() as folder:
                run_dir = Path(folder) / "run"
                words = [f"algo={algo}", f"env={path.stem}", *QUIET, *more, f"run_dir={run_dir}"]
                process = _start(TRAIN, *words)
                _until(process, run_dir, 2)
                time.sleep(rng.uniform(0.0, 3.0))
                began = time.perf_counter()
                process.send_signal(signal.SIGTERM)
                status = process.wait()
                took_s = time.perf_counter() - began
                record = json.loads((run_dir / paths.RECORD).read_text())
            assert (status, record["status"]) == (143, "interrupted"), (status, record["status"])
            yield f"| {path.stem} | {algo} | {took_s:.1f} s |"


def _starts() -> Iterator[str]:
    yield "| work | environments | environment steps before | `resume` to the first new iteration |"
    yield "| --- | --- | --- | --- |"
    full = "+env.kwargs.terminate_when_unhealthy=false"
    # Late in an episode and after a whole one, so that there is much to replay.
    for name, words, env_steps in (
        ("PPO CartPole", ["algo=ppo", "env=CartPole"], 0),
        ("PPO Hopper", ["algo=ppo", "env=Hopper"], 0),
        ("PPO LunarLander", ["algo=ppo", "env=LunarLander"], 0),
        ("PPO Humanoid, episodes of 1,000 steps", ["algo=ppo", "env=Humanoid", full], 7 * 2048),
        ("SAC Hopper", ["algo=sac", "env=Hopper", "algo.learning_starts=400"], 0),
        ("SAC Humanoid, episodes of 1,000 steps", ["algo=sac", "env=Humanoid", full], 1900),
    ):
        short = ["algo.steps_per_iteration=50"] if "sac" in words[0] else []
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "run"
            process = _start(TRAIN, *words, *QUIET, *short, f"run_dir={run_dir}")
            _until(process, run_dir, 20 if short else 2, env_steps)
            process.send_signal(signal.SIGTERM)
            process.wait()
            before, _ = _reach(run_dir)
            began = time.perf_counter()
            again = _start(RESUME, f"run={run_dir}")
            _until(again, run_dir, before + 1)
            took_s = time.perf_counter() - began
            again.kill()
            again.wait()
            record = json.loads((run_dir / paths.RECORD).read_text())
            num_envs = raw_config(run_dir)["env"]["num_envs"]
        yield f"| {name} | {num_envs} | {record['resumed'][0]['env_steps']:,} | {took_s:.1f} s |"


def _start(script: Sequence[str], *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *script, *words]
    return subprocess.Popen(
        command, cwd=PROJECT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _until(process: subprocess.Popen[bytes], run_dir: Path, iterations: int, env_steps: int = 0) -> None:
    """Wait for so many iterations and environment steps."""
    while (reached := _reach(run_dir))[0] < iterations or reached[1] < env_steps:
        assert process.poll() is None, f"{run_dir}: ended too early"
        time.sleep(0.02)


def _reach(run_dir: Path) -> tuple[int, int]:
    """Iterations and environment steps so far."""
    with suppress(ConfigError):  # no iteration yet
        return open_trace(run_dir).reach
    return 0, 0


if __name__ == "__main__":
    main()
