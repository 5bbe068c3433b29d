"""Sinks, algorithms and environments of other packages, installed into a folder on PYTHONPATH."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import (
    FAULTS,
    NAME,
    ROOT,
    copy_project,
    environment,
    git,
    record,
    rows,
    run,
    run_train,
    small,
    until,
)

from runlab.__main__ import COMMANDS, main
from runlab.config import texts
from runlab.config.project import require
from runlab.errors import ConfigError

ALGORITHM = f"""
from pathlib import Path

import yaml
from {NAME}.algos.ppo_config import PPOConfig
from runlab.config.algorithms import Entry

_VALUES = yaml.safe_load(Path(__file__).with_name("own.yaml").read_text())
OWN = Entry(PPOConfig, "brought_package.own:Own", values=_VALUES)
"""
OWN = f"""
from {NAME}.algos.ppo import PPO


class Own(PPO):
    pass
"""
# Of a package for every project: it imports nothing of this one.
WALKER = """
import numpy as np
from runlab.config.algorithms import AlgoConfig, Entry
from runlab.interfaces import IterationResult


class Walker:
    def __init__(self, config, envs, streams, total, engine):
        self.envs, self.env_steps, self.started = envs, 0, False

    def train_iteration(self):
        if not self.started:
            self.started = self.envs.reset() is not None
        step = self.envs.step(np.zeros((self.envs.num_envs, 1), dtype=np.int64))
        self.env_steps += self.envs.num_envs
        return IterationResult({}, step.episodes)

    def act(self, obs):
        return np.zeros((len(obs), 1), dtype=np.int64)

    def state_dict(self):
        return {"env_steps": self.env_steps, "envs": self.envs.state_dict()}

    def load_state_dict(self, state):
        self.env_steps = state["env_steps"]
        self.envs.load_state_dict(state["envs"])

    def close(self):
        self.envs.close()


_VALUES = {"defaults": ["_walker@algo"], "env": {"num_envs": 2}, "algo": {"name": "walker"}}
ENTRY = Entry(AlgoConfig, f"{__name__}:Walker", needs_discrete=True, values=_VALUES)
"""
ENVS = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

gymnasium.register("MiniGrid-Brought-v0", CartPoleEnv, max_episode_steps=50)
"""
ENTRY_POINTS = """
[runlab.algorithms]
own = brought_package.entry:OWN
walker = brought_package.walker:ENTRY
broken = brought_package.nowhere:BROKEN

[runlab.envs]
own = brought_package.envs

[runlab.sinks]
broken = brought_package.nowhere:Sink
"""


def install(folder: Path, *projects: Path) -> None:
    """Build wheels of projects and install them into a folder, without their dependencies."""
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    subprocess.run([sys.executable, "-m", "pip", *words, *map(str, projects)], env=clean, check=True)


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH on which the sinks of examples/ and a package of one's own are installed."""
    folder = tmp_path_factory.mktemp("installed")
    install(folder, *(ROOT / "examples" / name for name in ("csv_sink", "mlflow_sink")))
    package, facts = folder / "brought_package", folder / "brought_package-1.dist-info"
    package.mkdir()
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: brought-package\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS)
    values = (
        (ROOT / "conf/algo/ppo.yaml").read_text().replace("_ppo@", "_own@").replace("name: ppo", "name: own")
    )
    texts = {"__init__": "", "entry": ALGORITHM, "own": OWN, "walker": WALKER, "envs": ENVS}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    (package / "own.yaml").write_text(values)
    return f"{folder}{os.pathsep}{FAULTS}"


QUIET = ["logger=none", "video_every=0", "eval_every=0", "total_env_steps=96", "log_every=32", "run_dir=run"]


@pytest.mark.parametrize(
    ("word", "message"),
    {
        "logger.sinks.cvs=true": "no such entry point of sinks; did you mean csv? allowed: ",
        "logger.sinks.csv.files=x": "unexpected keyword argument 'files'",
        "logger.sinks.broken=true": "brought_package.nowhere:Sink cannot be loaded (No module named",
        "algo=owns": "did you mean own? allowed: ",
    }.items(),
)
def test_what_cannot_be_loaded_is_refused_before_the_run(
    word: str, message: str, fork: Path, tmp_path: Path, brought: str
) -> None:
    done = run_train(fork, tmp_path, word, "run_dir=run", status=2, PYTHONPATH=brought)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_what_packages_bring_trains_and_a_sink_gets_every_row(
    fork: Path, tmp_path: Path, brought: str
) -> None:
    words = [word for word in small("ppo") if not word.startswith(("algo=", "env=", "env.num_envs="))]
    words[words.index("algo.num_steps=16")] = "algo.num_steps=4"
    words += ["algo=own", "env=MiniGrid-Brought-v0", "logger.sinks.csv.file=table.csv", *QUIET]
    done = run_train(fork, tmp_path, *words, status=0, PYTHONPATH=brought)
    assert "note: algo=broken: brought_package.nowhere:BROKEN cannot be loaded" in done.stderr
    config = (tmp_path / "run/config.yaml").read_text()
    assert "name: own" in config
    assert "num_envs: 8" in config  # from the file of the algorithm
    assert "id: brought_package.envs:MiniGrid-Brought-v0" in config
    assert git(fork, "for-each-ref", f"refs/runs/{record(tmp_path / 'run')['id']}") != ""
    head, *table = [line.split(",") for line in (tmp_path / "run/table.csv").read_text().splitlines()]
    assert head == ["env_steps", "metric", "value"]
    logged = rows(tmp_path / "run")
    assert len(logged) > 1
    assert {(int(steps), name, float(value)) for steps, name, value in table if "time" not in name} == {
        (row["env_steps"], name, row[name]) for row in logged for name in row if name != "env_steps"
    }


@pytest.mark.long
def test_a_sink_and_an_algorithm_of_other_packages_outlive_a_renaming(tmp_path: Path, brought: str) -> None:
    renamed = tmp_path / "renamed"
    copy_project(renamed)
    run(renamed, sys.executable, "scripts/rename.py", f"name={NAME}_renamed", status=0)
    words = ["algo=walker", "env=CartPole", "num_threads=1", "env.num_workers=0", "logger.sinks.csv=true"]
    run_train(renamed, tmp_path, *words, *QUIET, status=0, PYTHONPATH=brought)
    assert record(tmp_path / "run")["status"] == "finished"
    assert "episode/return" in (tmp_path / "run/metrics.csv").read_text()
    texts = [path.read_text() for path in (ROOT / "examples").glob("*_sink/*") if path.is_file()]
    assert len(texts) == 4
    assert not any(NAME in text for text in texts)


@pytest.fixture(scope="module")
def site(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of the project."""
    folder = tmp_path_factory.mktemp("wheel") / "site"
    install(folder, fork)
    return folder


@pytest.mark.long
def test_a_wheel_trains_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    """With its own files alone: the settings, the values and the page of reports are inside."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert not (site / "pyproject.toml").exists()
    page = ("report.html", "report.js", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "uplot/LICENSE")
    names = [f"{NAME}/py.typed", "runlab/py.typed", "hydra_plugins/runlab_ray.py"]
    names += [f"{NAME}/reference_returns.csv", f"{NAME}/conf"]
    for name in (*names, *(f"runlab/analysis/{part}" for part in page)):
        assert (site / name).exists()
    words = ["train", "debug=fast", "env=CartPole", "num_threads=1", "run_dir=runs/ppo-CartPole/run"]
    run(empty, sys.executable, "-m", "runlab", *words, status=0, PYTHONPATH=str(site))
    assert record(empty / "runs/ppo-CartPole/run")["status"] == "finished"
    place = "from runlab.config.loading import CONF; print(CONF)"
    values = run(empty, sys.executable, "-c", place, status=0, PYTHONPATH=str(site)).stdout
    assert values == f"{site / NAME / 'conf'}\n"
    for wrong in ("sedd=3", "env=Nope-v0"):
        answer = run(empty, str(site / "bin/runlab"), "train", wrong, status=2, PYTHONPATH=str(site)).stderr
        assert Path(answer.strip().rpartition(", see ")[2]).is_relative_to(site / NAME / "conf")
    listed = run(empty, str(site / "bin/runlab"), "report", status=0, PYTHONPATH=str(site)).stdout
    assert "report.html" in listed


ROOM = """
import gymnasium as gym
import numpy as np


class Room(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.uniform(0.2, 0.8)
        return np.array([self.at], np.float32), {}

    def step(self, action):
        self.at += 0.1 * (2 * int(action) - 1)
        over = not 0 < self.at < 1
        return np.array([np.clip(self.at, 0, 1)], np.float32), float(self.at > 1), over, False, {}


gym.register("Room-v0", Room, max_episode_steps=50)
"""


def lab(folder: Path, ignored: str = "runs/") -> Path:
    """A repository of one's own: an environment, and values for it in conf/."""
    (folder / "conf/env").mkdir(parents=True)
    (folder / "conf/env/Room.yaml").write_text("id: room:Room-v0\n")
    (folder / "room.py").write_text(ROOM)
    (folder / ".gitignore").write_text(f"{ignored}\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a room")
    return folder


IN_ROOM = ["env=Room", "env.num_envs=2", "algo.num_steps=16", "algo.num_minibatches=2", "num_threads=1"]
IN_ROOM += ["video_every=0", "log_every=96", "checkpoint_every=96", "run_dir=runs/a/run"]


@pytest.mark.long
def test_a_wheel_records_and_makes_again_what_lies_in_ones_own_repository(site: Path, tmp_path: Path) -> None:
    here, again = lab(tmp_path / "lab"), ["reproduce", "run=runs/a/run"]

    def call(*words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        return run(here, str(site / "bin" / NAME), *words, status=status, PYTHONPATH=str(site))

    words = [str(site / "bin" / NAME), "train", *IN_ROOM, "total_env_steps=1920"]
    started = subprocess.Popen(words, cwd=here, env=environment(PYTHONPATH=str(site)))
    until(lambda: len([*(here / "runs/a/run/checkpoints").glob("*.json")]) > 1)
    started.kill()
    started.wait()
    call("resume", "run=runs/a/run", "total_env_steps=1920")
    facts = record(here / "runs/a/run")
    assert (facts["status"], len(facts["resumed"])) == ("finished", 1)
    assert facts["used"] == {"files": ["room.py"], "outside": {}}
    assert git(here, "show", f"{facts['git']['ref']}:room.py") == ROOM
    assert git(here, "status", "--porcelain") == "?? __pycache__/\n"
    assert "identical: " in call(*again).stdout

    # What is made again is the recorded code, and another one is noticed.
    (here / "room.py").write_text(ROOM.replace("0.1 *", "0.2 *"))
    assert "identical: " in call(*again).stdout
    refused = call("resume", "run=runs/a/run", "total_env_steps=3000", status=2)
    assert "the run began with other code: room.py" in refused.stderr
    assert "make " not in refused.stderr
    listed = next(site.glob("*.dist-info/entry_points.txt")).with_name("RECORD")
    before = listed.read_text()
    other = before.replace(f"{NAME}/algos/ppo.py,sha256=", f"{NAME}/algos/ppo.py,sha256=0")
    assert other != before
    listed.write_text(other)
    try:
        assert "runlab project" in call(*again, status=2).stderr
    finally:
        listed.write_text(before)


@pytest.mark.long
def test_what_git_ignores_is_not_made_again(site: Path, tmp_path: Path) -> None:
    here = lab(tmp_path / "lab", ignored="runs/\nroom.py")
    wheel = {"PYTHONPATH": str(site)}
    done = run(here, str(site / "bin/runlab"), "train", *IN_ROOM, "total_env_steps=96", status=0, **wheel)
    assert f"next: {NAME} evaluate run=" in done.stderr
    assert [*record(here / "runs/a/run")["used"]["outside"]] == ["room"]
    again = run(here, str(site / "bin/runlab"), "reproduce", "run=runs/a/run", status=2, **wheel)
    assert "No module named 'room'" in again.stderr


@pytest.mark.long
def test_a_file_that_is_imported_from_elsewhere_than_its_commit_is_named(site: Path, tmp_path: Path) -> None:
    here = lab(tmp_path / "lab")
    (here / "src").mkdir()
    git(here, "mv", "room.py", "src")
    path = {"PYTHONPATH": os.pathsep.join([str(site), str(here / "src")])}  # as an editable package has it
    run(here, str(site / "bin/runlab"), "train", *IN_ROOM, "total_env_steps=96", status=0, **path)
    again = run(here, str(site / "bin/runlab"), "reproduce", "run=runs/a/run", status=0, **path)
    assert "not from the recorded commit, but from elsewhere: room\n" in again.stdout


@pytest.mark.parametrize(
    ("module", "words"),
    {
        "wandb": ["train", "logger.wandb.enabled=true"],
        "optuna": ["search", "sweep=ppo-rates", "trials=1"],
        "av": ["film", "run=last"],
    }.items(),
)
def test_what_is_missing_is_named_in_a_line(
    module: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("was not refused"))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{module} is not installed; use .venv/bin/python -m pip install {module}" in said
    monkeypatch.setattr(texts, "INSTALLED", True)
    with pytest.raises(ConfigError, match=rf"^x: {module} is not installed; install the extra \[y\]$"):
        require(module, "y", "x")


def commands_of_make(text: str) -> list[str]:
    """The texts in code, other than docstrings, that name a command by make."""
    nodes = [*ast.walk(ast.parse(text))]
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = re.compile(rf"\bmake ({'|'.join([*COMMANDS, 'help'])})\b")
    return [str(each.value) for each in texts if id(each) not in prose and named.search(str(each.value))]


def test_messages_name_commands_that_exist_without_a_makefile() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "runlab").rglob("*.py")}
    named = {file: found for file, text in files.items() if (found := commands_of_make(text))}
    assert [*named] == ["runlab/rerun/recorded_code.py"]  # for a worktree of a repository
    assert commands_of_make("say(f'next: make resume {run}')") == ["next: make resume "]
