"""All recorded runs: `python scripts/runs.py [KEY=VALUE ...] [sort=KEY] [show=KEY,KEY] [last=N] [--json]`.

KEY=VALUE keeps the runs that have this value: a column of the table, a key of the configuration or the
record, or a metric. `env=Half*`, `seed=1,2`, `return='>3000'` and `status='!=finished'` work as well.
`sort=-KEY` puts the highest first, `last=N` keeps the N that began last, `runs_dir=DIR` looks elsewhere.

--json prints one list, an object for each run: the columns as they are recorded, those of `show=`, `dirty`,
and the folder as `dir`, where the rest lies.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.analysis import run_table
from rltemplate.analysis.runs import Run
from rltemplate.config.command_args import (
    Kinds,
    parse_words,
    readable,
    whole,
)
from rltemplate.types import ConfigError

_KINDS: Kinds = {"sort": str, "show": str, "last": whole(1), "runs_dir": str}
_STYLES = {"finished": "green", "failed": "red", "interrupted": "yellow", "running": "cyan"}


def main(argv: list[str]) -> int:
    """Print the table."""
    try:
        own, filters = _split(argv)
        given = parse_words(own, _KINDS, flags=["--json"])
        asked = "runs_dir" in given
        runs_dir = Path(given.get("runs_dir", "runs"))
        all_runs, problems = _find(runs_dir, asked)
        for problem in problems:
            print(f"note: {problem if problem.isprintable() else repr(problem)}", file=sys.stderr)
        names = run_table.columns(all_runs, [name for name in given.get("show", "").split(",") if name])
        runs = run_table.select(all_runs, filters)[-given.get("last", len(all_runs) or 1) :]
        if "sort" in given:
            chosen = {run.dir for run in runs}
            runs = [run for run in run_table.order(all_runs, given["sort"]) if run.dir in chosen]
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    if "--json" in given:
        print(json.dumps(run_table.objects(runs, names), default=str))
    elif not all_runs:
        print(f"no runs under {runs_dir} yet")
    elif not runs:
        words = " ".join(f"{key}={text}" for key, text in filters)
        print(f"no run fits {readable(words, argv)}; there are {len(all_runs)} under {runs_dir}")
    else:
        _show(runs, names)
    return 0


def _split(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Words that say how to show, and filters, of which one key may have several."""
    own: list[str] = []
    filters: list[tuple[str, str]] = []
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals or key in _KINDS or key.startswith("-") or not key.strip():
            own.append(word)
        elif not text.strip():
            raise ConfigError(f"{word}: a value is missing after '='")
        else:
            filters.append((key.strip(), text.strip()))
    return own, filters


def _find(runs_dir: Path, asked: bool) -> tuple[list[Run], list[str]]:
    try:
        there = runs_dir.expanduser()
        if there.is_dir():
            return run_table.find_runs(there)
    except (OSError, RuntimeError):  # longer than any name, or ~somebody whom this machine does not know
        pass
    if asked:
        raise ConfigError(f"runs_dir={runs_dir}: there is no such folder")
    return [], []


def _show(runs: Sequence[Run], names: Sequence[str]) -> None:
    rows = run_table.cells(runs, names)
    lines = list(run_table.lines(names, rows))
    if not sys.stdout.isatty():
        print("\n".join(lines))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for i, name in enumerate(names):
        numeric = run_table.is_numeric(rows, i)
        table.add_column(Text(name), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in row))
    # An id that was broken or cut could not be copied: on a narrow terminal its own line breaks are better.
    console = Console()
    console.width = max(console.width, max(map(len, lines)))
    console.print(table)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # as in `make runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
