"""Make runs in every state of a repository, and again from their refs alone in a colleague's clone.

`python scripts/prove_reproduce.py [works=ppo-CartPole,sac-Pendulum] [cases=clean,dirty,...] [out=FILE]`

An author trains in a clone of this repository and pushes `refs/runs/*`; a colleague, who has no run folder,
fetches them and calls `reproduce`. Then the inverse, where the code that ran is not the colleague's present
code: the same configuration run with that must give another trace.

Results are written to `<out>.md`. Exit status: 0 all identical and all inverses different, 1 not, 2 bad
words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.config.command_args import Kinds, one_of, parse_words
from rltemplate.determinism.machine import machine_facts
from rltemplate.run import paths
from rltemplate.run.git.snapshot import CONFIG_PATH, TRACE_PATH
from rltemplate.types import ConfigError

PROJECT = Path(__file__).resolve().parents[1]
COMMITS = 10  # that come between a run and its reproduction, in one of the cases

# Short runs, in which something is learned from the second iteration on.
SHORT = ["video_every=0", "logger=none", "eval_every=1000", "eval_episodes=1"]
WORKS: dict[str, list[str]] = {
    "ppo-CartPole": ["algo=ppo", "env=CartPole", "total_env_steps=6000", *SHORT],
    "sac-Pendulum": [
        *("algo=sac", "env=Pendulum", "total_env_steps=2400", "algo.learning_starts=400"),
        *("algo.hidden_sizes=[64,64]", "algo.batch_size=64", *SHORT),
    ],
}
# A change of an algorithm's constant that both use: how fast Adam forgets.
CONSTANT = ("rltemplate/learning/optim.py", "torch.pow(0.999, steps)", "torch.pow(0.998, steps)")
# A new environment, in a file that git has never seen.
MODULE = "heavy.py"
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


@dataclass(frozen=True, slots=True)
class Seen:
    """What came out of one case."""

    case: str
    work: str
    iterations: int
    env_steps: int
    verdict: str
    seconds: float
    inverse: str
    commit: str

    @property
    def good(self) -> bool:
        """As it must be."""
        return self.verdict == "identical" and self.inverse in ("different", "the same code")


class Author:
    """A clone in which runs are made, and the words of the next run."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.clone = folder / "author"
        git(folder, "clone", "-q", str(PROJECT), str(self.clone))
        git(self.clone, "remote", "set-url", "origin", str(folder / "server.git"))
        git(folder, "init", "-q", "--bare", "-b", "main", str(folder / "server.git"))
        git(self.clone, "checkout", "-q", "-B", "main")
        git(self.clone, "push", "-q", "origin", "main")
        self.words = list(words)
        self.place = self.clone  # where the run is made
        self.present: Callable[[Path], None] = lambda clone: None  # makes a clone the present code

    def change_constant(self) -> None:
        """Another algorithm, not committed."""
        path, old, new = CONSTANT
        text = (self.clone / path).read_text()
        if text.count(old) != 1:
            raise RuntimeError(f"{path} has no {old} to be changed")
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
    author.present = lambda clone: _write(clone / MODULE, HEAVY.replace("FACTOR", "1.2"))


def detached(author: Author) -> None:
    """No branch, but the commit before the last one."""
    git(author.clone, "checkout", "-q", "--detach", "HEAD~1")


def linked(author: Author) -> None:
    """The run is made in a linked worktree, which is gone afterwards."""
    author.place = author.clone.parent / "linked"
    git(author.clone, "worktree", "add", "-q", "--detach", str(author.place))


def later(author: Author) -> None:
    """Ten commits come after the run, one of which changes the algorithm."""

    def go_on(clone: Path) -> None:
        for number in range(COMMITS):
            if number == COMMITS // 2:
                author.change_constant()
            _write(author.clone / "notes.txt", f"{number}\n")
            git(author.clone, "add", "-A")
            git(author.clone, "commit", "-q", "-m", f"work {number}")
        git(author.clone, "push", "-q", "origin", "main")
        git(clone, "pull", "-q", "--ff-only", "origin", "main")

    author.present = go_on


CASES: dict[str, Callable[[Author], None]] = {
    each.__name__: each for each in (clean, dirty, untracked, detached, linked, later)
}
# Where what ran is not what the colleague's branch has.
ALL_RUNS = "refs/runs/*:refs/runs/*"
OTHER_CODE = ("dirty", "untracked", "later")


def prove(case: str, work: str, folder: Path) -> Seen:
    """One case: train, push, fetch, reproduce, and the inverse."""
    author = Author(folder, WORKS[work])
    CASES[case](author)
    run_dir = folder / "run"
    python(author.place, "train", *author.words, f"run_dir={run_dir}")
    run_id = json.loads((run_dir / paths.RECORD).read_text())["id"]
    if author.place != author.clone:
        git(author.clone, "worktree", "remove", "--force", str(author.place))
    git(author.clone, "push", "-q", "origin", ALL_RUNS)
    (folder / "run").rename(folder / "out of sight")

    colleague = folder / "colleague"
    git(folder, "clone", "-q", str(folder / "server.git"), str(colleague))
    if case == "later":  # all that comes after the run is there before it is made again
        author.present(colleague)
    git(colleague, "fetch", "-q", "origin", ALL_RUNS)
    before = _state(colleague)
    began = time.monotonic()
    done = python(colleague, "reproduce", f"run={run_id}", "--json", fine=(0, 1))
    seconds = time.monotonic() - began
    found: dict[str, Any] = json.loads(done)
    if _state(colleague) != before and found["verdict"] == "identical":
        raise RuntimeError(f"{case}, {work}: the reproduction left something in the repository")

    inverse = "the same code"
    if case in OTHER_CODE:
        if case != "later":
            author.present(colleague)
        config = folder / "config.yaml"
        config.write_text(git(colleague, "show", f"refs/runs/{run_id}:{CONFIG_PATH}"))
        python(colleague, "rerun", f"config={config}", f"run_dir={folder / 'present'}")
        trace = (folder / "present" / paths.TRACE).read_text()
        same = trace == git(colleague, "show", f"refs/runs/{run_id}:{TRACE_PATH}")
        inverse = "the same" if same else "different"
    return Seen(
        case=case,
        work=work,
        iterations=found["iterations"],
        env_steps=found["env_steps"],
        verdict=found["verdict"],
        seconds=round(seconds, 1),
        inverse=inverse,
        commit=git(author.clone, "rev-parse", "--short=10", "HEAD").strip(),
    )


def git(folder: Path, *words: str) -> str:
    """The output of a git command."""
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words)}: {done.stderr}")
    return done.stdout


def python(clone: Path, script: str, *words: str, fine: Sequence[int] = (0,)) -> str:
    """The output of a script of a clone, called in it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "PYTHON"))}
    command = [sys.executable, f"scripts/{script}.py", *words]
    done = subprocess.run(command, cwd=clone, env=kept, capture_output=True, text=True)
    if done.returncode not in fine:
        raise RuntimeError(
            f"{script} {' '.join(words)}: exit status {done.returncode}\n{done.stderr[-2000:]}"
        )
    return done.stdout


def _state(clone: Path) -> tuple[str, ...]:
    commands = (("for-each-ref",), ("worktree", "list"), ("status", "--porcelain", "--branch"))
    return tuple(git(clone, *words) for words in commands)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def table(results: Sequence[Seen]) -> str:
    """What was seen, as Markdown."""
    facts = machine_facts(with_gpus=False)
    good = sum(seen.good for seen in results)
    inverses = sum(seen.inverse == "different" for seen in results)
    lines = [
        "# Made again from a ref alone",
        "",
        f"{good} of {len(results)} runs identical, trace byte for byte and every row of metrics but times,",
        "in a clone that had nothing of them but `refs/runs/*` (`git push`, `git fetch`, `make reproduce`).",
        f" In {inverses} cases the code that ran is not the present one: with that, the",
        "same configuration gives another trace.",
        f"Made with `python scripts/prove_reproduce.py` on {facts['cpu']}, {facts['usable_cores']} cores.",
        "",
        "| the run was made | work | iterations | steps | made again | with the present code | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    said = {
        "clean": "from a commit as it is",
        "dirty": "with a changed constant, not committed",
        "untracked": "with an environment in a new, untracked file",
        "detached": "on a detached head",
        "linked": "in a linked worktree, since removed",
        "later": f"before {COMMITS} more commits, one to the algorithm",
    }
    lines += [
        f"| {said[seen.case]} | {seen.work} | {seen.iterations} | {seen.env_steps:,} | {seen.verdict} "
        f"| {seen.inverse} | {seen.seconds:.0f} |"
        for seen in results
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Prove it, case by case."""
    kinds: Kinds = dict.fromkeys(("works", "cases", "out"), str)
    try:
        given = parse_words(argv, kinds)
        works = [one_of(*WORKS)(text) for text in given.get("works", ",".join(WORKS)).split(",")]
        cases = [one_of(*CASES)(text) for text in given.get("cases", ",".join(CASES)).split(",")]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = []
    for case in cases:
        for work in works:
            with tempfile.TemporaryDirectory(prefix="prove-") as folder:
                seen = prove(case, work, Path(folder))
            results.append(seen)
            print(f"{case}, {work}: {seen.verdict}; with the present code: {seen.inverse}", flush=True)
    out = Path(given.get("out", PROJECT / "results" / "reproduce"))
    out.with_suffix(".md").write_text(table(results))
    return 0 if all(seen.good for seen in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
