"""A run begins to learn soon: by what is loaded before its first step, and not by seconds, which vary."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import ROOT, git, run_train

from bench.startup import time_to_first_step
from bench.works import MeasurementError
from rltemplate.__main__ import COMMANDS
from rltemplate.config.cli.preflight import preflight
from rltemplate.config.loading import to_dict
from rltemplate.launch.process import worker_environment
from rltemplate.run import paths
from rltemplate.run.job import JOB_VARIABLE, Job

# None of them is of use before the first step of the environment. torch itself loads parts of _functorch.
LATER = {"wandb", "tensorboard", "matplotlib", "plotly", "scipy", "av", "rich", "hydra", "sympy", "PIL"} | {
    "torch._dynamo",
    "torch._inductor",
    "torch.utils.tensorboard",
    "pandas",
    "joblib",
    "submitit",
}
# Nor these before it is known what to run: they come with the run's own process.
IN_THE_RUN = (LATER - {"hydra"}) | {"torch", "numpy", "gymnasium", "mujoco", "xxhash"}

IN_THE_FIRST_STEP = """
import os, sys
leave = os._exit  # which the run takes for a failure
import rltemplate.envs.envs
{before}
def first(self, action):
    print(*sys.modules)
    sys.stdout.flush()
    leave(0)
rltemplate.envs.envs.Codec.decode_action = first
from rltemplate.train import main
sys.exit(main())
"""

AT_THE_HANDOVER = """
import os, runpy, sys
def handover(*arguments):
    print({shown})
    sys.stdout.flush()
    os._exit(0)
os.execve = handover
sys.argv = [{script!r}, *{words!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def printed(program: str, folder: Path, environment: dict[str, str]) -> set[str]:
    """The last line that a fresh interpreter prints, word by word."""
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def loaded_by_the_run(words: Sequence[str], folder: Path, before: str = "") -> set[str]:
    """The modules in a run's own process when it takes the first step of its environments."""
    quiet = ["logger=local", "local=null", "total_env_steps=1", f"run_dir={folder / 'run'}"]
    (config,) = preflight([*words, *quiet]).configs
    run_dir = str(folder / "run")
    # Of a snapshot there is nothing to be had, and the repository stays as it is.
    nothing = json.dumps({"problem": "not taken"})
    job = Job(config=to_dict(config), run_id="r", run_dir=run_dir, command=[], overrides=[], snapshot=nothing)
    environment = worker_environment(job, config, os.environ)
    return printed(IN_THE_FIRST_STEP.format(before=before), folder, environment)


def loaded_by_the_command(words: Sequence[str], folder: Path) -> set[str]:
    """The modules in the process of the command when it hands over to the run's own."""
    program = AT_THE_HANDOVER.format(
        script=str(ROOT / "scripts" / "train.py"), words=list(words), shown="*sys.modules"
    )
    return printed(program, folder, dict(os.environ))


@pytest.mark.parametrize("words", ["algo=ppo env=CartPole", "algo=sac env=Hopper"])
def test_before_its_first_step_a_run_loads_only_what_it_needs(words: str, tmp_path: Path) -> None:
    loaded = loaded_by_the_run(words.split(), tmp_path)
    assert {"torch", "gymnasium", "rltemplate.run.logger"} <= loaded  # it is the list of what was loaded
    assert sorted(LATER & loaded) == []


def test_a_run_that_loads_more_is_noticed(tmp_path: Path) -> None:
    loaded = loaded_by_the_run(["algo=ppo"], tmp_path, before="import PIL.Image, torch._dynamo")
    assert {"PIL", "torch._dynamo"} <= LATER & loaded


def test_the_command_loads_only_what_it_takes_to_refuse(tmp_path: Path) -> None:
    for words in (["algo=sac", "env=Hopper"], ["seed=3", "env.num_envs=2"]):
        loaded = loaded_by_the_command([*words, f"run_dir={tmp_path / 'run'}"], tmp_path)
        assert {"hydra", "rltemplate.config.cli.preflight"} <= loaded
        assert sorted(IN_THE_RUN & loaded) == []
    # A pair of which nobody knows whether it fits is tried, and what is loaded for that is noticed.
    loaded = loaded_by_the_command(["env=MountainCarContinuous-v0", f"run_dir={tmp_path / 'run'}"], tmp_path)
    assert sorted(IN_THE_RUN & loaded) == ["gymnasium", "numpy"]


def test_the_run_is_what_hydra_would_have_started(tmp_path: Path) -> None:
    words = [
        "algo=sac",
        "env=Hopper",
        "seed=5",
        "note=a b",
        "hydra/launcher=basic",
        "algo.hidden_sizes=[8,8]",
    ]
    jobs = []
    for flags in ([], ["--run"]):  # with a flag the command goes all the way through Hydra
        line = [str(ROOT / "scripts" / "train.py"), *words, *flags, "runs_dir=somewhere"]
        program = AT_THE_HANDOVER.format(script=line[0], words=line[1:], shown="arguments[2]")
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True
        )
        jobs.append(json.loads(ast.literal_eval(done.stdout)[JOB_VARIABLE]))
    direct, through = jobs
    assert direct["overrides"] == [*words[:3], 'note="a b"', words[5], "runs_dir=somewhere"]
    assert direct["run_dir"].startswith(str(tmp_path / "somewhere" / "sac-Hopper"))
    for job in jobs:
        del job["run_id"], job["run_dir"], job["command"]
    assert direct == through


@pytest.mark.parametrize(
    "setting",
    [
        "output_subdir: .hydra",
        "job: {chdir: true}",
        "job: {env_set: {A: b}}",
        "run: {dir: elsewhere}",
        "job_logging: {root: {level: INFO}}",
        "callbacks: {a: {_target_: hydra.experimental.callback.Callback}}",
    ],
)
def test_what_hydra_is_told_to_do_is_left_to_hydra(
    setting: str, fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = shutil.copytree(fork / "conf", tmp_path / "conf")
    for module in ("composition", "groups", "keys", "overrides"):
        if hasattr(sys.modules[f"rltemplate.config.cli.{module}"], "CONF"):
            monkeypatch.setattr(f"rltemplate.config.cli.{module}.CONF", conf)
    monkeypatch.setattr("rltemplate.config.cli.preflight.CONF", conf)
    monkeypatch.chdir(tmp_path)
    assert preflight([]).alone is not None
    assert preflight(["--run"]).alone is None
    local = conf / "local" / "default.yaml"
    local.parent.mkdir(exist_ok=True)
    local.write_text(f"# @package _global_\nhydra:\n  {setting}\n")
    assert preflight([]).alone is None


def test_the_time_to_the_first_step_leaves_nothing_behind(fork: Path) -> None:
    refs, there = git(fork, "for-each-ref"), sorted(fork.iterdir())
    start = time_to_first_step(["logger=none"], project=fork)
    assert start.wall_s > 0.1
    assert start.cpu_s > 0.1
    # Of a command that starts the run instead of becoming it, the times are those of the run as well.
    below = (sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", sys.executable)
    below_it = time_to_first_step(["logger=none"], [*below, str(fork / "scripts" / "train.py")], fork)
    assert below_it.cpu_s > start.cpu_s / 3
    assert git(fork, "for-each-ref") == refs
    assert sorted(fork.iterdir()) == there
    with pytest.raises(MeasurementError, match="did you mean CartPole"):
        time_to_first_step(["env=CartPol"], project=fork)


# --- Commands that look at runs ----------------------------------------------------------------------------

# What each of them is given: two recorded runs under runs/.
LOOKING = {
    "runs": ["sort=-return"],
    "compare": ["a={a}", "b={b}"],
    "diff": ["a={a}", "b={b}"],
    "stats": ["runs=runs/*/*"],
    "report": ["runs=runs/*/*", "out=page.html"],
    "curves": ["runs=runs/*/*", "out=figures"],
}
# These start runs or compute.
COMPUTING = {"resume", "evaluate", "golden", "prove", "reproduce"}

AT_THE_END = """
import sys
from rltemplate.__main__ import main
status = main({words!r})
print("")
print("status", status, *sys.modules)
"""


@pytest.fixture(scope="module")
def two_runs(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/ in it, where one recorded run lies twice, with another seed."""
    folder = tmp_path_factory.mktemp("looked-at")
    words = ["total_env_steps=512", "eval_episodes=1", "video_every=0", "logger=none", "log_every=1"]
    done = run_train(fork, folder, *words, "run_dir=runs/ppo-CartPole/run-a")
    assert done.returncode == 0, done.stderr
    first, second = (folder / "runs" / "ppo-CartPole" / name for name in ("run-a", "run-b"))
    shutil.copytree(first, second)
    config = (second / paths.CONFIG).read_text()
    (second / paths.CONFIG).write_text(config.replace("\nseed: 1\n", "\nseed: 2\n"))
    record = json.loads((second / paths.RECORD).read_text())
    (second / paths.RECORD).write_text(json.dumps(record | {"id": "run-b"}))
    return folder


def loaded_by_a_command(name: str, words: Sequence[str], folder: Path) -> set[str]:
    """All that a command prints last: its exit status, and the modules that it has loaded."""
    filled = [name, *(word.format(a="run-a", b="run-b") for word in words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return printed(AT_THE_END.format(words=filled), folder, environment)


@pytest.mark.parametrize("name", LOOKING)
def test_a_command_that_looks_at_runs_loads_no_torch(name: str, two_runs: Path) -> None:
    loaded = loaded_by_a_command(name, LOOKING[name], two_runs)
    assert {"status", "0"} <= loaded
    assert sorted({"torch", "hydra", "omegaconf", "gymnasium"} & loaded) == []


def test_a_command_that_loads_torch_is_noticed(two_runs: Path) -> None:
    loaded = loaded_by_a_command("evaluate", ["run={a}", "episodes=1"], two_runs)
    assert {"status", "0", "torch"} <= loaded


def test_every_command_is_known_to_look_or_to_compute() -> None:
    assert sorted(COMMANDS) == sorted([*LOOKING, *COMPUTING])
