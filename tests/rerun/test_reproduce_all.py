"""Runs made in every state of a repository, and again from their refs alone in a colleague's clone.

An author trains in a clone and pushes `refs/runs/*`; a colleague, who has no run folder, fetches them and
calls `reproduce`. Where the code that ran is not the colleague's present code, the inverse: the same
configuration run with the present code gives another trace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import git, program

from rltemplate.run import paths
from rltemplate.run.git.snapshot import TRACE_PATH

COMMITS = 10  # between a run and its reproduction
# Short runs, in which something is learned from the second iteration on.
SHORT = "video_every=0 logger=none eval_every=1000 eval_episodes=1"
WORKS = {
    "ppo-CartPole": f"algo=ppo env=CartPole total_env_steps=6000 {SHORT}",
    "sac-Pendulum": "algo=sac env=Pendulum total_env_steps=2400 algo.learning_starts=400 "
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


class Author:
    """A clone in which a run is made, and the words of that run."""

    def __init__(self, fork: Path, folder: Path, words: str) -> None:
        self.clone = folder / "author"
        git(folder, "clone", "-q", str(fork), str(self.clone))
        git(folder, "init", "-q", "--bare", "-b", "main", str(folder / "server.git"))
        git(self.clone, "remote", "set-url", "origin", str(folder / "server.git"))
        self.words = words.split()
        self.place = self.clone  # where the run is made
        self.present: Callable[[Path], object] = lambda clone: None  # makes a clone the present code
        self.commit("work before the run")
        git(self.clone, "push", "-q", "origin", "main")

    def commit(self, note: str) -> None:
        (self.clone / "notes.txt").write_text(note)
        git(self.clone, "add", "-A")
        git(self.clone, "commit", "-q", "-m", note)

    def change_constant(self) -> None:
        path, old, new = CONSTANT
        text = (self.clone / path).read_text()
        assert old in text
        (self.clone / path).write_text(text.replace(old, new))


def clean(author: Author) -> None:
    """The work tree is a commit."""


def dirty(author: Author) -> None:
    """A constant of the algorithm was changed and not committed."""
    author.change_constant()


def untracked(author: Author) -> None:
    """The environment is in a new file; the present one has another."""
    (author.clone / MODULE).write_text(HEAVY.replace("FACTOR", "1.1"))
    author.words = [
        word.replace("env=", "env=heavy:Heavy") + "-v0" if word.startswith("env=") else word
        for word in author.words
    ]
    author.present = lambda clone: (clone / MODULE).write_text(HEAVY.replace("FACTOR", "1.2"))


def detached(author: Author) -> None:
    """No branch, but the commit before the last one."""
    git(author.clone, "checkout", "-q", "--detach", "HEAD~1")


def linked(author: Author) -> None:
    """The run is made in a linked worktree, which is gone afterwards."""
    author.place = author.clone.parent / "linked"
    git(author.clone, "worktree", "add", "-q", "--detach", str(author.place))


def later(author: Author) -> None:
    """Ten commits come after the run, one of which changes the algorithm."""

    def more_commits(clone: Path) -> None:
        for number in range(COMMITS):
            if number == COMMITS // 2:
                author.change_constant()
            author.commit(f"work {number}")
        git(author.clone, "push", "-q", "origin", "main")
        git(clone, "pull", "-q", "--ff-only", "origin", "main")

    author.present = more_commits


ALL_RUNS = "refs/runs/*:refs/runs/*"
OTHER_CODE = (dirty, untracked, later)  # what ran is not what the colleague's branch has


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("case", [clean, dirty, untracked, detached, linked, later])
def test_a_run_is_made_again_from_its_ref(
    case: Callable[[Author], None], work: str, fork: Path, tmp_path: Path
) -> None:
    author = Author(fork, tmp_path, WORKS[work])
    case(author)
    run_dir = tmp_path / "run"
    output(author.place, *program(author.place, "train"), *author.words, f"run_dir={run_dir}")
    run_id = json.loads((run_dir / paths.RECORD).read_text())["id"]
    if author.place != author.clone:
        git(author.clone, "worktree", "remove", "--force", str(author.place))
    git(author.clone, "push", "-q", "origin", ALL_RUNS)
    run_dir.rename(tmp_path / "out of sight")

    colleague = tmp_path / "colleague"
    git(tmp_path, "clone", "-q", str(tmp_path / "server.git"), str(colleague))
    if case is later:
        author.present(colleague)
    git(colleague, "fetch", "-q", "origin", ALL_RUNS)
    before = state(colleague)
    found = json.loads(output(colleague, *program(colleague, "reproduce"), f"run={run_id}", "--json"))
    assert found["verdict"] == "identical"
    assert found["iterations"] > 1
    assert state(colleague) == before

    if case in OTHER_CODE:
        if case is not later:
            author.present(colleague)
        script = [sys.executable, str(colleague / "scripts" / "train.py")]
        output(colleague, *script, *author.words, f"run_dir={tmp_path / 'present'}")
        recorded = git(colleague, "show", f"refs/runs/{run_id}:{TRACE_PATH}")
        assert (tmp_path / "present" / paths.TRACE).read_text() != recorded


def output(folder: Path, *command: str) -> str:
    """The standard output of a command, called in a folder."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "PYTHON"))}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def state(clone: Path) -> list[str]:
    commands = (("for-each-ref",), ("worktree", "list"), ("status", "--porcelain", "--branch"))
    return [git(clone, *words) for words in commands]
