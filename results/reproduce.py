"""Runs made in every state of a repository, and again from their refs alone: `python results/reproduce.py`.

An author trains in a clone of the present commit and pushes `refs/runs/*`; a colleague fetches them and has
no run folder. The inverse: where the recorded code is not the colleague's, the same arguments give another
trace with that. Cases may be named (`python results/reproduce.py dirty linked`); only all of them write the
table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
HEAD = """\
# Made again from a ref alone

{} of {} runs identical, trace byte for byte and metrics but for times, in a clone that had nothing
of them but `refs/runs/*`; present code that is not theirs gave another trace.

| the run was made | arguments | iterations | made again | with the present code | seconds |
| --- | --- | --- | --- | --- | --- |
"""
CASES = {
    "clean": "from a commit as it is",
    "dirty": "with a changed constant, not committed",
    "untracked": "with an environment in a new, untracked file",
    "detached": "on a detached head",
    "linked": "in a linked worktree, since removed",
    "later": "before 10 commits, one to the algorithm",
}
QUIET = "video_every=0 logger=none eval_every=1000 eval_episodes=1"
WORKS = {  # in which something is learned from the second iteration on
    "CartPole": f"algo=ppo total_env_steps=6000 {QUIET}",
    "Pendulum": f"algo=sac total_env_steps=2400 algo.learning_starts=400 algo.batch_size=64 {QUIET}",
}
CHANGE = ("sed", "-i", "s/0.999/0.998/", "rltemplate/learning/optim.py")  # a constant of all algorithms
IDENTITY = ("-c", "user.name=author", "-c", "user.email=author@example.org")
SHORT = """\
import gymnasium as gym
for name in ("CartPole", "Pendulum"):
    gym.register(f"Short{name}-v0", f"gymnasium.envs.classic_control:{name}Env", max_episode_steps=STEPS)
"""


def main() -> int:
    """Try the cases that are named, or all; the exit status."""
    cases, rows = sys.argv[1:] or list(CASES), list[str]()
    if unknown := ", ".join(set(cases) - CASES.keys()):
        sys.exit(f"no such case: {unknown}; use {', '.join(CASES)}")
    for case, env in product(cases, WORKS):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_tried(case, env, Path(folder)))
        print(rows[-1], flush=True)
    good = sum("| identical |" in row and "not told apart" not in row for row in rows)
    if cases == list(CASES):
        Path(__file__).with_suffix(".md").write_text(HEAD.format(good, len(rows)) + "\n".join(rows) + "\n")
    return 0 if good == len(rows) else 1


def _tried(case: str, env: str, folder: Path) -> str:
    """The row of the table about one run."""
    author, server, colleague, place = (folder / each for each in ("author", "server", "colleague", "linked"))
    _do(folder, "git", "clone", "-q", PROJECT, author)
    _do(folder, "git", "init", "-q", "--bare", "-b", "main", server)
    env_id = f"short:Short{env}-v0" if case == "untracked" else env
    train = [sys.executable, "scripts/train.py", f"env={env_id}", *WORKS[env].split()]
    if case == "dirty":
        _do(author, *CHANGE)
    elif case == "untracked":
        (author / "short.py").write_text(SHORT.replace("STEPS", "60"))
    elif case == "detached":
        _do(author, "git", "checkout", "-q", "--detach")
    _do(author, "git", "worktree", "add", "-q", "--detach", place)
    _do(place if case == "linked" else author, *train, f"run_dir={folder / 'run'}")
    _do(author, "git", "worktree", "remove", "--force", place)
    for number in range(10 * (case == "later")):
        _do(author, *CHANGE)  # changes something once
        _do(author, "git", *IDENTITY, "commit", "-q", "-a", "--allow-empty", "-m", f"work {number}")
    _do(author, "git", "push", "-q", server, "HEAD:refs/heads/main", "refs/runs/*:refs/runs/*")
    run_id = json.loads((folder / "run" / "record.json").read_text())["id"]
    _do(folder, "git", "clone", "-q", server, colleague)
    _do(colleague, "git", "fetch", "-q", "origin", "refs/runs/*:refs/runs/*")
    words = [f"run={run_id}", "trust=true", "json=true"]  # the colleague knows the author
    answer = _do(colleague, sys.executable, "-P", "-m", "runlab", "reproduce", *words)
    found, present = json.loads(answer), "the same code"
    if case in ("dirty", "untracked", "later"):
        if case == "untracked":
            (colleague / "short.py").write_text(SHORT.replace("STEPS", "50"))
        _do(colleague, *train, f"run_dir={folder / 'present'}")
        traces = {(folder / name / "trace.jsonl").read_bytes() for name in ("run", "present")}
        present = "different" if len(traces) == 2 else "not told apart"
    facts = f"{' '.join(train[2:4])} | {found['iterations']} | {found['verdict']} | {present}"
    return f"| {CASES[case]} | {facts} | {found['seconds']:.0f} |"


def _do(folder: Path, *command: str | Path) -> str:
    """The output of a command with the code of a folder; status 1 says that something differs."""
    own = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=own, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{' '.join(map(str, command))}: exit status {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
