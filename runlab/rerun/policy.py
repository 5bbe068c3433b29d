"""The policy of a run or a file, ready to act."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runlab.config.loading import about_added, complete, to_dict
from runlab.config.project import project
from runlab.config.schema import Config, Device
from runlab.envs.make import check_env
from runlab.interfaces import Algorithm, Environments
from runlab.run.checkpoint import load_chosen
from runlab.run.files import to_stderr
from runlab.run.limits import OF_TRAINING, check_networks, load_to_act
from runlab.run.read import LAST
from runlab.run.trust import check_config


def load_policy(
    run_dir: Path, wanted: str = LAST, trust: bool = False
) -> tuple[Config, Algorithm, Environments]:
    """The configuration of a run and a policy, ready to act in a process of its own.

    `wanted` is a value of `checkpoint=`. `ConfigError` for a policy that cannot act, and without `trust` for
    one that names code from elsewhere (run/trust.py).
    """
    checkpoint = load_chosen(run_dir, wanted)
    config, added = complete(checkpoint.config)
    if added:
        to_stderr(about_added(run_dir.name, added))
    if not trust:
        check_config(to_dict(config), run_dir)
    check_networks(config.algo, checkpoint.state, f"{checkpoint.path}")
    env = replace(config.env, num_envs=1, num_workers=0)
    plain = replace(config, algo=config.algo.for_acting(), env=env, compile=False, device=Device.cpu)
    codec = check_env(plain.env)  # whatever it raises is said in a line
    inputs = 0 if getattr(codec, "image_shape", ()) else codec.obs_size
    check_networks(config.algo, checkpoint.state, f"{checkpoint.path}", inputs)
    algorithm, envs = project().build(plain)
    # Random streams belong to the device of the training, and deterministic actions need none.
    state = {name: value for name, value in checkpoint.state.items() if name not in OF_TRAINING}
    load_to_act(algorithm, state, envs.codec.obs_size, config.env.num_envs, f"{checkpoint.path}")
    return config, algorithm, envs
