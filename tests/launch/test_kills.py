"""Runs that are killed at random moments and resumed end identical with runs that nobody killed.

`KILLS=20 make prove-resume` kills each of the works that often. Half of the moments are drawn from the time
of a start (interpreter, libraries, checkpoint, replay of episodes), the others from the seconds after it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import Started, differences, until

from runlab.run import paths

KILLS = int(os.environ.get("KILLS", "2"))
AFTER_START_S = {"ppo-Pong": 20.0}  # a run may be killed until so long after its first new iteration; else 3
LONGEST_S = 1800.0

# Small iterations and many checkpoints, so that kills meet everything that a run does. Humanoid falls over
# within twenty steps unless it may lie on the ground; then its episodes have their full 1,000 steps.
PPO = "algo=ppo eval_every=8000 eval_episodes=1 log_every=500 video_every=0"
SAC = (
    "algo=sac algo.learning_starts=200 algo.steps_per_iteration=40 eval_every=800 eval_episodes=1 "
    "log_every=200 video_every=0 checkpoint_every=120"
)
MOE = PPO.replace("algo=ppo", "algo=ppo_moe algo.rollout_dtype=bfloat16")
RECURRENT = PPO.replace("algo=ppo", "algo=ppo_recurrent env=CartPoleNoVel env.num_envs=4")
CATCH = f"{PPO} env=Catch checkpoint_every=512 total_env_steps=16384"
# A first game takes 760 to 1,000 steps. Sticky actions and ALE's generator matter in resumes after that.
PONG = f"{PPO} env=Pong env.num_envs=2 checkpoint_every=256 total_env_steps=6144 algo.update_epochs=1"
LYING = "env.num_envs=4 +env.kwargs.terminate_when_unhealthy=false"
WORKER = "env.num_envs=4 env.num_workers=1"
WORKS = {
    "ppo-CartPole": f"{PPO} env=CartPole checkpoint_every=1000 total_env_steps=24000 env.num_envs=4",
    "ppo-Hopper": f"{PPO} env=Hopper checkpoint_every=1000 total_env_steps=80000 {WORKER} compile=true",
    "ppo-LunarLander": f"{PPO} env=LunarLander checkpoint_every=2000 total_env_steps=16384 env.num_envs=1",
    "ppo-Catch": f"{CATCH} env.num_envs=4",
    "ppo-Catch-compiled": f"{CATCH} {WORKER} compile=true",
    "ppo-Pong": PONG.replace("eval_every=8000", "eval_every=2048"),
    "ppo_moe-Hopper": f"{MOE} env=Hopper checkpoint_every=1000 total_env_steps=60000 {WORKER} compile=true",
    "ppo_recurrent-CartPoleNoVel": f"{RECURRENT} checkpoint_every=1000 total_env_steps=24000",
    "sac-Pendulum": f"{SAC} env=Pendulum total_env_steps=1600 {WORKER} compile=true",
    "sac-Hopper": f"{SAC} env=Hopper total_env_steps=1200 env.num_envs=1 compile=true",
    "sac-Humanoid": f"{SAC} env=Humanoid {LYING} total_env_steps=4800 algo.updates_per_step=0.25",
}


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS)
def test_killed_and_resumed_runs_are_identical(work: str, fork: Path, tmp_path: Path) -> None:
    if work == "ppo-Pong":
        pytest.importorskip("ale_py", reason="ale-py, which has the games, is not installed")
    draw = np.random.default_rng(list(work.encode()))
    after_s = AFTER_START_S.get(work, 3.0)
    straight = tmp_path / "straight"
    start_s = train(fork, work, straight, None)
    kills = 0
    while kills < KILLS:
        run_dir, ended = tmp_path / "killed", -1.0
        while ended < 0:
            early = draw.uniform() < 0.5
            moment = draw.uniform(0.0, start_s) if early else start_s + draw.uniform(0.0, after_s)
            ended = train(fork, work, run_dir, moment if kills < KILLS else None)
            kills += ended < 0
        assert differences(straight, run_dir) == [], f"after {kills} kills"
        shutil.rmtree(run_dir)
    other = tmp_path / "other"
    train(fork, work, other, None, "seed=2")
    assert {paths.TRACE, paths.METRICS} < set(differences(straight, other))


def train(fork: Path, work: str, run_dir: Path, kill_after_s: float | None, *more: str) -> float:
    """Begin or resume a run; the seconds to its first new iteration, or -1 if it was killed.

    A run that was killed before it had a record is begun again.
    """
    before, began, first_s = iterations(run_dir), time.monotonic(), 0.0
    if (run_dir / paths.RECORD).exists():
        words = ["resume", f"run={run_dir}"]
    else:
        shutil.rmtree(run_dir, ignore_errors=True)
        words = ["train", *WORKS[work].split(), *more, f"run_dir={run_dir}"]
    started = Started(fork, run_dir.parent, run_dir.with_suffix(".log"), *words)
    if kill_after_s is None:
        until(lambda: iterations(run_dir) > before or started.process.poll() is not None, LONGEST_S)
        first_s, kill_after_s = time.monotonic() - began, LONGEST_S
    try:
        started.process.wait(began + kill_after_s - time.monotonic())
    except subprocess.TimeoutExpired:
        started.process.kill()
        started.process.wait()
        print(f"killed after {iterations(run_dir)} iterations")
        return -1.0
    started.end(0)
    return first_s


def iterations(run_dir: Path) -> int:
    trace = run_dir / paths.TRACE
    return trace.read_bytes().count(b'\n["iteration"') if trace.exists() else 0
