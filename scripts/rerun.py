#!/usr/bin/env python3
"""Run a recorded configuration as it is: `python scripts/rerun.py config=FILE run_dir=FOLDER`.

The stable entry of every recorded tree: `make reproduce` calls the script of the tree that it has checked
out, which may be older or newer than its own. Who only looks at a run is off (console, journal, TensorBoard,
W&B, videos), and no snapshot is taken, for the code is that of a commit already. All else is as recorded.

Exit status: as of training.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Until the run's own process takes over there is nothing to save: Ctrl-C ends this one at once.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.config.command_args import parse, readable, word  # noqa: E402
from rltemplate.config.loading import load_config, to_dict  # noqa: E402
from rltemplate.config.schema import Config  # noqa: E402
from rltemplate.config.validation import check_folder  # noqa: E402
from rltemplate.launch.process import become  # noqa: E402
from rltemplate.run import paths  # noqa: E402
from rltemplate.run.git.snapshot import Snapshot  # noqa: E402
from rltemplate.run.job import Job  # noqa: E402
from rltemplate.types import ConfigError  # noqa: E402


def quiet(config: Config) -> Config:
    """The same run with nobody told about it."""
    wandb = replace(config.logger.wandb, enabled=False)
    logger = replace(config.logger, console=False, journal=False, tensorboard=False, wandb=wandb)
    return replace(config, run_dir=None, logger=logger, video_every=0)


@dataclass(frozen=True, kw_only=True)
class Args:
    """A configuration to run, and where."""

    config: Path = word(Path)
    run_dir: str = word()


def main(argv: list[str]) -> int:
    """Check, then become the process of the run."""
    try:
        args = parse(argv, Args)
        config = quiet(load_config(args.config))
        check_folder(replace(config, run_dir=args.run_dir))
        run_dir = Path(args.run_dir).expanduser().absolute()
        told: dict[str, Any] = {
            "command": sys.argv,
            "overrides": [],
            "snapshot": Snapshot(problem="a recorded configuration run again, from a commit").to_json(),
        }
        run_id = paths.new_id(f"seed{config.seed}")
        values = to_dict(replace(config, run_dir=str(run_dir)))
        become(Job(config=values, run_id=run_id, run_dir=str(run_dir), **told))
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
