"""What was changed between two runs: `python scripts/diff.py a=RUN b=RUN [code=full|names|none] [--json]`.

Configuration, code, versions, hardware and settings that differ, the last metrics side by side, and how many
things were changed; if more than one, a warning. `code=full` shows the whole `git diff` of the two snapshots,
`names` the files; without `code=` a short diff is shown and of a long one the names.

--json prints one object; `diff` in it is the text, null unless code=full.

Exit status: 0, whatever differs; 2 for a wrong call.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.analysis import diff
from rltemplate.analysis.runs import Run, load_run
from rltemplate.config.command_args import (
    Kinds,
    one_of,
    parse_words,
    readable,
)
from rltemplate.run import paths
from rltemplate.run.git import changes
from rltemplate.types import ConfigError

PROJECT = Path(__file__).resolve().parents[1]
SHORT = 200  # lines of a diff that is shown unasked


def main(argv: list[str]) -> int:
    """Print what differs, and how many things that are."""
    try:
        kinds: Kinds = {"a": str, "b": str, "code": one_of("full", "names", "none"), "runs_dir": str}
        given = parse_words(argv, kinds, required=["a", "b"], flags=["--json"])
        runs_dir, shown = Path(given.get("runs_dir", "runs")), given.get("code")
        a, b = (_load(key, given[key], runs_dir) for key in ("a", "b"))
        old, new = (run.record.get("git") or {} for run in (a, b))
        found = diff.compare_records(a, b, changes.files_between(PROJECT, old, new))
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    as_json = "--json" in given
    text = None
    if found.changed_files and (shown == "full" or (shown is None and not as_json)):
        text = changes.text_between(PROJECT, old, new, color=sys.stdout.isatty() and not as_json)
    if as_json:
        print(json.dumps(diff.to_dict(found) | {"diff": text}, default=str))
    else:
        print(diff.report(found, _code(found, shown, text)))
    return 0


def _code(found: diff.Difference, shown: str | None, text: str | None) -> str | None:
    """What the report has of the code: the diff, the names of the files (None), or nothing."""
    if shown == "none":
        return "  not shown"
    if shown is None and text is not None and text.count("\n") > SHORT:
        return f"{diff.file_names(found)}\n  code=full shows the {len(text.splitlines()):,} lines of the diff"
    return text if text is None else text.rstrip("\n")


def _load(key: str, text: str, runs_dir: Path) -> Run:
    try:
        return load_run(paths.find_run(text, runs_dir))
    except ConfigError as error:
        said = str(error)
        raise ConfigError(f"{key}={said[4:]}" if said.startswith("run=") else said) from None


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # as in `make diff | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
