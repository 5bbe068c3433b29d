#!/usr/bin/env python3
"""Go on with a run that ended early: `python scripts/resume.py run=RUN [total_env_steps=N] [accept=changes]`.

The run goes on in its folder from its newest whole checkpoint, and becomes the run that it would have been.
`total_env_steps` may grow. `accept=changes` goes on although code or libraries have changed since it began.
`env.num_workers=N` steps its environments in that many processes beside its own: the numbers are the same.

Exit status: as of training; 0 also for a run that has finished already.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# Until the run's own process takes over there is nothing to save: Ctrl-C ends this one at once.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.config.command_args import (  # noqa: E402
    Kinds,
    parse_words,
    readable,
    whole,
)
from rltemplate.launch.process import become  # noqa: E402
from rltemplate.launch.resume import resume_job  # noqa: E402
from rltemplate.run import paths  # noqa: E402
from rltemplate.run.continuation import ACCEPT  # noqa: E402
from rltemplate.types import ConfigError  # noqa: E402


def changes(text: str) -> bool:
    """The kind of `accept=changes`."""
    if text != ACCEPT:
        raise ConfigError(f"did you mean {ACCEPT}? allowed: {ACCEPT}")
    return True


def find(text: str, runs_dir: Path) -> Path:
    """The folder of a run; `ConfigError` says what to do for a sweep."""
    try:
        return paths.find_run(text, runs_dir)
    except ConfigError:
        sweeps = runs_dir / paths.SWEEPS
        if paths.safe_name(text) == text and any(runs_dir.glob(f"*/*{text}*/{paths.RECORD}")):
            raise  # it stands for several runs
        if paths.safe_name(text) == text and any(sweeps.glob(f"*{text}*/{paths.SWEEP_INDEX}")):
            raise ConfigError(f"run={text}: is a sweep; give its command again, with sweep=resume") from None
        raise


WORKERS = "env.num_workers"


KINDS: Kinds = {
    "run": str,
    "total_env_steps": whole(1),
    "accept": changes,
    WORKERS: whole(0),
    "runs_dir": str,
}


def main(argv: list[str]) -> int:
    """Check, then become the process of the run."""
    try:
        given = parse_words(argv, KINDS, required=["run"])
        run_dir = find(given["run"], Path(given.get("runs_dir", "runs")))
        job = resume_job(
            run_dir,
            sys.argv,
            given.get("total_env_steps"),
            accept="accept" in given,
            num_workers=given.get(WORKERS),
        )
        if job is None:
            print(f"{run_dir.name} has finished already; a larger total_env_steps= goes on with it")
            return 0
        become(job)
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
