"""Numbers and a picture of runs: `python scripts/curves.py [runs=GLOB,...] [by=KEY] [out=FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.analysis import curves
from rltemplate.config.command_args import make_folder, parse_words, readable
from rltemplate.run.read import find_run_dirs
from rltemplate.types import ConfigError


def main(argv: list[str]) -> int:
    """Write `curves.csv`, `curves.md` and `curves.png`, and print the table."""
    try:
        given = parse_words(argv, {"runs": str, "out": str, "by": str})
        out = Path(given.get("out", "results"))
        points, replaced = curves.read_runs(find_run_dirs(given.get("runs", "runs/*/*")), given.get("by"))
        make_folder("out", out)
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    for line in replaced:
        print(f"left out: {line}", file=sys.stderr)
    curves.write_csv(points, out / "curves.csv")
    (out / "curves.md").write_text(curves.table(points))
    curves.draw(points, out / "curves.png")
    print(curves.table(points))
    print(f"written: {out}/curves.csv, curves.md and curves.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
