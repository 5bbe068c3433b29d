"""First ratios of PPO runs as a table: `python scripts/ratios.py runs=GLOB [out=FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.analysis.ratios import table
from rltemplate.run import paths
from rltemplate.types import ConfigError
from rltemplate.words import parse_words


def main(argv: list[str]) -> int:
    """Print the table, and write it where asked."""
    try:
        given = parse_words(argv, {"runs": str, "out": str}, required=["runs"])
        folders = [path.parent for path in sorted(Path().glob(f"{given['runs']}/{paths.RECORD}"))]
        if not folders:
            raise ConfigError(f"runs={given['runs']}: no run folders there")
        text = table(folders)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    if "out" in given:
        Path(given["out"]).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
