"""A run begins to learn soon: by what is loaded before its first step, and not by seconds, which vary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from conftest import ROOT

from rltemplate.config.cli.preflight import preflight
from rltemplate.config.loading import to_dict
from rltemplate.launch.process import worker_environment
from rltemplate.run.job import Job

# None of them is of use before the first step of the environment. torch itself loads parts of _functorch.
LATER = {"wandb", "tensorboard", "matplotlib", "scipy", "av", "rich", "hydra", "sympy", "PIL"}
LATER |= {"torch._dynamo", "torch._inductor", "torch.utils.tensorboard", "pandas", "joblib", "submitit"}
# Nor these before it is known what to run: they come with the run's own process.
IN_THE_RUN = (LATER - {"hydra"}) | {"torch", "numpy", "gymnasium", "mujoco", "xxhash"}

IN_THE_FIRST_STEP = """
import os, sys
import rltemplate.envs.envs
{before}
def first(self, action):
    print(*sys.modules)
    sys.stdout.flush()
    os._exit(0)
rltemplate.envs.codec.Codec.decode_action = first
from rltemplate.train import main
sys.exit(main())
"""

AT_THE_HANDOVER = """
import os, runpy, sys
def handover(*arguments):
    print(*sys.modules)
    sys.stdout.flush()
    os._exit(0)
os.execve = handover
sys.argv[1:] = {words!r}
runpy.run_module("rltemplate.launch.command", run_name="__main__")
"""


def printed(program: str, environment: Mapping[str, str]) -> set[str]:
    """The last line that a fresh interpreter prints, word by word."""
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def loaded_by_the_run(words: Sequence[str], folder: Path, before: str = "") -> set[str]:
    """The modules in a run's own process when it takes the first step of its environments."""
    quiet = ["logger=local", "local=null", "total_env_steps=1", f"run_dir={folder}"]
    (config,) = preflight([*words, *quiet]).configs
    # No snapshot is taken, and the repository stays as it is.
    nothing, run_dir = json.dumps({"problem": "not taken"}), str(folder)
    job = Job(config=to_dict(config), run_id="r", run_dir=run_dir, command=[], overrides=[], snapshot=nothing)
    environment = worker_environment(job, config, os.environ)
    return printed(IN_THE_FIRST_STEP.format(before=before), environment)


def loaded_by_the_command(*words: str) -> set[str]:
    """The modules in the process of the command when it hands over to the run's own."""
    return printed(AT_THE_HANDOVER.format(words=words), os.environ | {"PYTHONPATH": str(ROOT)})


def test_before_its_first_step_a_run_loads_only_what_it_needs(tmp_path: Path) -> None:
    loaded = loaded_by_the_run(["algo=sac", "env=Hopper"], tmp_path / "run")
    assert {"torch", "gymnasium", "rltemplate.run.logger"} <= loaded  # it is the list of what was loaded
    assert sorted(LATER & loaded) == []
    more = loaded_by_the_run(["algo=ppo"], tmp_path / "more", before="import PIL.Image, torch._dynamo")
    assert {"PIL", "torch._dynamo"} <= LATER & more


def test_the_command_loads_only_what_it_takes_to_refuse() -> None:
    loaded = loaded_by_the_command("algo=sac", "env=Hopper", "env.num_envs=2", "seed=3")
    assert {"hydra", "rltemplate.config.cli.preflight"} <= loaded
    assert sorted(IN_THE_RUN & loaded) == []
    # A pair of which nobody knows whether it fits is tried, and what is loaded for that is noticed.
    loaded = loaded_by_the_command("env=MountainCarContinuous-v0")
    assert sorted(IN_THE_RUN & loaded) == ["gymnasium", "numpy"]
