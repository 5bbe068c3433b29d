"""`make curves`: learning curves of runs as numbers and a picture."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from rltemplate.analysis import curves
from rltemplate.config.command_args import make_folder, word
from rltemplate.run.read import find_run_dirs


@dataclass(frozen=True, kw_only=True)
class Args:
    """Learning curves of runs as picture, table and CSV: [runs='runs/*/*'] [by=KEY] [out=results]."""

    runs: str = word(default="runs/*/*")
    out: Path = word(Path, Path("results"))
    by: str | None = word(default=None)


def main(args: Args) -> int:
    """Write `curves.csv`, `curves.md` and `curves.png`, and print the table."""
    points, replaced = curves.read_runs(find_run_dirs(args.runs), args.by)
    make_folder("out", args.out)
    for line in replaced:
        print(f"left out: {line}", file=sys.stderr)
    curves.write_csv(points, args.out / "curves.csv")
    (args.out / "curves.md").write_text(curves.table(points))
    curves.draw(points, args.out / "curves.png")
    print(curves.table(points))
    print(f"written: {args.out}/curves.csv, curves.md and curves.png")
    return 0
