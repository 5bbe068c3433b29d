"""Every command: `python -m runlab COMMAND key=value ...`.

Each command is a module with its arguments as a dataclass `Args`, and a function `main` that returns the exit
status. `python -m runlab help` lists them.
"""

from __future__ import annotations

import errno
import inspect
import sys
from importlib import import_module
from typing import Any

from runlab.config.command_args import exit_status, parse, program, usage
from runlab.config.terminal import drop_output, escape_output
from runlab.config.texts import choose, readable
from runlab.errors import ConfigError
from runlab.launch.subprocesses import Interrupted

_DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
COMMANDS = {
    "train": "launch.command",
    "resume": "launch.resume",
    "search": "launch.search",
    "evaluate": "rerun.commands.evaluate",
    "film": "rerun.commands.film",
    "runs": "analysis.commands.runs",
    "diff": "analysis.commands.diff",
    "compare": "rerun.commands.compare",
    "stats": "analysis.commands.stats",
    "report": "analysis.commands.report",
    "prove": "rerun.prove",
    "reproduce": "rerun.reproduce",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command `argv`, by default the arguments of this process; its exit status.

    Mistakes and signals bring a line or two on standard error.
    """
    escape_output()
    status = 0  # also if the reader of a pipe has closed it, as in `runs | head`
    try:
        status = exit_status(lambda: _run(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except Interrupted as stopped:
        print("interrupted, so there is no answer", file=sys.stderr)
        status = 128 + stopped.number
    except BrokenPipeError:
        pass
    except OSError as error:
        if error.errno not in _DISK_REFUSES:
            raise
        text = f"error: {error.filename or 'a file, or the output,'} cannot be written: {error.strerror}"
        print(readable(text), file=sys.stderr)
        status = 1
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            drop_output()
    return status


def _run(argv: list[str]) -> int:
    name, *words = argv or ["help"]
    if name in ("help", "--help", "-h"):
        print(_help())
        return 0
    if name not in COMMANDS:
        from runlab.config.project import as_typed  # may raise an error for the user

        raise ConfigError(f"{name}: no such command; {choose(name, [*COMMANDS, 'help'], as_typed('help'))}")
    module = _module(name)
    if "--help" in words or "-h" in words:
        print(usage(name, module.Args))
        return 0
    args = parse(words, module.Args)
    status: int = module.main(args)
    return status


def _help() -> str:
    first = {name: (inspect.getdoc(_module(name).Args) or "").partition("\n")[0] for name in COMMANDS}
    lines = [f"  {name:12}{line}" for name, line in first.items()]
    head = f"usage: {' '.join(program('COMMAND', '[key=value ...]', '[--help]'))}"
    return "\n".join([head, *lines])


def _module(name: str) -> Any:
    return import_module(f"{__package__}.{COMMANDS[name]}")


if __name__ == "__main__":
    sys.exit(main())
