"""Runs made in every state of a repository, and again from their refs alone in a colleague's clone.

An author trains in a clone and pushes `refs/runs/*`; a colleague, who has no run folder, fetches them and
calls `reproduce`. The inverse: where the recorded code is not the colleague's present code, the same
configuration run with the present code gives another trace.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import git, program, run_train

from rltemplate.run import paths
from rltemplate.run.git.snapshot import TRACE_PATH

# Short runs, in which something is learned from the second iteration on.
SHORT = "video_every=0 logger=none eval_every=1000 eval_episodes=1"
WORKS = {
    "CartPole": f"algo=ppo total_env_steps=6000 {SHORT}",
    "Pendulum": "algo=sac total_env_steps=2400 algo.learning_starts=400 "
    f"algo.hidden_sizes=[64,64] algo.batch_size=64 {SHORT}",
}
# A constant that both algorithms use: how fast Adam forgets.
CONSTANT = ("rltemplate/learning/optim.py", "0.999", "0.998")
MODULE = "heavy.py"  # a new environment, in a file that git has never seen
HEAVY = """\
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv

class HeavyCartPole(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gravity = 9.8 * FACTOR

class HeavyPendulum(PendulumEnv):
    def __init__(self, **kwargs):
        super().__init__(g=10.0 * FACTOR, **kwargs)

gym.register("HeavyCartPole-v0", entry_point=HeavyCartPole, max_episode_steps=200)
gym.register("HeavyPendulum-v0", entry_point=HeavyPendulum, max_episode_steps=200)
"""


def commit(clone: Path, note: str) -> None:
    (clone / "notes.txt").write_text(note)
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", note)


def change_constant(clone: Path) -> None:
    path, old, new = CONSTANT
    text = (clone / path).read_text()
    assert old in text
    (clone / path).write_text(text.replace(old, new))


@pytest.mark.slow
@pytest.mark.parametrize("env", WORKS)
@pytest.mark.parametrize("case", ["clean", "dirty", "untracked", "detached", "linked", "later"])
def test_a_run_is_made_again_from_its_ref(case: str, env: str, fork: Path, tmp_path: Path) -> None:
    author, server, colleague = tmp_path / "author", tmp_path / "server.git", tmp_path / "colleague"
    git(tmp_path, "clone", "-q", str(fork), str(author))
    git(tmp_path, "init", "-q", "--bare", "-b", "main", str(server))
    git(author, "remote", "set-url", "origin", str(server))
    commit(author, "work before the run")
    git(author, "push", "-q", "origin", "main")
    place, words = author, [f"env={env}", *WORKS[env].split()]
    if case == "dirty":
        change_constant(author)
    elif case == "untracked":
        (author / MODULE).write_text(HEAVY.replace("FACTOR", "1.1"))
        words[0] = f"env=heavy:Heavy{env}-v0"
    elif case == "detached":
        git(author, "checkout", "-q", "--detach", "HEAD~1")
    elif case == "linked":  # a worktree that is gone afterwards
        place = tmp_path / "linked"
        git(author, "worktree", "add", "-q", "--detach", str(place))
    done = run_train(place, place, *words, f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    run_id = json.loads((tmp_path / "run" / paths.RECORD).read_text())["id"]
    if case == "linked":
        git(author, "worktree", "remove", "--force", str(place))
    elif case == "later":
        for number in range(10):
            if number == 5:
                change_constant(author)
            commit(author, f"work {number}")
        git(author, "push", "-q", "origin", "main")
    all_runs = "refs/runs/*:refs/runs/*"
    git(author, "push", "-q", "origin", all_runs)
    (tmp_path / "run").rename(tmp_path / "out of sight")

    git(tmp_path, "clone", "-q", str(server), str(colleague))
    git(colleague, "fetch", "-q", "origin", all_runs)
    looks = (("for-each-ref",), ("worktree", "list"), ("status", "--porcelain", "--branch"))
    before = [git(colleague, *look) for look in looks]
    command = [*program(colleague, "reproduce"), f"run={run_id}", "--json"]
    again = subprocess.run(command, cwd=colleague, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert (found["verdict"], found["iterations"] > 1) == ("identical", True)
    assert [git(colleague, *look) for look in looks] == before

    if case in ("dirty", "untracked", "later"):
        if case == "untracked":
            (colleague / MODULE).write_text(HEAVY.replace("FACTOR", "1.2"))
        done = run_train(colleague, colleague, *words, f"run_dir={tmp_path / 'present'}")
        assert done.returncode == 0, done.stderr
        recorded = git(colleague, "show", f"refs/runs/{run_id}:{TRACE_PATH}")
        assert (tmp_path / "present" / paths.TRACE).read_text() != recorded
