"""A run begins to learn soon: by what is loaded before its first step, and not by seconds, which vary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from runlab.config.cli.preflight import preflight
from runlab.launch.process import worker_environment
from runlab.run.job import Job

# None of them is of use before the first step of the environment. torch itself loads parts of _functorch.
LATER = {"wandb", "tensorboard", "matplotlib", "scipy", "av", "rich", "hydra", "sympy", "PIL"}
LATER |= {"torch._dynamo", "torch._inductor", "torch.utils.tensorboard", "pandas", "joblib", "submitit"}
IN_THE_FIRST_STEP = """
import posix, sys
import runlab.envs.codec
def first(self, action):
    print(*sys.modules)
    sys.stdout.flush()
    posix._exit(0)  # os._exit would fail the run
runlab.envs.codec.FlatCodec.decode_action = first
from runlab.launch.worker import main
sys.exit(main())
"""


def test_before_its_first_step_a_run_loads_only_what_it_needs(tmp_path: Path) -> None:
    words = ["algo=sac", "env=Hopper", "logger=local", "local=null", "total_env_steps=1"]
    run_dir = str(tmp_path / "run")
    (config,) = preflight([*words, f"run_dir={run_dir}"]).configs
    # No snapshot is taken, and the repository stays as it is.
    nothing = json.dumps({"problem": "not taken"})
    job = Job(config=config, run_id="r", run_dir=run_dir, command=[], overrides=[], snapshot=nothing)
    command = [sys.executable, "-P", "-c", IN_THE_FIRST_STEP]
    done = subprocess.check_output(command, env=worker_environment(job, os.environ), text=True)
    loaded = set(done.splitlines()[-1].split())
    assert {"torch", "gymnasium", "runlab.run.logger"} <= loaded  # it is the list of what was loaded
    assert sorted(LATER & loaded) == []
