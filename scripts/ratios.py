"""First ratios of PPO runs as a table: `python scripts/ratios.py runs=GLOB [out=FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.analysis.ratios import table
from rltemplate.config.command_args import parse_words, readable
from rltemplate.run.read import find_run_dirs
from rltemplate.types import ConfigError


def main(argv: list[str]) -> int:
    """Print the table, and write it where asked."""
    try:
        given = parse_words(argv, {"runs": str, "out": str}, required=["runs"])
        text = table(find_run_dirs(given["runs"]))
        if "out" in given:
            try:
                Path(given["out"]).write_text(text)
            except OSError as error:
                raise ConfigError(f"out={given['out']}: cannot be written, {error.strerror}") from error
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
