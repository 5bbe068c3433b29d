#!/usr/bin/env python3
"""Train: `python scripts/train.py algo=sac env=Hopper seed=3`; a list of values makes it a sweep.

The command of a sweep with `sweep=resume` added to it goes on with that sweep. With `debug=here` the run
stays in this process, for a debugger.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

# Until the run's own process takes over there is nothing to save: Ctrl-C ends this one at once.
signal.signal(signal.SIGINT, lambda *_, leave=os._exit: leave(130))
# Nothing that is imported is garbage, and looking for some meanwhile takes a tenth of the start.
gc.disable()
# The code beside this file, whichever copy is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hydra  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from rltemplate.config.loading import CONF  # noqa: E402
from rltemplate.launch import command  # noqa: E402

gc.enable()
COMMAND = list(sys.argv)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def start_job(composed: DictConfig) -> float | None:
    """One job of a sweep, as Hydra composed it."""
    return command.start_job(composed)


def run_here() -> int:
    """Train in this process."""
    from rltemplate.train import main

    return main()


if __name__ == "__main__":
    sys.exit(command.main(COMMAND, start_job, run_here))
