"""Where two recorded runs part: `python scripts/compare.py a=RUN b=RUN [zoom=true] [--json]`.

`zoom=true` runs both again up to there, from the last checkpoint that both have, and names the numbers and
the operation that made the difference; `zoom=start` does so from the beginning, and `keep=FOLDER` keeps the
tensors.

Exit status: 0 identical, 1 diverged or one ends earlier, 2 not comparable, 130 or 143 interrupted.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.analysis import compare
from rltemplate.config.command_args import (
    Kinds,
    folder,
    one_of,
    parse_words,
    readable,
)
from rltemplate.launch.subprocesses import Interrupted
from rltemplate.run import paths
from rltemplate.types import ConfigError


def main(argv: list[str]) -> int:
    """Print the first divergence, what to look at, and what else differs."""
    try:
        kinds: Kinds = {
            "a": str,
            "b": str,
            "zoom": one_of("true", "false", "start"),
            "keep": folder,
            "runs_dir": str,
        }
        given = parse_words(argv, kinds, required=["a", "b"], flags=["--json"])
        runs_dir, wanted, as_json = (
            Path(given.get("runs_dir", "runs")),
            given.get("zoom", "false"),
            "--json" in given,
        )
        if "keep" in given and wanted == "false":
            raise ConfigError(f"keep={given['keep']}: there is nothing to keep without zoom=true")
        comparison = compare.compare_runs(*(_find(key, given[key], runs_dir) for key in ("a", "b")))
        closer = {} if wanted == "false" else _zoom(comparison, wanted, given.get("keep"))
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print("interrupted, so nothing was looked at more closely", file=sys.stderr)
        return 128 + stopped.number
    if as_json:
        print(json.dumps(asdict(comparison) | {key: found for key, (found, _) in closer.items()}))
    else:
        text = "\n\n".join([compare.report(comparison), *(text for _, text in closer.values())])
        # A difference, which is the exit status too, is the last line as well.
        differs = comparison.verdict == compare.DIVERGED
        print("\n\n".join([text, text.partition("\n")[0]]) if differs else text)
    return 0 if comparison.verdict == compare.IDENTICAL else 1


def _zoom(
    comparison: compare.Comparison, wanted: str, keep: Path | None
) -> dict[str, tuple[dict[str, Any] | None, str]]:
    """What a closer look finds, for JSON and as text; nothing where the runs do not part."""
    if comparison.verdict != compare.DIVERGED:
        return {"zoom": (None, f"zoom: {comparison.verdict}, so there is nothing to zoom in on")}
    from rltemplate.rerun import zoom

    found = zoom.zoom_in(
        comparison,
        from_start=wanted == "start",
        keep=keep,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    return {"zoom": (asdict(found), zoom.report(found))}


def _find(key: str, text: str, runs_dir: Path) -> Path:
    try:
        return paths.find_run(text, runs_dir)
    except ConfigError as error:
        raise ConfigError(f"{key}={str(error).removeprefix('run=')}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
