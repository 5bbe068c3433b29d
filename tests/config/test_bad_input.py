"""Wrong calls of every command, each in a process of its own: refused in a line or two, and nothing is left.

The table has a line for each. To add one, name the command, its words, and what the answer must contain: what
was wrong, and what is allowed or was probably meant.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, SHRUNK, git, program, run_train

from rltemplate.run import paths

REFUSED = 2
CPU_SECONDS = 3.0
# Where torch must be asked, whose import alone is half of the above and more on busy cores.
TORCH_SECONDS = 6.0
MOST_LINES = 2
LONG = "x" * 100_000
DIGITS = "9" * 5000

# The runs that lie in the folder of whoever looks at runs. What `given` damages belongs to the first.
A, B = "20260101-120000-seed1-aaaaaa", "20260101-120000-seed1-bbbbbb"
GROUP = "ppo-CartPole"
CHECKPOINT, MANIFEST = f"{paths.CHECKPOINTS}/step_64.pt", f"{paths.CHECKPOINTS}/step_64.json"
RUN = "run=seed1-aaaaaa"
A_B = "a=seed1-aaaaaa b=seed1-bbbbbb"
ONE = "runs=runs/*/*aaaaaa"
LOOKS_AT_RUNS = (
    "evaluate",
    "runs",
    "diff",
    "compare",
    "curves",
    "report",
    "stats",
    "resume",
    "reproduce",
)

# What lies in the folder besides; takes the folder, and in it the folder of run A.
Given = Callable[[Path, Path], None]


def nothing(folder: Path, run: Path) -> None:
    """Nothing besides."""


def a_file(name: str, content: str = "mine") -> Given:
    """A file in the folder."""

    def make(folder: Path, run: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)

    return make


def a_link(name: str, target: str) -> Given:
    """A symbolic link in the folder."""
    return lambda folder, run: (folder / name).symlink_to(target)


def holds(name: str, content: str | bytes) -> Given:
    """Something else in a file of the run."""

    def write(folder: Path, run: Path) -> None:
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def without(name: str) -> Given:
    """A file of the run is gone, or a folder with all that was in it."""

    def remove(folder: Path, run: Path) -> None:
        if (run / name).is_dir():
            shutil.rmtree(run / name)
        else:
            (run / name).unlink()

    return remove


def a_folder_as(name: str) -> Given:
    """A folder where a file of the run is expected: nobody can read it, whatever he is allowed to."""

    def replace(folder: Path, run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return replace


def no_runs(folder: Path, run: Path) -> None:
    """Not one run lies there."""
    shutil.rmtree(folder / "runs")


def edited(name: str, old: str, new: str) -> Given:
    """A file of the run with other text in it."""

    def edit(folder: Path, run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return edit


BINARY = bytes(range(256)) * 8


@dataclass(frozen=True)
class Wrong:
    """A call that must be refused. `on` says whether it is wrong on this machine at all.

    `torch` says that nobody can know that it is wrong without having imported torch.
    """

    command: str
    words: list[str]
    says: tuple[str, ...]
    given: Given = nothing
    on: Callable[[], bool] = lambda: True
    torch: bool = False

    def __str__(self) -> str:
        text = f"{self.command} {' '.join(self.words)}".encode("unicode_escape").decode()
        text = text if len(text) < 70 else f"{text[:40]}...{text[-10:]}"
        return text if self.given is nothing else f"{text}: {self.says[0]}"


def wrong(
    command: str,
    words: str | list[str],
    *says: str,
    given: Given = nothing,
    on: Callable[[], bool] = lambda: True,
    torch: bool = False,
) -> Wrong:
    """A line of the table. Words in a text are separated by spaces; those with spaces in them need a list."""
    return Wrong(command, words.split() if isinstance(words, str) else words, says, given, on, torch)


def no_cuda() -> bool:
    """Whether torch finds no CUDA device here."""
    import torch

    return not torch.cuda.is_available()


def lacks(module: str) -> Callable[[], bool]:
    """Whether a package is not installed here."""
    return lambda: find_spec(module) is None


def no_slurm() -> bool:
    """Whether this machine belongs to no Slurm cluster."""
    return shutil.which("srun") is None


TRAIN = [
    # a key: misspelt, of other programs, of the other algorithm, in another place
    wrong("train", "algo.learning_rat=1e-3", "algo.learning_rat=1e-3", "did you mean algo.learning_rate?"),
    wrong("train", "sed=1", "sed=1: no such key", "did you mean seed?", "allowed: "),
    wrong("train", "seeds=[1,2,3]", "seeds=[1,2,3]: no such key", "did you mean seed?"),
    wrong("train", "xyzzy=1", "xyzzy=1: no such key", "allowed: algo, "),
    wrong("train", "n_epochs=3", "n_epochs=3", "did you mean algo.update_epochs?"),
    wrong("train", "total_timesteps=100", "did you mean total_env_steps?"),
    wrong("train", "batch_size=64", "batch_size=64", "did you mean algo.num_minibatches?"),
    wrong("train", "algo=sac batch_size=64", "batch_size=64", "did you mean algo.batch_size?"),
    wrong("train", "net_arch=[64,64]", "net_arch=[64,64]", "did you mean algo.hidden_sizes?"),
    wrong("train", "cuda=true", "cuda=true", "did you mean device?"),
    wrong("train", "track=true", "track=true", "logger=wandb"),
    wrong("train", "env.name=Hopper-v5", "env.name=Hopper-v5", "did you mean env?"),
    wrong("train", "torch_deterministic=true", "did you mean determinism?"),
    wrong("train", "env.async_envs=true", "env.async_envs=true", "did you mean env.num_workers?"),
    wrong("train", "env.num_workers=9", "env.num_workers=9: must be at most env.num_envs=8"),
    wrong("train", "env.num_workers=-1", "env.num_workers=-1: must be at least 0"),
    wrong("train", "algo.tau=0.1", "algo.tau=0.1", "algo=ppo has no such key, algo=sac has"),
    wrong("train", "learning_starts=9", "learning_starts=9", "algo=sac has algo.learning_starts"),
    wrong("train", "algo=sac algo.clip_coef=0.1", "algo.clip_coef=0.1", "algo=ppo has"),
    wrong("train", "algo.name=sac", "algo.name=sac", "choose it with algo="),
    wrong("train", f"{LONG}=1", "xxx...xxx", "100,002 characters", "no such key"),
    # a group or an option
    wrong("train", "algo=scc", "algo=scc", "did you mean sac?", "allowed: ppo, sac"),
    wrong("train", "algo=dqn", "algo=dqn", "allowed: ppo, sac"),
    wrong("train", "algo=", "algo=", "allowed: ppo, sac"),
    wrong("train", "determinism=repat", "did you mean repeat?", "allowed: fast"),
    wrong("train", "recipe=ppo-Hoper", "did you mean ppo-Hopper?"),
    wrong("train", "hydra/launcher=ray seed=1,2", "hydra/launcher=ray: not installed", "allowed: basic"),
    wrong("train", "hydra/sweeper=optuna seed=1,2", "hydra/sweeper=optuna: not installed", "allowed: basic"),
    wrong("train", "hydra/launcher=submitit_slurm seed=1,2", "no srun", "joblib", on=no_slurm),
    # an environment
    wrong("train", "env=Cartpole", "env=Cartpole", "did you mean CartPole?"),
    wrong("train", "env=Hoper-v5", "env=Hoper-v5", "did you mean Hopper-v5?"),
    wrong("train", "env=ALE/Pong-v5", "env=ALE/Pong-v5", "pip install ale-py", on=lacks("ale_py")),
    wrong("train", "env=no_such_package:Id-v0", "env=no_such_package:Id-v0", "cannot import no_such_package"),
    wrong("train", "env=:CartPole-v1", "env=:CartPole-v1", "package:CartPole-v1"),
    wrong("train", "env=CarRacing-v3", "CarRacing-v3 observes images", "vector observations"),
    wrong("train", "env=Blackjack-v1", "Blackjack-v1 has the observation space Tuple", "Box and Discrete"),
    wrong("train", "algo=sac env=CartPole", "algo=sac needs continuous actions", "use algo=ppo"),
    wrong("train", ["env=Hop\nper"], r"'env=Hop\nper'", "did you mean Hopper?"),
    wrong("train", "+env.kwargs.nonsense=1", "env.kwargs={'nonsense': 1}", "unexpected keyword argument"),
    wrong("train", "env.kwargs.x=1", "env.kwargs.x=1", "as +env.kwargs.x=1"),
    wrong(
        "train", "env=FrozenLake-v1 +env.kwargs.map_name=9x9", "env.kwargs={'map_name': '9x9'}", "KeyError"
    ),
    wrong("train", "env=Ant-v3", "env.id=Ant-v3", "gymnasium-robotics"),
    # a value
    wrong("train", "seed=1.5", "seed=1.5: expected a whole number"),
    wrong("train", "seed=-1", "seed=-1: must be at least 0"),
    wrong("train", "seed=" + "9" * 30, "seed=999", "at least 0 and at most 9223372036854775807"),
    wrong("train", "determinism.hash_seed=-1", "determinism.hash_seed=-1", "at most 4294967295"),
    wrong("train", f"seed={DIGITS}", "seed=999", "5,005 characters", "digits"),
    wrong("train", f"seed={LONG}", "seed=xxx", "expected a whole number"),
    wrong("train", "seed=", "seed=: expected a whole number"),
    wrong("train", ["seed=\u00fc \u200b"], "seed=\u00fc", "expected a whole number"),
    wrong("train", ["seed=\udcff"], r"'seed=\udcff'", "not UTF-8"),
    wrong("train", ['seed="1'], 'seed="1: expected a whole number'),
    wrong("train", ["logger.wandb.project=it's"], "logger.wandb.project=it's", "need quoting"),
    wrong("train", "algo.hidden_sizes=[64", "'[' has no partner", "algo.hidden_sizes=[64,64]"),
    wrong("train", "algo.learning_rate=high", "algo.learning_rate=high: expected a number"),
    wrong("train", "algo.gamma=1.5", "algo.gamma=1.5: must be at least 0 and at most 1"),
    wrong("train", "compile=maybe", "compile=maybe: expected true or false"),
    wrong("train", "trace=false", "trace=false", "did you mean off?", "allowed: iteration, off, step"),
    wrong("train", "device=gpu", "device=gpu", "did you mean cuda?"),
    wrong(
        "train",
        "device=cuda",
        "device=cuda: torch finds no CUDA device",
        "device=cpu",
        on=no_cuda,
        torch=True,
    ),
    wrong("train", "env.num_envs=0", "env.num_envs=0: must be at least 1"),
    wrong("train", "total_env_steps=-5", "total_env_steps=-5: must be at least 1"),
    wrong("train", "total_env_steps=1e6", "did you mean total_env_steps=1000000?"),
    wrong("train", "num_threads=0", "num_threads=0: must be at least 1"),
    wrong(
        "train",
        "recipe=null algo.num_steps=1 env.num_envs=1 algo.num_minibatches=1",
        "one sample per minibatch",
        "use algo.num_steps=2 at least",
    ),
    # more than any machine holds, or than means anything
    wrong("train", "algo.hidden_sizes=[1000000,1000000]", "needs at least 29,802.4 GiB of memory", "has "),
    wrong("train", "algo.num_steps=1000000000", "algo.num_steps=1000000000: needs at least", ", enough for "),
    wrong("train", "algo=sac env=Pendulum algo.batch_size=999999999", "needs at least", ", enough for "),
    wrong("train", f"algo=sac env=Pendulum algo.buffer_size={10**14}", "at least 1 and at most 2000000000"),
    wrong("train", "algo.learning_rate=1e300", "learning_rate=1e+300: must be greater than 0 and at most 10"),
    wrong("train", f"total_env_steps={10**21}", f"must be at least 1 and at most {10**12}"),
    wrong("train", "num_threads=100000", "num_threads=100000: must be at least 1 and at most 1024"),
    wrong("train", "env.num_envs=1000000", "env.num_envs=1000000: must be at least 1 and at most 65536"),
    wrong("train", "seed=1,2 algo.hidden_sizes=[1000000,1000000]", "needs at least", "of memory"),
    wrong("prove", "algo.hidden_sizes=[1000000,1000000]", "needs at least", "of memory"),
    wrong("train", "runs_dir=~no-body/x", "runs_dir=~no-body/x: this machine does not know whose home"),
    wrong("train", "seed=1,2 run_dir=~no-body", "run_dir=~no-body: all jobs of a sweep"),
    wrong("train", ["--multirun", "hydra.sweeper.params={seed:1}"], "written as overrides, as in seed=1,2"),
    wrong("train", "--multirun hydra.sweeper.params.seed=1", "written as overrides, as in seed=1,2"),
    wrong("train", "algo.num_minibatches=7", "does not divide the rollout of 256", "nearest that does: 8"),
    wrong("train", "compile=true determinism=invariant", "compile=true", "use compile=false"),
    # the form of a word
    wrong("train", "+algo.extra=1", "+algo.extra=1", "env.kwargs only"),
    wrong("train", "++seed=3", "++seed=3: exists already", "as seed=3"),
    wrong("train", "~seed", "~seed: nothing can be removed"),
    wrong("train", "seed=1 seed=2", "seed=2: seed is given twice"),
    wrong("train", "algo = sac", "algo: expected key=value"),
    wrong("train", ["seed= 3"], "leave no spaces around '='", "write seed=3"),
    wrong("train", "Hopper", "Hopper: expected key=value", "did you mean env=Hopper?"),
    wrong("train", [""], "'': expected key=value"),
    wrong("train", LONG, "100,000 characters", "expected key=value"),
    # options
    wrong("train", "--seed=3", "--seed: no such option", "as seed=3"),
    wrong("train", "--mutlirun", "--mutlirun: no such option", "did you mean --multirun?"),
    wrong("train", "--config-name=x", "--config-name is not supported", "conf/"),
    # sweeps
    wrong("train", "seed=1,2,x", "seed=x: expected a whole number", "in the job seed=x"),
    wrong("train", "algo.gamma=0.9,0.99,1.5", "algo.gamma=1.5: must be", "in the job algo.gamma=1.5"),
    wrong("train", "env=CartPole,Pendulum,Hoper", "env=Hoper:", "did you mean Hopper?"),
    wrong("train", "env=Pendulum,CartPole algo=ppo,sac", "algo=sac needs continuous", "use algo=ppo"),
    wrong("train", "run_dir=a,b", "run_dir=a,b: all jobs of a sweep have one run_dir"),
    wrong("train", "run_dir=a seed=1,2", "run_dir=a: all jobs", "use runs_dir"),
    wrong("train", "seed=interval(0,3)", "seed=interval(0,3)", "use choice() or range()"),
    wrong("train", "seed=range(3,1)", "seed=range(3,1): has no value", "range(1,4)"),
    wrong("train", "seed=range(1,9,0)", "seed=range(1,9,0)", "range(1,9,2)"),
    wrong("train", "seed=range(1000000000)", "more than 100,000 jobs", "fewer values"),
    # a baseline
    wrong("train", "baseline=nope", "baseline=nope: there is no folder runs_dir=runs"),
    wrong("train", "baseline=a,b", "baseline=a,b: all jobs of a sweep have one baseline"),
    wrong("train", "baseline_check=maybe", "baseline_check=maybe", "allowed: refuse, warn"),
    wrong("train", "baselin=x", "baselin=x: no such key", "did you mean baseline?"),
    # folders
    wrong("train", "runs_dir=mine", "runs_dir=mine: is a file", "expected a folder", given=a_file("mine")),
    wrong("train", "run_dir=.", "run_dir=.: is not empty", "folder of its own", given=a_file("mine")),
    wrong("train", "run_dir=mine/x", "run_dir=mine/x: cannot be made", given=a_file("mine")),
    wrong("train", "run_dir=", "run_dir: expected the name of a folder"),
    wrong("train", "runs_dir=" + "n" * 300, "runs_dir=nnn", "cannot be made, File name too long"),
    wrong("train", "runs_dir=link", "runs_dir=link: cannot be made", given=a_link("link", "no/where")),
    wrong("train", ['run_dir="~nobody-here/x"'], "run_dir=~nobody-here/x", "does not know whose home"),
    wrong("train", "seed=1,2 runs_dir=/proc/x", "runs_dir=/proc/x: cannot be made", on=Path("/proc").is_dir),
    wrong("train", f"logger.wandb.project={LONG}", "too long", "shorten its longest value"),
]

EVALUATE = [
    wrong("evaluate", "", "run= is missing", "allowed: run=, episodes=, seed=, runs_dir=, --json"),
    wrong("evaluate", "run=", "run=: a value is missing"),
    wrong("evaluate", "rum=x", "rum=x: no such key", "did you mean run=?", "allowed: run="),
    wrong("evaluate", "seed1-aaaaaa", "seed1-aaaaaa: expected key=value", "allowed: run="),
    wrong("evaluate", f"{RUN} --jsn", "--jsn: no such option", "did you mean --json?"),
    wrong("evaluate", f"{RUN} {RUN}", "run is given twice"),
    wrong("evaluate", f"{RUN} episodes=0", "episodes=0: must be at least 1"),
    wrong("evaluate", f"{RUN} episodes=2.5", "episodes=2.5: expected a whole number, at least 1"),
    wrong("evaluate", f"{RUN} episodes={DIGITS}", "episodes=999", "5,009 characters", "whole number"),
    wrong("evaluate", f"{RUN} seed=-1", "seed=-1: must be at least 0"),
    wrong("evaluate", "run=nope", "run=nope: no such run under runs", f"the newest is {B}"),
    wrong("evaluate", "run=seed1-aaaaab", "run=seed1-aaaaab: no such run", f"did you mean {A}?"),
    wrong("evaluate", "run=seed1", "run=seed1: in the ids of 2 runs", A, B, "use more of it"),
    wrong("evaluate", f"run=runs/{GROUP}", f"run=runs/{GROUP}: is a folder without record.json"),
    wrong("evaluate", f"run=runs/{GROUP}/{A}/record.json", "is a file, and no run folder"),
    wrong("evaluate", f"run={LONG}", "run=xxx", "100,004 characters", "no such run"),
    wrong("evaluate", "run=~nobody-here/x", "run=~nobody-here/x: no such run"),
    wrong("evaluate", ["run=a\nb"], r"'run=a\nb': no such run"),
    wrong("evaluate", f"{RUN} runs_dir=elsewhere", "there is no folder runs_dir=elsewhere"),
    wrong(
        "evaluate", f"run=runs/{GROUP}/{A}", "is a folder without record.json", given=without(paths.RECORD)
    ),
    wrong("evaluate", RUN, f"{A}/record.json cannot be read", given=holds(paths.RECORD, "{")),
    wrong("evaluate", RUN, f"{A}/record.json cannot be read", given=holds(paths.RECORD, BINARY)),
    wrong("evaluate", RUN, "has schema 99", "reads schema 1", given=holds(paths.RECORD, '{"schema": 99}')),
    wrong("evaluate", RUN, f"{A}: has no config.yaml", given=without(paths.CONFIG)),
    wrong("evaluate", RUN, f"{A}: config.yaml holds no configuration", given=holds(paths.CONFIG, "")),
    wrong("evaluate", RUN, "config.yaml cannot be read, it is no text", given=holds(paths.CONFIG, BINARY)),
    wrong("evaluate", RUN, "config.yaml cannot be read, line 1", given=holds(paths.CONFIG, "algo: [")),
    wrong("evaluate", RUN, "config.yaml cannot be read", "directory", given=a_folder_as(paths.CONFIG)),
    wrong("evaluate", RUN, "config.yaml has no algo.name", given=holds(paths.CONFIG, "algo: 3")),
    wrong(
        "evaluate", RUN, "algo.name=dqn", "allowed: ppo", given=edited(paths.CONFIG, "name: ppo", "name: dqn")
    ),
    wrong("evaluate", RUN, "does not fit this version", given=edited(paths.CONFIG, "  gamma", "  gamm")),
    wrong("evaluate", RUN, f"{A} has no checkpoint", given=without(paths.CHECKPOINTS), torch=True),
    wrong("evaluate", RUN, "step_64.pt is gone", given=without(CHECKPOINT), torch=True),
    wrong("evaluate", RUN, "step_64.pt is damaged", given=holds(CHECKPOINT, BINARY), torch=True),
    wrong("evaluate", RUN, "step_64.json is damaged", given=holds(MANIFEST, "{}"), torch=True),
]

RESUME = [
    wrong("resume", "", "run= is missing", "allowed: run=, total_env_steps="),
    wrong("resume", "run=", "run=: a value is missing"),
    wrong("resume", "run=nope", "run=nope: no such run under runs", f"the newest is {B}"),
    wrong("resume", "run=seed1-aaaaab", "no such run", f"did you mean {A}?"),
    wrong("resume", f"{RUN} total_env_steps={10**17}", f"and at most {10**12}"),
    wrong("resume", "run=seed1", "run=seed1: in the ids of 2 runs", "use more of it"),
    wrong(
        *("resume", "run=2026", "run=2026: in the ids of 2 runs", "use more of it"),
        given=a_file("runs/sweeps/20260101-sweep-1/sweep.json"),
    ),
    wrong("resume", f"run=runs/{GROUP}", "is a folder without record.json"),
    wrong("resume", f"run={LONG}", "100,004 characters", "no such run"),
    wrong("resume", f"{RUN} sed=2", "sed=2: no such key", "allowed: run=, total_env_steps="),
    wrong(
        "resume", f"{RUN} algo.gamma=0.9", "algo.gamma=0.9: no such key", "allowed: run=, total_env_steps="
    ),
    wrong("resume", f"{RUN} total_env_step=9", "did you mean total_env_steps=?"),
    wrong("resume", f"{RUN} total_env_steps=32", "total_env_steps=32: can only grow", "the run has 64"),
    wrong("resume", f"{RUN} total_env_steps=-5", "total_env_steps=-5: must be at least 1"),
    wrong("resume", f"{RUN} total_env_steps=0", "total_env_steps=0: must be at least 1"),
    wrong("resume", f"{RUN} total_env_steps=1e6", "total_env_steps=1e6: expected a whole number"),
    wrong("resume", f"{RUN} env.num_workers=-1", "env.num_workers=-1: must be at least 0"),
    wrong("resume", f"{RUN} env.num_workers=9", "env.num_workers=9: must be at most env.num_envs="),
    wrong("resume", f"{RUN} accept=change", "accept=change: did you mean changes?"),
    wrong("resume", f"{RUN} accept=all", "accept=all", "allowed: changes"),
    wrong("resume", f"{RUN} --force", "--force: no such option", "allowed: run="),
    wrong("resume", "seed1-aaaaaa", "seed1-aaaaaa: expected key=value", "allowed: run="),
    wrong("resume", f"{RUN} runs_dir=elsewhere", "there is no folder runs_dir=elsewhere"),
    wrong("resume", RUN, f"{A}/record.json cannot be read", given=holds(paths.RECORD, BINARY)),
    wrong("resume", RUN, "has schema 99", "reads schema 1", given=holds(paths.RECORD, '{"schema": 99}')),
    wrong("resume", RUN, f"{A}: has no config.yaml", given=without(paths.CONFIG)),
    wrong("resume", RUN, "config.yaml cannot be read, it is no text", given=holds(paths.CONFIG, BINARY)),
    wrong("resume", RUN, "does not fit this version", given=edited(paths.CONFIG, "  gamma", "  gamm")),
    wrong(
        *("resume", "run=20260101-sweep-1", "run=20260101-sweep-1: is a sweep", "sweep=resume"),
        given=a_file("runs/sweeps/20260101-sweep-1/sweep.json"),
    ),
]

RUNS = [
    wrong("runs", "algo.gama=0.9", "algo.gama=0.9: no run has algo.gama", "did you mean algo.gamma?"),
    wrong(
        "runs", "gamma=0.9", "gamma=0.9: no run has gamma", "did you mean algo.gamma?", "allowed: id, algo"
    ),
    wrong("runs", "sort=retorn", "sort=retorn: no run has retorn", "did you mean return?"),
    wrong("runs", "show=algo.gamma,eval/retorn", "show=eval/retorn: no run has", "did you mean eval/return?"),
    wrong("runs", "determinism=repeat", "determinism holds several values", "determinism.level"),
    wrong("runs", ["return=>high"], "return=>high: expected a number after >"),
    wrong("runs", ["return=>="], "return=>=: a value is missing after >="),
    wrong("runs", "env=", "env=: a value is missing"),
    wrong("runs", "last=0", "last=0: must be at least 1"),
    wrong("runs", "last=two", "last=two: expected a whole number"),
    wrong("runs", "last=1 last=2", "last is given twice"),
    wrong("runs", "CartPole", "CartPole: expected key=value"),
    wrong("runs", "--jsn", "--jsn: no such option", "did you mean --json?"),
    wrong("runs", "=x", "=x: no such key"),
    wrong("runs", "runs_dir=elsewhere", "runs_dir=elsewhere: there is no such folder"),
    wrong("runs", f"runs_dir=runs/{GROUP}/{A}/record.json", "record.json: there is no such folder"),
    wrong("runs", f"runs_dir={LONG}", "runs_dir=xxx", "there is no such folder"),
    wrong("runs", f"{LONG}=1", "xxx...xxx", "no run has"),
]

DIFF = [
    wrong("diff", "", "a= is missing", "allowed: a=, b=, code="),
    wrong("diff", "a=seed1-aaaaaa", "b= is missing", "allowed: a=, b="),
    wrong("diff", "a=seed1-aaaaaa b=nope", "b=nope: no such run", f"the newest is {B}"),
    wrong("diff", "a=seed1 b=seed1-bbbbbb", "a=seed1: in the ids of 2 runs", "use more of it"),
    wrong("diff", f"{A_B} code=ful", "code=ful: did you mean full?", "full, names or none"),
    wrong("diff", f"{A_B} zoom=true", "zoom=true: no such key", "allowed: a=, b="),
    wrong("diff", f"{A_B} runs_dir=elsewhere", "a=seed1-aaaaaa: there is no folder runs_dir=elsewhere"),
    wrong("diff", A_B, f"{A}/record.json cannot be read", given=holds(paths.RECORD, BINARY)),
    wrong("diff", A_B, "has schema 2", "reads schema 1", given=holds(paths.RECORD, '{"schema": 2}')),
    wrong("diff", A_B, "git in record.json", given=holds(paths.RECORD, '{"schema": 1, "git": "x"}')),
    wrong("diff", A_B, "overrides in", given=holds(paths.RECORD, '{"schema": 1, "overrides": "x"}')),
    wrong("diff", A_B, f"{A}: has no config.yaml", given=without(paths.CONFIG)),
    wrong("diff", A_B, "config.yaml has no env.id", given=holds(paths.CONFIG, "algo: {name: ppo}")),
]

COMPARE = [
    wrong("compare", "", "a= is missing", "allowed: a=, b="),
    wrong("compare", "a=seed1-aaaaaa", "b= is missing", "allowed: a=, b="),
    wrong("compare", "a= b=seed1-bbbbbb", "a=: a value is missing"),
    wrong("compare", "a=seed1-aaaaaa b=nope", "b=nope: no such run", f"the newest is {B}"),
    wrong("compare", "a=seed1 b=seed1-bbbbbb", "a=seed1: in the ids of 2 runs", "use more of it"),
    wrong("compare", f"{A_B} zoom=starts", "zoom=starts", "did you mean start?", "true, false or start"),
    wrong("compare", f"{A_B} keep=x", "keep=x", "without zoom=true"),
    wrong("compare", f"{A_B} zoom=true keep=true", "keep=true", "expected the name of a folder"),
    wrong("compare", f"{A_B} keeep=x", "keeep=x: no such key", "did you mean keep=?"),
    wrong("compare", "seed1-aaaaaa seed1-bbbbbb", "seed1-aaaaaa: expected key=value", "allowed: a=, b="),
    wrong("compare", A_B, f"{A}/record.json cannot be read", given=holds(paths.RECORD, BINARY)),
    wrong("compare", A_B, "has schema 2", "reads schema 1", given=holds(paths.RECORD, '{"schema": 2}')),
    wrong("compare", A_B, "resumed in record.json", given=holds(paths.RECORD, '{"schema": 1, "resumed": 7}')),
    wrong("compare", A_B, "git in record.json", given=holds(paths.RECORD, '{"schema": 1, "git": "x"}')),
    wrong("compare", A_B, f"{A}: has no config.yaml", given=without(paths.CONFIG)),
    wrong("compare", A_B, f"{A}: config.yaml cannot be read, line 1", given=holds(paths.CONFIG, "a: [")),
    wrong("compare", A_B, f"{A}: has no trace.jsonl", "trace=iteration", given=without(paths.TRACE)),
    wrong("compare", A_B, f"{A}: trace.jsonl is no trace", given=holds(paths.TRACE, BINARY)),
    wrong("compare", A_B, f"{A}: trace.jsonl is empty", given=holds(paths.TRACE, "")),
    wrong("compare", A_B, f"{A}: trace.jsonl cannot be read", given=a_folder_as(paths.TRACE)),
    wrong("compare", A_B, "other algorithms", "ran sac", given=edited(paths.TRACE, '"ppo"', '"sac"')),
]

REPRODUCE = [
    wrong("reproduce", "", "run= is missing", "allowed: run=, env=, keep="),
    wrong("reproduce", "rum=x", "rum=x: no such key", "did you mean run=?"),
    wrong(
        "reproduce",
        "run=seed1-aaaaab",
        "run=seed1-aaaaab: no such run here",
        "`git fetch origin 'refs/runs/*:refs/runs/*'` brings",
    ),
    wrong("reproduce", f"run={A[:-1]}b", f"did you mean {A}?"),
    wrong("reproduce", "run=seed1", "in the ids of 2 runs"),
    wrong("reproduce", "run=refs/runs/none", "run=refs/runs/none: no such run here"),
    wrong("reproduce", "run=here", "is a file, and no run folder", given=a_file("here")),
    wrong("reproduce", ["run=a\nb"], "no such run here"),
    wrong("reproduce", f"run={LONG}", "characters)", "no such run here"),
    wrong("reproduce", f"{RUN} env=installed", "env=installed: did you mean install?", "present or install"),
    wrong("reproduce", f"{RUN} keep=here", "keep=", "is a file; expected a folder", given=a_file("here")),
    wrong("reproduce", f"{RUN} keep=yes", "keep=yes", "expected the name of a folder; ./yes"),
    wrong("reproduce", f"{RUN} keep=full", "is not empty", given=a_file("full/mine")),
    wrong("reproduce", RUN, "record.json cannot be read", given=holds(paths.RECORD, "{")),
    wrong("reproduce", RUN, "has schema None", given=holds(paths.RECORD, "{}")),
    wrong("reproduce", RUN, "has no snapshot of its code", given=edited(paths.RECORD, '"git": {', '"no": {')),
    wrong(
        "reproduce",
        RUN,
        "is not in this repository; `git fetch origin 'refs/runs/",
        given=edited(paths.RECORD, '"commit": "', '"commit": "f'),
    ),
]

PROVE = [
    wrong("prove", "times=0", "times=0: expected a whole number, at least 2"),
    wrong("prove", "times=2.5", "times=2.5: expected a whole number, at least 2"),
    wrong("prove", f"times={DIGITS}", "times=999", "5,006 characters", "whole number"),
    wrong("prove", "times=100000", "times=100000: expected at most 1000"),
    wrong("prove", "times=3 times=4", "times=4: times is given twice"),
    wrong("prove", "time=3", "time=3: no such key", "did you mean times=3?"),
    wrong("prove", "determinism=fast", "determinism=fast: promises nothing", "use invariant"),
    wrong("prove", "algo.lr=1", "algo.lr=1: no such key", "did you mean algo.learning_rate?"),
    wrong("prove", "seed=1,2", "seed=1,2", "one configuration"),
    wrong("prove", "run_dir=x", "run_dir=x", "use runs_dir"),
    wrong("prove", "trace=off", "trace=off", "use trace=iteration or trace=step"),
    wrong("prove", "algo=sac env=CartPole", "algo=sac needs continuous actions", "use algo=ppo"),
    wrong("prove", "hydra/launcher=joblib", "hydra/launcher=joblib", "leave it out"),
    wrong("prove", "--multirun", "--multirun: no such option", "allowed: overrides, times=N and --json"),
    wrong("prove", "runs_dir=mine", "runs_dir=mine: is a file", given=a_file("mine")),
    wrong(
        "prove",
        "runs_dir=link",
        "runs_dir=link: cannot be made",
        given=a_link("link", "no/where"),
        torch=True,
    ),
]

STATS = [
    wrong("stats", "runs=nothing/*", "runs=nothing/*: no run folders there"),
    wrong("stats", "runs=runs", "runs=runs: no run folders there", "did you mean runs='runs/*/*'?"),
    wrong("stats", "runs=**x", "runs=**x: is no pattern of folders"),
    wrong("stats", "run=x", "run=x: no such key", "did you mean runs=?", "allowed: runs=, by="),
    wrong("stats", "--jsn", "--jsn: no such option", "did you mean --json?"),
    wrong("stats", "statistic=iqn", "statistic=iqn", "did you mean iqm?", "mean or median"),
    wrong("stats", f"{ONE},nothing", "runs=nothing: no run folders there"),
    wrong(
        *("stats", "runs=runs/*/*", f"{A} and {B} differ in algo.gamma (0.9 and ", "by=algo.gamma"),
        given=edited(paths.CONFIG, "  gamma: ", "  gamma: 0.9 # "),
    ),
    wrong("stats", f"{ONE} by=algo.gama", "by=algo.gama: no such key", "did you mean algo.gamma?"),
    wrong("stats", f"{ONE} by=logger", "by=logger: expected a key with a single value", "logger.console"),
    wrong("stats", f"{ONE} out=x.md", "out: is for coverage=true"),
    wrong("stats", "coverage=true by=seed", "by: leave out coverage=true"),
    wrong("stats", "coverage=true repetitions=5", "repetitions=5: must be at least 10"),
    wrong("stats", "coverage=true out=runs", "out=runs: cannot be written"),
    wrong("stats", ONE, "no run can be read", f"{A}/record.json", given=holds(paths.RECORD, "{")),
    wrong("stats", ONE, "no run can be read", f"{A}: has no config", given=without(paths.CONFIG)),
    wrong(
        *("stats", ONE, "no finished run with an evaluation", f"{A}: is failed, not finished"),
        given=edited(paths.RECORD, '"status": "finished"', '"status": "failed"'),
    ),
]

CURVES = [
    wrong("curves", "runs=nothing/*", "runs=nothing/*: no run folders there"),
    wrong("curves", "runs=runs", "runs=runs: no run folders there", "did you mean runs='runs/*/*'?"),
    wrong("curves", "runs=**x", "runs=**x: is no pattern of folders"),
    wrong("curves", f"runs={LONG}", "runs=xxx", "no run folders there"),
    wrong("curves", "runs=", "runs=: a value is missing"),
    wrong("curves", "run=x", "run=x: no such key", "did you mean runs=?", "allowed: runs=, out=, by="),
    wrong(
        *("curves", "runs=runs/*/*", f"{A} and {B} differ in algo.gamma (0.9 and ", "by=algo.gamma"),
        given=edited(paths.CONFIG, "  gamma: ", "  gamma: 0.9 # "),
    ),
    wrong("curves", f"{ONE} by=algo.gama", "by=algo.gama: no such key", "did you mean algo.gamma?"),
    wrong("curves", f"{ONE} by=gamma", "by=gamma: no such key", "did you mean algo.gamma?"),
    wrong("curves", f"{ONE} by=logger", "by=logger: expected a key with a single value", "logger.console"),
    wrong("curves", f"{ONE} out=mine", "out=mine: is a file", "expected a folder", given=a_file("mine")),
    wrong("curves", f"{ONE} out=mine/x", "out=mine/x: cannot be made", given=a_file("mine")),
    wrong("curves", ONE, f"{A}/record.json cannot be read", given=holds(paths.RECORD, "{")),
    wrong("curves", ONE, "has schema None", "reads schema 1", given=holds(paths.RECORD, "{}")),
    wrong("curves", ONE, f"{A}: has no config.yaml", given=without(paths.CONFIG)),
    wrong("curves", ONE, "config.yaml has no algo.name", given=holds(paths.CONFIG, "seed: 1")),
    wrong("curves", ONE, f"{A}: has no metrics.jsonl", given=without(paths.METRICS)),
    wrong("curves", ONE, "metrics.jsonl cannot be read", "no text", given=holds(paths.METRICS, b"\xff\xfe")),
    wrong("curves", ONE, "line 2 of metrics.jsonl is damaged", given=holds(paths.METRICS, '{"a": 1}\n{')),
    wrong("curves", ONE, "no finished run with an evaluation", given=holds(paths.METRICS, "")),
]

REPORT = [
    wrong("report", "", "runs=runs/*/*: no run folders there", given=no_runs),
    wrong("report", "runs=nothing/*", "runs=nothing/*: no run folders there"),
    wrong("report", "runs=runs", "runs=runs: no run folders there", "did you mean runs='runs/*/*'?"),
    wrong("report", f"runs={LONG}", "runs=xxx", "no run folders there"),
    wrong("report", "run=x", "run=x: no such key", "did you mean runs=?", "allowed: runs=, out=, figures="),
    wrong("report", "videos=al", "videos=al", "did you mean all?", "last, all or none"),
    wrong("report", "--json", "--json: no such option", "allowed: runs="),
    wrong("report", "out=runs", "out=runs: is a folder; expected a file", "runs/report.html"),
    wrong("report", "out=no/where.html", "out=no/where.html: cannot be written", "no folder no"),
    wrong("report", "out=mine/x.html", "out=mine/x.html: cannot be written", given=a_file("mine")),
    wrong("report", f"out={'n' * 300}.html", "out=nnn", "cannot be written"),
    wrong("report", "out=/proc/x.html", "out=/proc/x.html: cannot be written", on=Path("/proc").is_dir),
    wrong("report", "out=~nobody-here/x.html", "out=~nobody-here/x.html: cannot be written, there is no"),
    wrong("report", f"figures={'n' * 300}", "figures=nnn", "cannot be made, File name too long"),
    wrong("report", f"{ONE} figures=new", "none of 1 run folders", given=holds(paths.RECORD, "{")),
    wrong("report", "figures=mine", "figures=mine: is a file", "expected a folder", given=a_file("mine")),
    wrong("report", ONE, "none of 1 run folders can be read", given=holds(paths.RECORD, "{")),
    wrong("report", ONE, "none of 1 run folders", "no config.yaml", given=without(paths.CONFIG)),
]

RENAME = [
    wrong("rename", "", "name= is missing", "make rename name=my_project"),
    wrong("rename", "name=My-Project", "name=My-Project", "for example name=my_project"),
    wrong("rename", "name=class", "name=class is a word of the Python language"),
    wrong("rename", "name=random", "name=random", "standard library"),
    wrong("rename", "name=numpy", "name=numpy", "installed package"),
    wrong("rename", "name=train", "name=train is taken"),
    wrong("rename", "name=rltemplate", "called rltemplate already"),
    wrong("rename", "nme=x", "'nme=x' is not understood", "Did you mean name=?"),
    wrong("rename", "name=fine force=maybe", "force='maybe'", "true or false"),
    wrong("rename", "name=one name=two", "name is given twice"),
    wrong("rename", "name=" + "a" * 300, "300 characters long", "at most 60"),
    wrong("rename", ["name=a\nb"], r"name='a\nb'", "for example name=a_b"),
]

GOLDEN = [
    wrong("golden", "", "profile= is missing", "allowed: profile=, --write"),
    wrong("golden", "profile=x86", "profile=x86", "did you mean x86-avx2?"),
    wrong("golden", "profile=x86-avx2 --writ", "--writ: no such option", "did you mean --write?"),
]

MAKE = [
    wrong("make", "trains", "No rule to make target 'trains'"),
    wrong("make", "train sac", "No such target: sac", "key=value"),
    wrong("make", "train algo = sac", "empty variable name"),
    wrong("make", ["train", "env=Hop\nper"], "The value of 'env' has a line break"),
    wrong("make", "test k=record", "'test' takes no overrides, but got: k", 'ARGS="..."'),
    wrong("make", "train algo=scc", "algo=scc", "did you mean sac?"),
    wrong("make", ["train", "ARGS=--nope"], "--nope: no such option"),
    wrong("make", "train env.num_envs=0", "env.num_envs=0: must be at least 1"),
    wrong("make", "evaluate run=nope", "run=nope", "there is no folder runs_dir=runs"),
    wrong("make", "runs last=0", "last=0: must be at least 1"),
    wrong("make", "diff a=x", "b= is missing", "allowed: a=, b="),
    wrong("make", "compare a=x", "b= is missing", "allowed: a=, b="),
    wrong("make", "prove times=1", "times=1: expected a whole number, at least 2"),
    wrong("make", "report runs=nothing/*", "runs=nothing/*: no run folders there"),
    wrong("make", "curves runs=nothing/*", "runs=nothing/*: no run folders there"),
    wrong("make", "bench only=peer", "only=peer", "did you mean peers?"),
    wrong("make", "rename name=class", "name=class is a word of the Python language"),
]

CASES = [
    *TRAIN,
    *EVALUATE,
    *RESUME,
    *RUNS,
    *DIFF,
    *COMPARE,
    *REPRODUCE,
    *PROVE,
    *CURVES,
    *REPORT,
    *STATS,
    *RENAME,
    *GOLDEN,
    *MAKE,
]


# --- One call and what is wrong with its answer -----------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """How a call ended. `changes` are files and folders that it made, removed or wrote to."""

    status: int
    output: str
    errors: str
    cpu_seconds: float
    changes: list[str]


def faults(answer: Answer, says: Sequence[str], cpu_seconds: float = CPU_SECONDS) -> list[str]:
    """What is wrong with the answer to a wrong call; empty if nothing is."""
    lines = [line for line in answer.errors.splitlines() if line.strip()]
    if lines and lines[-1].startswith("make: *** [") and len(lines) > 1:
        lines.pop()  # make's own word about the status
    found = [f"status {answer.status}"] * (answer.status != REFUSED)
    if not 1 <= len(lines) <= MOST_LINES:
        found.append(f"{len(lines)} lines")
    if "Traceback" in answer.errors or any(line.startswith("  File ") for line in lines):
        found.append("a traceback")
    if max(map(len, lines), default=0) > 1000:
        found.append("a line that nobody reads")
    if answer.output:
        found.append("standard output is used")
    found += [f"does not say: {text}" for text in says if text not in "\n".join(lines)]
    found += [f"changed: {name}" for name in answer.changes]
    if answer.cpu_seconds >= cpu_seconds:
        found.append(f"took {answer.cpu_seconds:.1f} s of CPU time")
    return found


@dataclass(frozen=True)
class Place:
    """Where calls are made: the project, a folder of their own, and a home and a folder for scratch files."""

    project: Path
    root: Path

    @property
    def here(self) -> Path:
        """The working folder."""
        return self.root / "here"

    def call(self, command: Sequence[str], cwd: Path) -> Answer:
        """Run a command, with its CPU time and that of its children."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "PYTHON", "GIT_", "MAKE"))}
        environment = kept | {name: str(self.root / name.lower()) for name in ("HOME", "TMPDIR")}
        before = self.contents()
        # Whatever a call starts by mistake ends before long.
        limited = ["sh", "-c", 'ulimit -t 30; exec "$@"', "sh", *command]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                limited, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            texts: list[str] = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        after = self.contents()
        changes = sorted({name for name, _ in before ^ after})
        cpu_seconds = usage.ru_utime + usage.ru_stime
        return Answer(process.returncode, texts[0], texts[1], cpu_seconds, changes)

    def contents(self) -> set[tuple[str, int]]:
        """All files with their sizes, and all folders, here and in the project with its repository."""
        return {
            (str(path), -1 if path.is_dir() else path.lstat().st_size)
            for folder in (self.root, self.project)
            for path in folder.rglob("*")
            if "__pycache__" not in path.parts
        }


@pytest.fixture(scope="module")
def project(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fork with all that make needs; its interpreter is this one, and installs nothing."""
    copy = tmp_path_factory.mktemp("project") / "fork"
    shutil.copytree(fork, copy)
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "bench", copy / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / ".gitignore").write_text("/runs/\n__pycache__/\n/.venv/\n")
    git(copy, "add", "-A")
    git(copy, "commit", "-q", "-m", "what make needs")
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    ours = '[ "$1" != -m ] || [ "$2" = rltemplate ] || [ "$2" = bench ] || exit 9'
    python.write_text(f'#!/bin/sh\n{ours}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (copy / ".venv" / ".installed").touch()  # later than all that it is made from
    return copy


@pytest.fixture(scope="module")
def finished(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two iterations."""
    folder = tmp_path_factory.mktemp("finished")
    words = ["total_env_steps=64", "eval_every=32", "eval_episodes=1", "video_every=0", "logger=none"]
    done = run_train(fork, folder, *SHRUNK["ppo"], *words)
    assert done.returncode == 0, done.stderr
    (record,) = folder.glob(f"runs/*/*/{paths.RECORD}")
    return record.parent


@pytest.fixture
def place(project: Path, tmp_path: Path) -> Place:
    """A place without anything in it."""
    for name in ("here", "home", "tmpdir"):
        (tmp_path / name).mkdir()
    return Place(project, tmp_path)


def put_runs(finished: Path, folder: Path) -> Path:
    """Runs A and B below `folder`; the folder of A."""
    for name in (A, B):
        copy = folder / "runs" / GROUP / name
        shutil.copytree(finished, copy)
        record = copy / paths.RECORD
        record.write_text(record.read_text().replace(finished.name, name))
    return folder / "runs" / GROUP / A


def ask(place: Place, finished: Path, case: Wrong) -> Answer:
    """The answer to a call of the table."""
    run = put_runs(finished, place.here) if case.command in LOOKS_AT_RUNS else place.here
    case.given(place.here, run)
    if case.command == "make":
        return place.call(["make", *case.words], place.project)
    if case.command == "rename":
        script = place.project / "scripts" / "rename.py"
        return place.call([sys.executable, str(script), *case.words], place.here)
    return place.call([*program(place.project, case.command), *case.words], place.here)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_closed_stream_is_nobodys_mistake(closed: str, place: Place) -> None:
    """Refusals keep their status without it, and answers theirs."""
    for command, status in (("train seed=x", 2), ("runs", 0)):
        name, *words = command.split()
        script = [*program(place.project, name), *words]
        answer = place.call(["sh", "-c", f"exec {shlex.join(script)} {closed}"], place.here)
        assert answer.status == status, answer
        assert "Traceback" not in answer.errors


@pytest.mark.long
def test_a_run_trains_with_closed_streams(place: Place) -> None:
    words = [*SHRUNK["ppo"], "total_env_steps=64", "eval_every=0", "video_every=0", "run_dir=run"]
    script = [sys.executable, str(place.project / "scripts" / "train.py"), *words]
    answer = place.call(["sh", "-c", f"exec {shlex.join(script)} >&- 2>&-"], place.here)
    assert answer.status == 0
    assert json.loads((place.here / "run" / paths.RECORD).read_text())["status"] == "finished"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_call_is_refused(case: Wrong, place: Place, finished: Path) -> None:
    if not case.on():
        pytest.skip("not wrong on this machine")
    if case.command == "make" and shutil.which("make") is None:
        pytest.skip("make is not installed")
    answer = ask(place, finished, case)
    limit = TORCH_SECONDS if case.torch else CPU_SECONDS
    assert faults(answer, case.says, limit) == [], answer.errors[:3000]


# --- The other way round: what is no refusal is found to be none -------------------------------------------

SAY = "import os, sys; print('error: what was wrong', file=sys.stderr); "


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (f"{SAY} sys.exit(2)", []),
        (f"{SAY} sys.exit(1)", ["status 1"]),
        (f"{SAY} print('a\\nb', file=sys.stderr); sys.exit(2)", ["3 lines"]),
        ("import sys; sys.exit(2)", ["0 lines", "does not say: what was wrong"]),
        (f"{SAY} print('looking ...'); sys.exit(2)", ["standard output is used"]),
        (f"{SAY} print('x' * 2000, file=sys.stderr); sys.exit(2)", ["a line that nobody reads"]),
        (f"{SAY} open('left', 'w'); sys.exit(2)", ["changed: {here}/left"]),
        (f"{SAY} open('mine', 'w'); sys.exit(2)", ["changed: {here}/mine"]),
        (
            f"{SAY} os.mkdir(os.environ['HOME'] + '/.x'); sys.exit(2)",
            ["changed: {home}/.x"],
        ),
        (f"{SAY} [0 for _ in iter(lambda: sum(os.times()[:2]) > 3.1, True)]; sys.exit(2)", ["took"]),
        (f"{SAY} raise ValueError", ["status 1", "4 lines", "a traceback"]),
    ],
)
def test_the_checks_can_fail(place: Place, program: str, expected: list[str]) -> None:
    (place.here / "mine").write_text("mine")
    answer = place.call([sys.executable, "-c", program], place.here)
    found = faults(answer, ["what was wrong"])
    names = {"here": place.here, "home": place.root / "home"}
    assert len(found) == len(expected)
    for fault, start in zip(found, expected, strict=True):
        assert fault.startswith(start.format(**names))


def test_a_ref_of_a_run_is_found(place: Place) -> None:
    program = (
        f"{SAY} import subprocess; subprocess.run(['git', 'update-ref', 'refs/runs/x', 'HEAD']); sys.exit(2)"
    )
    found = faults(place.call([sys.executable, "-c", program], place.project), [])
    git(place.project, "update-ref", "-d", "refs/runs/x")
    assert f"changed: {place.project}/.git/refs/runs/x" in found


def test_a_good_call_is_no_refusal(place: Place, finished: Path) -> None:
    found = faults(ask(place, finished, wrong("compare", A_B)), ["error"])
    assert found == ["status 0", "0 lines", "standard output is used", "does not say: error"]
