#!/usr/bin/env python3
"""Start an experiment: `make new-experiment name=wide-nets algo=sac env=Hopper`.

Writes a file of conf/experiment/ with the values of the recipe as comments, and the commands that run it
beside its baseline.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runlab.config.cli.preflight import preflight  # noqa: E402
from runlab.config.command_args import argument, exit_status, parse  # noqa: E402
from runlab.config.loading import CONF, to_dict  # noqa: E402
from runlab.errors import ConfigError, in_a_line  # noqa: E402
from runlab.launch.checks import check_configs  # noqa: E402
from runlab.run.files import replace_text  # noqa: E402
from runlab.run.job import run_folder  # noqa: E402

_KEYS = ("total_env_steps", "log_every", "eval_every")  # beside those of the algorithm
_TEXT = """\
# @package _global_
# {name}: say in one sentence what is tried, and what you expect of it.
#
# The baseline, the experiment, and both side by side:
#     make train algo={algo} env={env} seed=1,2,3,4,5
#     make train algo={algo} env={env} seed=1,2,3,4,5 experiment={name}
#     make stats runs='runs/{folder}/*' by=experiment
# Change one thing, and say in a comment whose value you take. With `baseline=RUN` a run that differs from RUN
# in more than one thing does not start.

# All values of {algo} with {recipe}. Take the # off the lines that you change, and off the key above them.
{values}
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    name: str = argument()
    algo: str = argument(default="ppo")
    env: str = argument(default="CartPole")


def write(args: Args) -> Path:
    """The new file. Raises ConfigError."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,59}", args.name) or args.name in ("none", "null"):
        raise ConfigError(f"name={args.name}: expected letters, digits, - and _, as in name=wide-nets")
    path = CONF / "experiment" / f"{args.name}.yaml"
    plan = preflight([f"algo={args.algo}", f"env={args.env}"])
    if plan.sweep:
        raise ConfigError(f"algo={args.algo} env={args.env}: an experiment has one of each")
    check_configs(plan.configs)
    config = plan.configs[0]
    values = to_dict(config)
    shown = {key: value for key, value in values["algo"].items() if key != "name"}
    listed = yaml.safe_dump(
        {"algo": shown, **{key: values[key] for key in _KEYS}}, sort_keys=False, default_flow_style=None
    )
    text = _TEXT.format(
        name=args.name,
        algo=args.algo,
        env=args.env,
        folder=run_folder(config, "*", plan.overrides[0]).parent.name,
        recipe=f"recipe {config.recipe}" if config.recipe else f"conf/algo/{args.algo}.yaml",
        values="".join(f"# {line}\n" for line in listed.splitlines()).rstrip(),
    )
    if os.path.lexists(path):
        raise ConfigError(f"name={args.name}: {path.relative_to(ROOT)} is there already")
    with in_a_line(f"{path} cannot be written"):
        path.parent.mkdir(exist_ok=True)
        replace_text(path, [text])
    return path


def main() -> None:
    print(f"written: {write(parse(sys.argv[1:], Args)).relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
