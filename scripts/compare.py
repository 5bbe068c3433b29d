"""Where two recorded runs part: `python scripts/compare.py a=RUN b=RUN [--json]`.

Exit status: 0 identical, 1 diverged or one ends earlier, 2 not comparable.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.analysis import compare
from rltemplate.run import paths
from rltemplate.types import ConfigError
from rltemplate.words import parse_words


def main(argv: list[str]) -> int:
    """Print the first divergence, what to look at, and what else differs."""
    as_json = "--json" in argv
    try:
        words = [word for word in argv if word != "--json"]
        given = parse_words(words, {"a": str, "b": str, "runs_dir": str}, required=["a", "b"])
        runs_dir = Path(given.get("runs_dir", "runs"))
        comparison = compare.compare_runs(*(_find(key, given[key], runs_dir) for key in ("a", "b")))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(comparison)) if as_json else compare.report(comparison))
    return 0 if comparison.verdict == compare.IDENTICAL else 1


def _find(key: str, text: str, runs_dir: Path) -> Path:
    try:
        return paths.find_run(text, runs_dir)
    except ConfigError as error:
        raise ConfigError(f"{key}={str(error).removeprefix('run=')}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
