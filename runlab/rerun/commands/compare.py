"""`make compare`: the first divergence of two runs."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from runlab.analysis import compare
from runlab.config.command_args import argument, runs_folder, switch
from runlab.config.project import as_typed
from runlab.config.texts import from_here
from runlab.run.files import strict_json
from runlab.run.read import find_run


@dataclass(frozen=True, kw_only=True)
class Args:
    """First divergence of two traced runs: a=RUN b=RUN [zoom=true].

    `zoom=true` runs both again up to there, from the last checkpoint that both have, and names the numbers
    and the operation that made the difference. It runs the recorded code, as `make reproduce` does: one that
    came from elsewhere needs `trust=true`.
    Exit status: 0 identical, 1 diverged or one ends earlier, 2 not comparable, 130 or 143 interrupted.
    """

    a: str = argument()
    b: str = argument()
    zoom: bool = argument(switch, False)
    trust: bool = argument(switch, False)
    runs_dir: Path = argument(runs_folder, Path("runs"))
    json: bool = argument(switch, False)


def main(args: Args) -> int:
    """Print the first divergence, advice, and other differences."""
    a, b = (find_run(text, args.runs_dir, key) for key, text in (("a", args.a), ("b", args.b)))
    if a == b:
        print(f"note: a and b are the same run, {a.name}", file=sys.stderr)
    comparison = compare.compare_runs(a, b)
    document, diverged = asdict(comparison), comparison.verdict == compare.DIVERGED
    if not args.json:
        print(compare.report(comparison), flush=True)
    if args.zoom:
        document["zoom"], text = None, f"zoom: {comparison.verdict}, so there is nothing to zoom in on"
        if diverged:
            from runlab.rerun import zoom, zoom_report

            result = zoom.zoom_in(comparison, trust=args.trust)
            document["zoom"], text = asdict(result), zoom_report.report(result)
        if not args.json:
            print(f"\n{text}")
    if args.json:
        print(strict_json(document))
    elif diverged:
        if not args.zoom:
            print(f"\ncloser: {as_typed('compare')} a={from_here(a)} b={from_here(b)} zoom=true")
        print(f"\n{compare.headline(comparison)}")  # a difference, the exit status, is the last line
    return 0 if comparison.verdict == compare.IDENTICAL else 1
