"""Numbers and a picture of recorded runs: `python scripts/curves.py [runs=GLOB] [by=KEY] [out=FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.analysis import curves
from rltemplate.run import paths
from rltemplate.types import ConfigError
from rltemplate.words import parse_words


def main(argv: list[str]) -> int:
    """Write `curves.csv`, `curves.md` and `curves.png`, and print the table."""
    try:
        given = parse_words(argv, {"runs": str, "out": str, "by": str})
        pattern, out = given.get("runs", "runs/*/*"), Path(given.get("out", "results"))
        root = Path(Path(pattern).anchor or ".")
        records = sorted(root.glob(f"{Path(pattern).relative_to(root)}/{paths.RECORD}"))
        if not records:
            raise ConfigError(f"runs={pattern}: no run folder matches")
        points = curves.read_runs((record.parent for record in records), given.get("by"))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    curves.write_csv(points, out / "curves.csv")
    (out / "curves.md").write_text(curves.table(points))
    curves.draw(points, out / "curves.png")
    print(curves.table(points))
    print(f"written: {out}/curves.csv, curves.md and curves.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
